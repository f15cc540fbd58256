"""Shared parts of the commands above."""
