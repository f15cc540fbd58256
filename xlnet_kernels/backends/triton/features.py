"""Table of the kernels' features by Triton version and GPU, with the reason for each line.

This module does not import Triton. compiler.py has the compiler workarounds needed by every kernel.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import metadata
from typing import NamedTuple

ANY = (80, 90, 100, None)
PACKAGES = ("triton", "pytorch-triton", "triton-windows")  # distributions of the module `triton`


class Feature(NamedTuple):
    """Condition of a feature."""

    since: tuple[int, ...]  # the first version of Triton
    families: tuple[int | None, ...]  # of GPUs (see `family`); None is Triton's interpreter
    reason: str  # for being off elsewhere
    until: tuple[int, int] | None = None  # the last minor version of Triton; None: no last one


# "backend", "backend on sm_100" and "heads over 64 on sm_100" are refused elsewhere, all others are off. tuning.py adds
# conditions on tiles, dtypes and widths of heads.
FEATURES = {
    "backend": Feature((3, 6), ANY, "earlier versions were not tried, earlier GPUs have no table"),
    "backend on sm_100": Feature(
        (3, 7, 1), ANY, "earlier versions leave out fences (PyTorch issue 181248, Triton pull request 10537)"
    ),
    "launch past the binder": Feature(
        (3, 6), ANY, "in later versions a compiled kernel may take other arguments", until=(3, 9)
    ),
    "TF32 with dropout": Feature(
        (3, 8),
        ANY,
        "earlier versions leave out half of a TF32 product over 16 rows, one factor of which dropout has made",
    ),
    "heads over 64 on sm_100": Feature(
        (3, 8), (100,), "3.7.1 compiles backward's walk over rows to 544 columns of tensor memory and more, of 512"
    ),
    "queries in registers": Feature((3, 6), (80, 90), "tcgen05 reads its operands from shared memory"),
    "fragments": Feature((3, 6), (80, 90), "tiles of tcgen05 lie otherwise, and the interpreter has none"),
    "rotation in quads": Feature((3, 9), (80, 90), "earlier versions were not tried; else as fragments"),
    "shift in PTX": Feature(
        (3, 6),
        (90,),
        "on sm_80 shared memory bounds, it would save issue alone; and without a mask Triton 3.9 lays the content "
        "product over columns then, for a third more of that",
    ),
    "late maximum": Feature(
        (3, 6),
        (90, None),
        "sm_100 would spill twice as much; on sm_80 shared memory bounds, and this takes more of it",
    ),
    "one pass": Feature((3, 6), (80, 90, None), "nothing was counted on sm_100"),
}


def family(capability: tuple[int, int]) -> int:
    """The family of GPUs of a compute capability.

    90 and 100: matrix instructions for 64 rows at once (sm_90 wgmma; sm_100, sm_103 and sm_110 tcgen05). 80: all
    others, sm_120 too, which has the instructions of sm_80 for these dtypes.
    """
    return {9: 90, 10: 100, 11: 100}.get(capability[0], 80)


def installed() -> str:
    """Triton's version as its distribution names it; PackageNotFoundError without one."""
    for package in PACKAGES[:-1]:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return metadata.version(PACKAGES[-1])


# Cached, because each launch asks, and reading metadata takes a millisecond.
@cache
def version() -> tuple[int, ...]:
    """The numbers of Triton's version: major, minor and patch; PackageNotFoundError without Triton."""
    return tuple(int(number) for number in re.findall(r"\d+", installed())[:3])


def is_on(name: str, capability: tuple[int, int] | None = None) -> bool:
    """Whether a feature is on for GPUs of a compute capability; with None in Triton's interpreter, or for ANY."""
    feature, found = FEATURES[name], version()
    if found < feature.since or (feature.until is not None and found[:2] > feature.until):
        return False
    return (None if capability is None else family(capability)) in feature.families


def max_head_dim(capability: tuple[int, int] | None) -> int:
    """The largest head_dim on a GPU; capability None: in Triton's interpreter."""
    if capability is None or family(capability) != 100 or is_on("heads over 64 on sm_100", capability):
        return 256
    return 64


def refusal(capability: tuple[int, int] | None = None) -> str | None:
    """The reason to refuse the backend on a GPU, or None; capability None: Triton's interpreter."""
    if capability is not None and capability[0] < 8:
        return f"it needs compute capability 8.0 or newer, this GPU has {capability[0]}.{capability[1]}"
    names = ["backend"] if capability is None or capability[0] < 10 else ["backend", "backend on sm_100"]
    for name in names:
        if not is_on(name, capability):
            where = "" if name == "backend" else f" on sm_{capability[0]}{capability[1]}"  # type: ignore[index]
            least = ".".join(map(str, FEATURES[name].since))
            return f"it needs Triton {least} or newer{where}, found {installed()}"
    return None
