"""Modules of other libraries, by the names of their parameters."""
