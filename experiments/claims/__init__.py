"""What the sources of this system claim, each claim an experiment with small models: a file each, for objectives.py."""
