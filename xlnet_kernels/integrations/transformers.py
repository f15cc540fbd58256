"""Aliases of `accelerate` and `restore` for transformers."""

from __future__ import annotations

from ._accelerate import accelerate, restore
from ._libraries import LIBRARIES

__all__ = ["STAND_INS", "accelerate", "restore"]

# Name of a class of transformers -> module of this package with its stand-in.
STAND_INS = {name: module for name, (module, _) in LIBRARIES[0].classes.items()}
