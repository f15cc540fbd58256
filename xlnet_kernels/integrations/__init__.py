"""Models of other libraries on our operator. Nothing of those libraries is imported before it is asked for."""

from . import transformers

__all__ = ["transformers"]
