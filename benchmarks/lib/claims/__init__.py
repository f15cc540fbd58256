"""What the sources of this system claim, each claim an experiment with small models: a file each, for objectives.py."""

EDGES = (1.0, 3.0, 5.0)  # of the bins of mutual information, nats
THEIRS = "transformers, Trainer"
