"""Tables and pictures of what experiments/objectives.py finds."""

EDGES = (1.0, 3.0, 5.0)  # of the bins of mutual information, nats
THEIRS = "transformers, Trainer"
