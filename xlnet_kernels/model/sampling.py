"""Sampling of tokens: greedy, or random under temperature, top_k and top_p, reproducible row by row."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._checks import as_python, shortened


class Sampler:
    """Sampler of tokens from scores.

    Every sequence of the batch has its own random numbers (sequence i those of ``seed + i``), drawn on the CPU. So its
    tokens depend neither on the other sequences nor on the device.

    Args:
        batch: B, number of sequences.
        temperature: divides the scores; 0 takes the best token.
        top_k: keep only the k best tokens.
        top_p: of these keep the fewest best tokens whose probabilities sum to p (Holtzman et al. 2020).
        seed: in [0, 2**63); None draws a seed from torch's own generator.

    Raises:
        ValueError: a value is impossible; the text names it.

    >>> Sampler(2, temperature=0)(torch.tensor([[[0.1, 3.0, 2.0]], [[5.0, 1.0, 2.0]]]), [1, 1]).tolist()
    [[1], [0]]
    """

    def __init__(
        self,
        batch: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
    ) -> None:
        temperature, top_k, top_p, seed = map(as_python, (temperature, top_k, top_p, seed))
        if not _is_number(temperature) or not 0 <= temperature < math.inf:
            raise ValueError(f"temperature must be a finite number of at least 0, got {shortened(temperature)}")
        if top_k is not None and (type(top_k) is not int or top_k < 1):
            raise ValueError(f"top_k must be an integer of at least 1 or None, got {shortened(top_k)}")
        if top_p is not None and (not _is_number(top_p) or not 0 < top_p <= 1):
            raise ValueError(f"top_p must be in (0, 1] or None, got {shortened(top_p)}")
        if seed is not None and (type(seed) is not int or not 0 <= seed < 2**63):
            raise ValueError(f"seed must be an integer in [0, 2**63) or None, got {shortened(seed)}")
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        first = int(torch.randint(2**62, (), device="cpu")) if seed is None else seed
        self.generators = [torch.Generator("cpu").manual_seed(first + row) for row in range(batch)]

    def __call__(self, logits: Tensor, counts: list[int]) -> Tensor:
        """Tokens (B, N) from logits (B, N, V); the first counts[i] of row i are valid, the others arbitrary."""
        if self.temperature == 0:
            return logits.argmax(-1)
        logits, tokens = self._candidates(logits.double())
        # The distribution function, inverted at one uniform number per token.
        cumulative = (logits / self.temperature).softmax(-1).cumsum(-1)
        uniform = torch.zeros(logits.shape[:2], dtype=torch.float64, device="cpu")
        for row, count in enumerate(counts):
            uniform[row, :count].uniform_(generator=self.generators[row])
        total = cumulative[..., -1:]  # 1 up to rounding
        drawn = torch.searchsorted(cumulative, uniform.to(logits.device)[..., None] * total, right=True)
        drawn = drawn.clamp(max=logits.shape[-1] - 1)
        return (drawn if tokens is None else tokens.gather(-1, drawn)).squeeze(-1)

    def _candidates(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """The scores to draw from and their tokens (None: all tokens in order)."""
        size = logits.shape[-1]
        if self.top_k is None and self.top_p is None:
            return logits, None
        logits, tokens = logits.topk(min(self.top_k or size, size), -1)
        if self.top_p is not None:
            probability = (logits / self.temperature).softmax(-1)
            before = probability.cumsum(-1) - probability
            before[..., 0] = 0  # the best token always stays
            logits = logits.masked_fill(before >= self.top_p, -torch.inf)
        return logits, tokens


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
