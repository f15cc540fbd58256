"""Features of the operator's calls, their combinations, and the check of one on the machine."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from itertools import combinations, product
from unittest import mock

import torch

from tests.cases import MASKS, Problem, make
from tests.machine import rounding
from xlnet_kernels.backends import _BACKENDS

CHOICES = {
    "architecture": (80, 90),
    "dtype": (torch.bfloat16, torch.float16, torch.float32),
    "head_dim": (64, 16, 128, 24, 40, 80, 256, 20, 60),
    "mask": MASKS,
    "rel_rows": ("bi", "uni", "window"),
    "rel_batch": (False, True),
    "memory": (False, True),
    "positions": (False, True),
    "segments": (True, False),
    "biases": (True, False),
    "dropout": (False, True),
    "deterministic": (True, False),
    "grad_lse": (False, True),
    "tf32": (False, True),
    "aligned": (False, True),  # lengths are multiples of 16
    "layout": ("contiguous", "projections"),
}


@dataclass(frozen=True)
class Features:
    architecture: int
    dtype: torch.dtype
    head_dim: int
    mask: str | None
    rel_rows: str
    rel_batch: bool
    memory: bool
    positions: bool
    segments: bool
    biases: bool
    dropout: bool
    deterministic: bool
    grad_lse: bool
    tf32: bool
    aligned: bool
    layout: str

    def __str__(self) -> str:
        """A test's name: what is there, and what it is."""
        words = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value is True:
                words.append(field.name)
            elif value is not False and value is not None:
                words.append(f"{field.name}{value}" if isinstance(value, int) else str(value).removeprefix("torch."))
        return "-".join(words)

    def serves(self, backend: str) -> Features:
        """The nearest that the backend serves, in which it has as many pairs."""
        module = _BACKENDS[backend]  # also of one that the machine serves only from call to call
        dtype = self.dtype if self.dtype in (module.DTYPES or (self.dtype,)) else torch.float16
        return replace(self, dtype=dtype, head_dim=min(self.head_dim, module.max_head_dim(dtype) or 256))

    def problem(self, seed: int, rows: int = 100, most_batch: int = 2) -> Problem:
        """A problem with these features, of random sizes: up to `rows` rows and about as many keys."""
        chance = random.Random(seed)

        def size(most: int) -> int:
            number = chance.choice((chance.randint(1, most), chance.randint(max(1, most // 2), most)))
            return max(16, number // 16 * 16) if self.aligned else number + (number % 16 == 0) + (number == 1)

        length = size(rows)
        keys = size(rows) if self.positions else length
        mem, window = size(rows) if self.memory else 0, None
        if self.rel_rows == "window":
            far = chance.randint(1 - keys, mem + keys)
            window = far, chance.randint(1, far + keys)
        problem = make(
            chance.randint(1, most_batch), chance.randint(1, 2), length, keys, mem,
            self.head_dim, window=window, mask=self.mask, rel_rows=self.rel_rows, rel_batch=self.rel_batch,
            biases=self.biases, segments=self.segments, positions=self.positions, dtype=self.dtype, seed=seed,
            extra_distance=chance.choice((None, None, -1, 5)),
        )  # fmt: skip
        if self.layout == "projections":  # (B, L, H, D) in memory, behind query one that is shared with others
            matrices = ("query", "key", "value", "memory_key", "memory_value")
            change = {name: _as_projected(leaf) for name, leaf in problem.leaves.items() if name in matrices}
            problem.leaves |= change
        if self.segments and chance.random() < 0.5:  # long runs of one segment
            at = problem.leaves["memory_key"].shape[2] if self.memory else 0
            problem.key_ids = torch.arange(at + keys).expand(problem.key_ids.shape) // max(1, keys // 2)
            rows_at = problem.options.get("query_positions", torch.arange(length).expand(problem.query_ids.shape))
            problem.query_ids = problem.key_ids.gather(1, rows_at + at)
        dropout = {"dropout_p": chance.choice((0.1, 0.5))} if self.dropout else {}
        if self.biases and chance.random() < 0.3:
            del problem.leaves[chance.choice(("content_bias", "position_bias"))]
        return problem.with_options(deterministic=self.deterministic, **dropout)

    def check(self, backend: str, problem: Problem) -> None:
        """`backend`, wherever it runs now, computes the problem right. Raises AssertionError, or machine.Fault."""
        state = torch.tensor([2**62 + 12345, 2**61 + 2**40 + 77])
        allow = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = self.tf32
        try:
            with mock.patch("xlnet_kernels.dropout.new_state", lambda device: state.to(device)):
                rounding.assert_right(problem, backend, with_lse=self.grad_lse, tf32=self.tf32)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = allow


def _as_projected(x: torch.Tensor) -> torch.Tensor:
    batch, heads, length, width = x.shape
    store = torch.full((batch, length, heads, 2, width), torch.nan, dtype=x.dtype)
    store[:, :, :, 0] = x.transpose(1, 2)
    return store[:, :, :, 0].transpose(1, 2)


def pairwise(seed: int = 0) -> list[Features]:
    """Few combinations, in which every pair of choices occurs; the same in every process."""
    chance, names = random.Random(seed), list(CHOICES)
    # Keys of a dictionary: a set's order differs from process to process.
    missing = {
        ((a, x), (b, y)): None for a, b in combinations(names, 2) for x, y in product(CHOICES[a], CHOICES[b])
    }  # fmt: skip
    found = []
    while missing:
        candidates = [_extend(dict(next(iter(missing))), missing, chance) for _ in range(40)]
        best = max(candidates, key=lambda given: sum(pair in missing for pair in _pairs(given)))
        for pair in _pairs(best):
            missing.pop(pair, None)
        found.append(Features(**best))
    return found


def _pairs(given: dict) -> combinations:
    return combinations(((name, given[name]) for name in CHOICES if name in given), 2)


def _extend(given: dict, missing: dict, chance: random.Random) -> dict:
    """All features, each chosen for the most pairs that are missing, in a random order."""
    for name in chance.sample(list(CHOICES), len(CHOICES)):
        if name not in given:
            choices = chance.sample(CHOICES[name], len(CHOICES[name]))
            given[name] = max(choices, key=lambda value: sum(p in missing for p in _pairs(given | {name: value})))
    return given


def drawn(chance: random.Random) -> Features:
    """Any combination."""
    return Features(**{name: chance.choice(choices) for name, choices in CHOICES.items()})
