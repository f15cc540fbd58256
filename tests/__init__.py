"""Tests by what they prove; README.md says which folder that is."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Because the machines that execute GPU kernels are in benchmarks/lib.
sys.path.append(str(ROOT / "benchmarks"))
