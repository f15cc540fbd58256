"""covers.py: each value of each parameter stays, in few cases."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import torch

from tests import covers


def item_of(number: int, **given):
    return SimpleNamespace(
        nodeid=f"test[{number}]",
        path="file",
        originalname="test",
        callspec=SimpleNamespace(params=given),
        get_closest_marker=lambda name: None,
    )


def test_each_value_occurs_and_values_vary():
    items = [item_of(n, a=a, b=b, c=c) for n, (a, b, c) in enumerate(product(range(9), range(4), (False, True)))]
    found = covers.cover(items)
    assert len(found) == 9
    for name, count in (("a", 9), ("b", 4), ("c", 2)):
        values = [item.callspec.params[name] for item in found]
        assert len(set(values)) == count and max(map(values.count, values)) <= -(-9 // count) + 1, name


def test_only_interpreted_backends_have_fewer(monkeypatch):
    monkeypatch.setattr(covers, "INTERPRETED", ["slow"])
    monkeypatch.setattr(
        covers, "MODULES", {"slow": SimpleNamespace(DTYPES=(torch.float32,), max_head_dim=lambda d: 128)}
    )
    given = list(product(("slow", "fast"), (torch.float32, torch.float64), (8, 16, 256)))
    items = [item_of(n, backend=backend, dtype=dtype, width=width) for n, (backend, dtype, width) in enumerate(given)]
    items.append(SimpleNamespace(nodeid="plain", get_closest_marker=lambda name: None))
    monkeypatch.setattr(covers, "EVERY_CASE", False)
    kept, dropped = covers.select(items)
    assert [item for item in items if item not in dropped] == kept and items[-1] in kept
    cases = [item.callspec.params for item in kept[:-1]]
    assert sum(case["backend"] == "fast" for case in cases) == 6
    slow = [case for case in cases if case["backend"] == "slow"]
    assert [(case["dtype"], case["width"]) for case in slow] == [(torch.float32, 8), (torch.float32, 16)]
    monkeypatch.setattr(covers, "EVERY_CASE", True)
    assert covers.select(items) == (items, [])


def test_tests_that_are_marked_few_have_fewer_too(monkeypatch):
    items = [item_of(n, a=a, dtype=dtype) for n, (a, dtype) in enumerate(product(range(3), (torch.float32, None)))]
    monkeypatch.setattr(covers, "EVERY_CASE", False)
    assert covers.select(items) == (items, [])
    for item in items:
        item.get_closest_marker = lambda name: name == "few" or None
    assert [item.callspec.params["a"] for item in covers.select(items)[0]] == [0, 1, 2]
    monkeypatch.setattr(covers, "EVERY_CASE", True)
    assert covers.select(items) == (items, [])


def test_thorough_tests_run_with_every_case_alone(monkeypatch):
    items = [item_of(0), item_of(1)]
    items[1].get_closest_marker = lambda name: name == "thorough" or None
    monkeypatch.setattr(covers, "EVERY_CASE", False)
    assert covers.select(items) == (items[:1], items[1:])
    monkeypatch.setattr(covers, "EVERY_CASE", True)
    assert covers.select(items) == (items, [])
