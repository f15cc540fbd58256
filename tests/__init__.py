"""Tests by what they prove; README.md says which folder that is."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
