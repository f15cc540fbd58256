"""Prediction of a GPU kernel's time from its machine code: no GPU is needed."""
