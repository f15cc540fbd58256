"""Sinusoidal encodings of relative distances, XLNet's and Transformer-XL's R (Dai et al. 2019, section 3.3)."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ._checks import is_integer, readable, shortened
from ._torch import in_dispatch_mode, transformed


def relative_positions(
    key_len: int,
    query_len: int,
    d_model: int,
    *,
    attn_type: str = "bi",
    clamp_len: int = -1,
    bi_data_batch: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Table whose row p encodes distance ``key_len - p`` as ``[sin(distance * f) | cos(distance * f)]``.

    Args:
        key_len: M + K, memory and current segment together: the largest distance, row 0.
        query_len: K; "bi" rows go down to distance -(K - 1), "uni" rows end at distance 0.
        d_model: width, even; frequencies are ``10000 ** (-2 i / d_model)``.
        clamp_len: distances are clamped to [-clamp_len, clamp_len]; -1 for no limit.
        bi_data_batch: B, where the second half of the batch holds reversed text and its distances are negated;
            None for ordinary text.

    Returns:
        (P, d_model), or (B, P, d_model) with `bi_data_batch` (equal rows share memory); P = key_len + query_len for
        "bi" and key_len + 1 for "uni".

    Raises:
        ValueError: unknown attn_type, lengths that are negative or not integers, odd d_model, or odd bi_data_batch.

    >>> relative_positions(2, 2, 4)[:, 0].tolist() == torch.sin(torch.tensor([2.0, 1.0, 0.0, -1.0])).tolist()
    True
    """
    if attn_type not in ("bi", "uni"):
        raise ValueError(f'attn_type must be "bi" or "uni", got {shortened(attn_type)}')
    for name, size in (("key_len", key_len), ("query_len", query_len), ("d_model", d_model)):
        if not is_integer(size) and not torch.jit.is_tracing():  # sizes are tensors there
            raise ValueError(f"{name} must be an integer, got {shortened(size)}")
    if d_model % 2:
        raise ValueError(f"d_model must be even for sinusoidal positions, got {d_model}")
    if key_len < 0 or query_len < 0:
        raise ValueError(f"key_len and query_len must not be negative, got {key_len} and {query_len}")
    last = -query_len if attn_type == "bi" else -1
    distance = torch.arange(key_len, last, -1, device=device).double()

    def encode(distance: Tensor) -> Tensor:
        if clamp_len > 0:
            distance = distance.clamp(-clamp_len, clamp_len)
        angle = distance[:, None] * frequency
        return torch.cat([angle.sin(), angle.cos()], -1).to(dtype or torch.get_default_dtype())

    frequency = 10000.0 ** -(torch.arange(0, d_model, 2, dtype=torch.float64, device=device) / d_model)
    forward = encode(distance)
    if bi_data_batch is None:
        return forward
    if bi_data_batch % 2:
        raise ValueError(f"bi_data needs an even batch (half forward, half reversed), got {bi_data_batch}")
    both = torch.stack([forward, encode(-distance)])
    return both[:, None].expand(2, bi_data_batch // 2, -1, -1).flatten(0, 1)


def kept_positions(h: Tensor, key_len: int, query_len: int, d_model: int, **options) -> Tensor:
    """`relative_positions` in h's dtype and device, cached for layers and steps with the same arguments."""
    # Not cached under a compiler, a fake mode, a transform or CUDA graph capture, because later calls could not use
    # such a result.
    plain = readable(h) and not transformed() and not in_dispatch_mode()
    plain = plain and not (h.is_cuda and torch.cuda.is_current_stream_capturing())
    compute = _kept if plain else relative_positions
    positions = compute(key_len, query_len, d_model, dtype=h.dtype, device=h.device, **options)
    # A copy, because hooks may write into it.
    return positions.clone() if plain else positions


# Cached because sines in float64 are slow. Two entries: a model's full and its last, shorter batch.
@lru_cache(maxsize=2)
def _kept(*lengths: int, **options) -> Tensor:
    # Because a tensor made in inference mode could not be used in training later.
    with torch.inference_mode(False):
        return relative_positions(*lengths, **options)
