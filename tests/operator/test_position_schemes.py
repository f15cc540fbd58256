"""Positional schemes that are this term in another form, as docs/migrate.md has them, against their own formulas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import xlnet_kernels as xk

B, H, L, D = 2, 3, 9, 8
DISTANCE = torch.arange(L)[:, None] - torch.arange(L)
ROWS = torch.arange(L - 1, -L, -1)  # the distances of rel_key's rows, in their order


def make(*shapes: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def assert_same(found: Tensor, wanted: Tensor, inputs: list[Tensor]) -> None:
    """Outputs and gradients; all sums differ in order alone."""
    grad = torch.randn_like(wanted)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    pairs = [torch.autograd.grad(out, inputs, grad, retain_graph=True) for out in (found, wanted)]
    torch.testing.assert_close(*pairs, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("causal", [False, True])
def test_shaw_keys_with_a_limit(causal):
    """Shaw et al. 2018, equations 2 and 4, without the values' table; causal, it is Music Transformer's."""
    query, key, value, table = inputs = make((B, H, L, D), (B, H, L, D), (B, H, L, D), (2 * 4 + 1, D))
    rows = table[DISTANCE.clamp(-4, 4) + 4]  # (L, L, D)
    scores = torch.einsum("bhid,bhjd->bhij", query, key) + torch.einsum("bhid,ijd->bhij", query, rows)
    if causal:
        scores = scores.masked_fill(DISTANCE < 0, -torch.inf)
    wanted = (scores / D**0.5).softmax(-1) @ value
    rel_key = table[ROWS.clamp(-4, 4) + 4].expand(H, -1, -1)
    rel_key = rel_key[:, :L] if causal else rel_key
    assert_same(xk.rel_attention(query, key, value, rel_key, max_distance=L - 1), wanted, inputs)


@pytest.mark.parametrize("gated", [False, True])
def test_a_bias_for_each_distance(gated):
    """T5's, ALiBi's or, gated, WavLM's: a number for each head and distance, in a column of its own."""
    query, key, value, bias, gate = inputs = make(
        (B, H, L, D), (B, H, L, D), (B, H, L, D), (H, 2 * L - 1), (B, H, L, 1)
    )
    gates = gate if gated else torch.ones_like(gate)
    of_pairs = bias[:, L - 1 - DISTANCE]
    wanted = (query @ key.mT / D**0.5 + gates * of_pairs).softmax(-1) @ value
    wider = [torch.cat([x, y], -1) for x, y in ((query, gates), (key, torch.zeros_like(gate)), (value, 0 * gate))]
    rel_key = torch.nn.functional.pad(bias[..., None] * D**0.5, (D, 0))
    found = xk.rel_attention(*wider, rel_key, max_distance=L - 1, scale=D**-0.5)[..., :D]
    assert_same(found, wanted, inputs if gated else inputs[:-1])


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_values_wider_than_keys(dropout_p):
    """Enformer's (Avsec et al. 2021): the scale is on the query, and values have three times the width of keys."""
    query, key, value, rel_key, u, v = inputs = make(
        (B, H, L, D), (B, H, L, D), (B, H, L, 3 * D), (H, 2 * L - 1, D), (H, D), (H, D)
    )
    scaled = query * D**-0.5
    state, parts = torch.get_rng_state(), []
    for part in value.split(D, -1):
        torch.set_rng_state(state)
        options = dict(content_bias=u, position_bias=v, max_distance=L - 1, scale=1.0, dropout_p=dropout_p)
        parts.append(xk.rel_attention(scaled, key, part, rel_key, **options))
    found = torch.cat(parts, -1)
    position = ((scaled + v[:, None]) @ rel_key.mT).gather(-1, (L - 1 - DISTANCE).expand(B, H, L, L))
    weights = ((scaled + u[:, None]) @ key.mT + position).softmax(-1)
    if dropout_p:  # the map that was used, from one-hot values of as many slices as are needed
        torch.set_rng_state(state)
        ones = torch.eye(L, dtype=torch.float64).expand(B, H, L, L)
        kept = []
        for part in torch.nn.functional.pad(ones, (0, -L % D)).split(D, -1):
            torch.set_rng_state(state)
            kept.append(xk.rel_attention(scaled, key, part, rel_key, **options))
        kept = torch.cat(kept, -1)[..., :L].detach()
        weights = weights * (kept != 0) / (1 - dropout_p)
        assert 0 < (kept == 0).sum() < kept.numel()
    assert_same(found, weights @ value, inputs)
