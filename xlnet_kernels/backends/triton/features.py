"""The features of the kernels that depend on Triton's version and on the GPU: one table, with the reason of each line.

Nothing here imports Triton. compiler.py has the tricks on Triton's compiler that every kernel needs.
"""

from __future__ import annotations

from importlib import metadata
from typing import NamedTuple

ANY = (80, 90, 100, None)


class Feature(NamedTuple):
    """Where a feature is on."""

    since: tuple[int, int]  # the first version of Triton
    families: tuple[int | None, ...]  # of GPUs (see `family`); None is Triton's interpreter
    reason: str  # for being off elsewhere


# "backend" is refused elsewhere, all others are off. tuning.py adds conditions on tiles, dtypes and widths of heads.
FEATURES = {
    "backend": Feature((3, 6), ANY, "earlier versions were not tried, earlier GPUs have no table"),
    "TF32 with dropout": Feature(
        (3, 8),
        ANY,
        "earlier versions leave out half of a TF32 product over 16 rows, one factor of which dropout has made",
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


def version() -> tuple[int, int]:
    """The version of Triton that is installed; PackageNotFoundError."""
    major, minor = metadata.version("triton").split(".")[:2]
    return int(major), int(minor)


def is_on(name: str, capability: tuple[int, int] | None = None) -> bool:
    """Whether a feature is on for GPUs of a compute capability; with None in Triton's interpreter, or for ANY."""
    feature = FEATURES[name]
    return version() >= feature.since and (None if capability is None else family(capability)) in feature.families
