"""Claims of the papers, each tested by an experiment with small models in one file, for objectives.py."""
