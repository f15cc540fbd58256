"""Masks of one stream, where a query stream is computed too: none of its rows sees the token it is to predict."""

from __future__ import annotations

import pytest
import torch

import xlnet_kernels as xk
from tests.cases import READY

B, L, M, N, WIDTH, H = 2, 8, 3, 2, 16, 2
PADDING = torch.arange(L) >= torch.tensor([[L], [6]])
TARGETS = torch.tensor([[1, 5], [4, 0]])
FLAGS = torch.zeros(B, L, dtype=torch.bool).scatter(1, TARGETS, True)
IDS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 0], [2, 2, 2, 2, 2, 2, 3, 3]])
MADE = {
    "padding": lambda mem: xk.RankMask.padding(PADDING, mem),
    "full": lambda mem: xk.RankMask.full(B, L, mem),
    "local": lambda mem: xk.RankMask.local(B, L, 2, 3, mem, PADDING),
    "local-all-ahead": lambda mem: xk.RankMask.local(B, L, None, None, mem),
    "global": lambda mem: xk.RankMask.local(B, L, None, 0, mem, global_positions=TARGETS),
    "chunked": lambda mem: xk.RankMask.chunked(B, L, 4, 1, mem, PADDING),
    "packed": lambda mem: xk.RankMask.packed(IDS, padding=PADDING),
}
BOTH = [(name, mem) for name in MADE for mem in (0, M) if not (name == "packed" and mem)]


@pytest.mark.parametrize("name, mem", BOTH)
def test_dense_query_rows_hide_themselves(name, mem):
    mask = MADE[name](mem)
    own = torch.nn.functional.pad(torch.eye(L, dtype=torch.bool), (mem, 0))
    plain = mask.to_bool()
    assert plain.shape == (B, L, mem + L) and plain[own.expand_as(plain)].any()
    assert torch.equal(mask.to_bool("query"), plain & ~own) and torch.equal(mask.to_bool("content"), plain | own)
    for same in (mask.expand(B), mask.rows(TARGETS), mask.to("cpu"), mask.contiguous(), mask.seeing_self(False)):
        assert same.one_stream
    with pytest.raises(ValueError, match=r"own token: give mask.hide_targets\(targets\)"):
        mask.for_stream("query")
    hidden = mask.hide_targets(FLAGS)
    columns = torch.nn.functional.pad(FLAGS, (mem, 0))[:, None]
    assert torch.equal(hidden.to_bool("query"), plain & ~columns) and not hidden.one_stream
    assert torch.equal(hidden.for_stream("query").to_bool(), plain & ~columns)


def test_masks_of_two_streams_are_left_alone():
    order = torch.stack([torch.randperm(L) for _ in range(B)])
    packed = xk.RankMask.packed(IDS, causal=True)
    for mask in (xk.RankMask.causal(B, L), packed, xk.RankMask.from_order(order), xk.RankMask.local(B, L, 2, 0)):
        assert not mask.one_stream and torch.equal(mask.to_bool("query"), mask.for_stream("query").to_bool())


@pytest.mark.parametrize("backend", READY)
@pytest.mark.parametrize("name, mem", BOTH)
def test_layers_see_no_target(name, mem, backend):
    """Two layers, so that nothing comes back through the content stream; the dense mask says the same."""
    torch.manual_seed(0)
    attn, mask = xk.TwoStreamAttention(WIDTH, H, backend=backend), MADE[name](mem)
    h, g = torch.randn(B, L, WIDTH, requires_grad=True), torch.randn(B, N, WIDTH)
    rest = dict(target_positions=TARGETS, mems=torch.randn(B, mem, WIDTH) if mem else None)
    once = attn(h, g, mask=mask, **rest)
    dense = mask.hide_targets(FLAGS).to_bool("query")
    for found, wanted in zip(once, attn(h, g, mask=dense, **rest), strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    _, twice = attn(*once, mask=mask, **rest)
    for b in range(B):
        (gradient,) = torch.autograd.grad(twice[b].pow(3).sum(), h, retain_graph=True)
        assert not gradient[b, TARGETS[b]].any() and gradient[b].any()


def test_padding_changes_nothing_but_padding():
    attn, h, g = xk.TwoStreamAttention(WIDTH, H), torch.randn(B, L, WIDTH), torch.randn(B, N, WIDTH)
    wanted = attn(h, g, target_positions=TARGETS)
    dense = torch.ones(B, 1, L, dtype=torch.bool)
    for mask in (xk.RankMask.full(B, L), xk.RankMask.padding(attention_mask=dense[:, 0]), dense, dense[:1, 0]):
        found = attn(h, g, mask=mask, target_positions=TARGETS)
        for ours, plain in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, plain, atol=1e-6, rtol=1e-6)
        with pytest.raises(ValueError, match="mask is of one stream.*target_positions, or a mask of two streams"):
            attn(h, h, mask=mask)
    torch.testing.assert_close(attn(h, mask=xk.RankMask.full(B, L))[0], attn(h)[0])


@pytest.mark.parametrize("attn_type", ["bi", "uni"])
@pytest.mark.parametrize("given", ["positions", "one-hot", "empty row", "mixture"])
def test_models_predict_no_token_from_itself(given, attn_type):
    torch.manual_seed(0)
    config = xk.XLNetConfig(vocab_size=20, d_model=WIDTH, n_layer=2, n_head=H, d_inner=16, attn_type=attn_type)
    model = xk.XLNetLMHeadModel(config).eval()
    mapping = torch.nn.functional.one_hot(TARGETS, L).float()
    if given == "empty row":
        mapping[1, 1] = 0  # it stands at no position and hides none
    if given == "mixture":
        mapping[:, 0] = mapping.mean(1)
    targets = dict(target_positions=TARGETS) if given == "positions" else dict(target_mapping=mapping)
    flags = (mapping != 0).any(1)
    ids = torch.randint(20, (B, L))
    others = [torch.where(changed, (ids + 7) % 20, ids) for changed in (flags, ~flags)]
    for mask in (xk.RankMask.padding(PADDING), xk.RankMask.full(1, L), xk.RankMask.local(B, L, 2, 3)):
        logits = model(ids, mask=mask, **targets).logits
        same, changed = (model(other, mask=mask, **targets).logits for other in others)
        assert torch.equal(logits, same) and not torch.equal(logits, changed)
    if given == "empty row":
        shown = ids.index_put((torch.tensor(1), torch.tensor(0)), (ids[1, 0] + 7) % 20)
        assert not torch.equal(logits, model(shown, mask=mask, **targets).logits)


def test_one_stream_must_be_a_bool():
    rank = torch.zeros(1, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match="one_stream must be a bool, got int"):
        xk.RankMask(rank, rank, one_stream=1)
