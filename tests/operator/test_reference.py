"""The reference is the definition of the maths: here it is held against public implementations."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import ParakeetEncoderConfig, XLNetConfig
from transformers.models.parakeet.modeling_parakeet import ParakeetEncoderAttention
from transformers.models.xlnet.modeling_xlnet import XLNetRelativeAttention

import xlnet_kernels as xk
from tests.cases import make

B, H, L, D = 2, 3, 7, 8
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def xlnet_layer(dtype: torch.dtype) -> XLNetRelativeAttention:
    config = XLNetConfig(vocab_size=8, d_model=H * D, n_head=H, d_inner=8, n_layer=1, dropout=0.0)
    layer = XLNetRelativeAttention(config).to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    return layer.eval()


def heads_first(x: torch.Tensor) -> torch.Tensor:
    """transformers' (length, batch, heads, width) as (B, H, L, D)."""
    return x.permute(1, 2, 0, 3)


def assert_near(found, wanted):
    error = (found - wanted).abs().max().item()
    assert error <= TOLERANCE[wanted.dtype] * max(1.0, wanted.abs().max().item())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("attn_type", ["bi", "uni"])
@pytest.mark.parametrize("mem", [0, 5])
@pytest.mark.parametrize("segments", [False, True], ids=["", "segments"])
@pytest.mark.parametrize("stream", ["content", "query"])
def test_equals_rel_attn_core_of_transformers(dtype, attn_type, mem, segments, stream):
    layer = xlnet_layer(dtype)
    query = torch.randn(L, B, H, D, dtype=dtype)
    key, value = torch.randn(2, mem + L, B, H, D, dtype=dtype)
    rel_key = torch.randn(mem + L + (L if attn_type == "bi" else 1), H, D, dtype=dtype)
    query_ids = torch.randint(3, (B, L))
    key_ids = torch.nn.functional.pad(query_ids, (mem, 0))

    # perm_mask as the model makes it of a factorisation order; a fully masked query row is left out, since there
    # the two differ on purpose (transformers averages over all keys, the hidden ones included)
    order = torch.stack([torch.randperm(L) for _ in range(B)])
    mask = xk.RankMask.from_order(order, order >= 2, mem_len=mem)
    hidden = ~mask.to_bool(stream)
    if attn_type == "uni":  # transformers' own way to see nothing ahead: a causal mask, "uni" rows only save work
        hidden = hidden | (torch.arange(mem + L) > torch.arange(L)[:, None] + mem)
    seen = ~hidden.all(-1)
    different = query_ids[:, :, None] != key_ids[:, None, :]
    seg_mat = torch.nn.functional.one_hot(different.long(), 2).to(dtype).permute(1, 2, 0, 3)
    # "uni" has no rows for keys ahead: those rel_shift_bnij reads wrap around and are hidden anyway
    wanted = layer.rel_attn_core(
        query,
        key,
        value,
        rel_key[:, None].expand(-1, B, -1, -1),
        seg_mat=seg_mat if segments else None,
        attn_mask=hidden.permute(1, 2, 0)[..., None].to(dtype),
    )
    key, value = heads_first(key), heads_first(value)
    found = xk.rel_attention(
        heads_first(query),
        key[:, :, mem:],
        value[:, :, mem:],
        rel_key.transpose(0, 1),
        content_bias=layer.r_w_bias,
        position_bias=layer.r_r_bias,
        segments=xk.Segments(query_ids, key_ids, layer.seg_embed, layer.r_s_bias) if segments else None,
        mask=mask.for_stream(stream),
        memory=(key[:, :, :mem], value[:, :, :mem]) if mem else None,
        backend="reference",
    )
    seen = seen[:, None, :, None]
    assert_near(found * seen, heads_first(wanted) * seen)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_conformer_order_equals_parakeet_of_transformers(dtype):
    config = ParakeetEncoderConfig(hidden_size=H * D, num_attention_heads=H, attention_bias=False)
    config._attn_implementation = "sdpa"  # its eager softmax is always float32
    layer = ParakeetEncoderAttention(config, 0).to(dtype).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.3)
    x = torch.randn(B, L, H * D, dtype=dtype)
    positions = torch.randn(1, 2 * L - 1, H * D, dtype=dtype)
    wanted, _ = layer(x, positions.expand(B, -1, -1), attention_mask=None)

    def heads(y):
        return y.unflatten(-1, (H, D)).transpose(-3, -2)

    found = xk.rel_attention(
        heads(layer.q_proj(x)),
        heads(layer.k_proj(x)),
        heads(layer.v_proj(x)),
        heads(layer.relative_k_proj(positions))[0],
        content_bias=layer.bias_u,
        position_bias=layer.bias_v,
        max_distance=L - 1,
        backend="reference",
    )
    assert_near(layer.o_proj(found.transpose(1, 2).flatten(2)), wanted)


def test_is_the_formula_written_as_loops():
    # every index by hand, free of anybody's rel_shift
    problem = make(1, 2, 3, keys=4, mem=2, width=5, positions=True, extra_distance=3, mask="dense", dtype=torch.float64)
    x, options = SimpleNamespace(**problem.leaves), problem.options
    out, lse = problem.call("reference")
    key, value = torch.cat([x.memory_key, x.key], 2)[0], torch.cat([x.memory_value, x.value], 2)[0]
    for h in range(2):
        for i in range(3):
            score = torch.full((6,), -torch.inf, dtype=torch.float64)
            for j in range(6):
                distance = options["query_positions"][0, i] + 2 - j
                q = x.query[0, h, i]
                kind = int(problem.query_ids[0, i] != problem.key_ids[0, j])
                if options["mask"][0, h, i, j]:
                    content = (q + x.content_bias[h]) @ key[h, j]
                    position = (q + x.position_bias[h]) @ x.rel_key[h, options["max_distance"] - distance]
                    segment = (q + x.segment_bias[h]) @ x.segment_embed[kind, h]
                    score[j] = (content + position + segment) * 5**-0.5
            assert torch.allclose(lse[0, h, i], score.logsumexp(0), atol=1e-12)
            if score.isfinite().any():
                assert torch.allclose(out[0, h, i], score.softmax(0) @ value[h], atol=1e-12)


def test_rows_that_see_nothing_give_zeros_and_zero_gradients():
    problem = make(mask="padding", dtype=torch.float64)  # sequence 0 is all padding
    found = problem.results("reference")
    assert (found["out"][0] == 0).all() and (found["lse"][0] == -torch.inf).all()
    for name in ("query", "key", "value"):
        assert (found[f"grad {name}"][0] == 0).all()
    assert all(value.isfinite().all() for name, value in found.items() if name != "lse")
