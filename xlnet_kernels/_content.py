"""Content hashes of tensors, which need no reference, version counter or copy."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def row_hashes(x: Tensor) -> Tensor:
    """A 64-bit hash of each row's bits, (...) int64 of x (..., n).

    A change of one word always changes the hash. Other pairs of different rows collide with probability of about 2^-60.
    Hashing a matrix costs a fraction of multiplying a few rows by it.

    >>> x = torch.zeros(3, 4)
    >>> before = row_hashes(x)
    >>> x.data[1, 2] += 1
    >>> (row_hashes(x) == before).tolist()
    [True, False, True]
    """
    x = x.detach().contiguous()
    if not x.dim():
        x = x[None]
    size = x.element_size()
    word = math.gcd(8, x.shape[-1] * size, x.storage_offset() * size)
    words = x.view(_WORDS[word]).long()
    multipliers = _multipliers(words.shape[-1])
    # Summed, because integers have no matrix products on other devices.
    if words.device.type != "cpu":
        return (words * multipliers.to(words.device)).sum(-1)
    return words @ multipliers  # wraps to 64 bits


@lru_cache(maxsize=8)
def _multipliers(count: int) -> Tensor:
    """Odd multipliers, to avoid that a change of one word cancels."""
    # Because the cached tensor is also used outside inference mode.
    with torch.inference_mode(False):
        generator = torch.Generator("cpu").manual_seed(20261125)
        return torch.randint(2**62, (count,), generator=generator, device="cpu") * 2 + 1
