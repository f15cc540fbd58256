"""Scores gathered by distance (Dai et al. 2019, section 3.3), not shifted, and the sizes of small modules."""

from __future__ import annotations

import torch
from torch import Tensor

WIDTH, HEADS = 32, 4
DIM = WIDTH // HEADS


def by_distance(rows: Tensor, rel_key: Tensor, keys: int, first: int) -> Tensor:
    """rows[i] . rel_key[p] for the distance of each pair, of rows that end with the keys; row 0 is for `first`.

    Pairs without a row have 0.
    """
    length = rows.shape[-2]
    distance = torch.arange(keys - length, keys)[:, None] - torch.arange(keys)
    index = first - distance
    known = (index >= 0) & (index < rel_key.shape[-2])
    products = (rows @ rel_key.mT).gather(-1, (index * known).expand(*rows.shape[:-1], keys))
    return products * known


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, DIM)).transpose(-3, -2)


def whole(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)
