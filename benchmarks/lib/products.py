"""The machine's own matrix products as a measure of attention: what share of their rate a call reaches.

Attention is counted in products of L x (M + K) x D multiplications and additions (docs/math.md, *Costs*), as if
every row saw every key.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from xlnet_kernels import _torch

from .harness import seconds
from .problem import Case

OWN, PLAIN = "xlnet_kernels", "plain SDPA"
UNITS = {OWN: {"forward": 3, "backward": 11}, PLAIN: {"forward": 2, "backward": 7}}
SIZES = {"cpu": 1024, "cuda": 4096}  # square matrices: large enough for their best rate, small enough to be asked often
CALLS = 4


class Products:
    """Times of torch's product, and of oneDNN's where torch has another, taken whenever `sample` is called."""

    def __init__(self, case: Case, size: int | None = None) -> None:
        self.device, self.size = case.device, size or SIZES[case.device]
        a, b = (torch.randn(self.size, self.size, dtype=case.dtype, device=case.device) for _ in range(2))
        self.calls: dict[str, Callable] = {"torch.mm": lambda: torch.mm(a, b)}
        if case.device == "cpu" and case.dtype == torch.float32 and _torch.has_onednn_linear():
            self.calls["oneDNN"] = lambda: _torch.onednn_linear(a, b, None)
        self.times: dict[str, list[float]] = {name: [] for name in self.calls}

    def sample(self) -> None:
        with torch.no_grad():
            for name, call in self.calls.items():
                call()
                self.times[name] += [seconds(call, self.device) for _ in range(CALLS)]

    def best(self) -> tuple[str, float]:
        """The fastest by its median, and its floating-point operations a second."""
        medians = {name: statistics.median(times) for name, times in self.times.items()}
        name = min(medians, key=medians.get)
        return name, 2 * self.size**3 / medians[name]


def add_shares(rows: list[dict], case: Case, products: Products) -> None:
    """Adds to rows of this package and of plain SDPA what they reach of the best product's rate."""
    name, rate = products.best()
    unit = 2 * case.batch * case.heads * case.length * (case.mem_len + case.length) * case.head_dim
    for row in rows:
        units = next((units for kind, units in UNITS.items() if row["implementation"].startswith(kind)), None)
        if units is None or "median_ms" not in row:
            continue
        share = units[row["direction"]] * unit / (row["median_ms"] / 1e3) / rate
        row["product"] = {"name": name, "size": products.size, "gflops": round(rate / 1e9, 1), "share": round(share, 3)}
