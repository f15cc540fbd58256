"""CUDA sources compiled for the host, whose threads run under pseudo-random schedules."""
