"""Fewer cases in `make test`.

On interpreted backends, and where a test is marked `few`, each value of a parameter runs, not each combination. Tests
marked `thorough` do not run.
Pairs of features are in operator/test_pairs_of_features.py. XLNET_KERNELS_EVERY_CASE=1 runs all combinations and
thorough tests, `make test-machine` both.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
import torch

from tests.cases import INTERPRETED, MODULES

EVERY_CASE = any(map(os.environ.get, ("XLNET_KERNELS_EVERY_CASE", "XLNET_KERNELS_MACHINE")))


def select(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The items in their order, and those that are left out."""
    groups: dict[tuple, list[pytest.Item]] = {}
    for item in items:
        backend = parameters(item).get("backend")
        if (backend in INTERPRETED or item.get_closest_marker("few")) and not EVERY_CASE:
            groups.setdefault((item.path, item.originalname, backend), []).append(item)
    dropped = set() if EVERY_CASE else {item.nodeid for item in items if item.get_closest_marker("thorough")}
    for (_, _, backend), group in groups.items():
        served = [item for item in group if backend not in INTERPRETED or is_served(backend, parameters(item))]
        dropped |= {item.nodeid for item in group} - {item.nodeid for item in cover(served)}
    kept = [item for item in items if item.nodeid not in dropped]
    return kept, [item for item in items if item.nodeid in dropped]


def parameters(item: pytest.Item) -> dict[str, object]:
    spec = getattr(item, "callspec", None)
    return {} if spec is None else spec.params


def is_served(backend: str, given: dict[str, object]) -> bool:
    """Whether cases.py would not skip the case for its dtype or width."""
    dtype, width = given.get("dtype"), given.get("width")
    if isinstance(dtype, torch.dtype) and dtype not in (MODULES[backend].DTYPES or (dtype,)):
        return False
    most = MODULES[backend].max_head_dim(dtype) if isinstance(dtype, torch.dtype) else None
    return not isinstance(width, int) or most is None or width <= most


def cover(items: list[pytest.Item]) -> list[pytest.Item]:
    """Few of the items, in which each value of each parameter occurs; of equals that with the rarest values."""
    values = {item.nodeid: {(name, repr(value)) for name, value in parameters(item).items()} for item in items}
    missing: set = set().union(*values.values())
    found, used = [], Counter()
    while missing:
        best = max(items, key=lambda item: (len(values[item.nodeid] & missing), -_uses(values[item.nodeid], used)))
        missing -= values[best.nodeid]
        used.update(values[best.nodeid])
        found.append(best)
    return found


def _uses(values: set, used: Counter) -> int:
    return sum(used[value] for value in values)
