"""TwoStreamAttention against transformers' XLNetRelativeAttention, and as a module that drops into any model."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import XLNetConfig
from transformers.models.xlnet.modeling_xlnet import XLNetRelativeAttention

import xlnet_kernels as xk
from tests.cases import COMPILED
from xlnet_kernels import attention

B, L, M, N, H, D = 2, 9, 4, 3, 2, 8
WIDTH = H * D


def theirs(dtype=torch.float32, dropout=0.0) -> XLNetRelativeAttention:
    """transformers' layer with weights far from zero, so that every term counts."""
    config = XLNetConfig(vocab_size=8, d_model=WIDTH, n_head=H, d_inner=8, n_layer=1, dropout=dropout)
    layer = XLNetRelativeAttention(config).to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.5)
    return layer.eval()


class Inputs:
    """One batch of a permutation language model, for both implementations."""

    def __init__(self, mem=M, dtype=torch.float32, bi=True, targets=N):
        self.mem = mem
        self.h = torch.randn(B, L, WIDTH, dtype=dtype)
        self.g = torch.randn(B, targets, WIDTH, dtype=dtype)
        self.mems = torch.randn(B, mem, WIDTH, dtype=dtype) if mem else None
        self.rel_pos = torch.randn(mem + 2 * L if bi else mem + L + 1, WIDTH, dtype=dtype)
        self.segment_ids = torch.randint(3, (B, L))
        order = torch.stack([torch.randperm(L) for _ in range(B)])
        self.targets = order.argsort(1)[:, L - targets :]  # the last of the order
        flags = torch.zeros(B, L, dtype=torch.bool).scatter(1, self.targets, True)
        self.mask = xk.RankMask.from_order(order, flags, mem_len=mem)
        if not bi:
            self.mask = xk.RankMask.causal(B, L, mem)

    def of_theirs(self, layer, two_streams=True):
        """transformers' (h, g): length first, one-hot target mapping, float masks."""
        different = self.segment_ids[:, :, None] != torch.nn.functional.pad(self.segment_ids, (self.mem, 0))[:, None]
        hidden = {stream: ~self.mask.to_bool(stream) for stream in ("content", "query")}
        mapping = torch.nn.functional.one_hot(self.targets, L).to(self.h)
        kind = self.h.dtype
        h, g = layer(
            self.h.transpose(0, 1),
            self.g.transpose(0, 1) if two_streams else None,
            attn_mask_h=hidden["content"].permute(1, 2, 0)[..., None].to(kind),
            attn_mask_g=hidden["query"].permute(1, 2, 0)[..., None].to(kind),
            r=self.rel_pos[:, None].expand(-1, B, -1),
            seg_mat=torch.nn.functional.one_hot(different.long(), 2).permute(1, 2, 0, 3).to(kind),
            mems=None if self.mems is None else self.mems.transpose(0, 1),
            target_mapping=mapping.permute(1, 2, 0) if two_streams else None,
        )
        return h.transpose(0, 1), None if g is None else g.transpose(0, 1)

    def of_ours(self, attn, two_streams=True, **change):
        arguments = dict(mask=self.mask, rel_pos=self.rel_pos, segment_ids=self.segment_ids, mems=self.mems)
        if two_streams:
            arguments |= dict(g=self.g, target_positions=self.targets)
        return attn(self.h, **(arguments | change))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mem", [0, M])
@pytest.mark.parametrize("bi", [True, False], ids=["bi", "uni"])
@pytest.mark.parametrize("two_streams", [False, True], ids=["content", "both"])
def test_equals_transformers(backend, dtype, mem, bi, two_streams):
    layer, inputs = theirs(dtype), Inputs(mem, dtype, bi)
    if not bi and two_streams and not mem:
        inputs.targets = inputs.targets.clamp(min=1)  # position 0 is fully masked: there the two differ on purpose
    attn = xk.TwoStreamAttention.from_transformers(layer, backend)
    wanted, found = inputs.of_theirs(layer, two_streams), inputs.of_ours(attn, two_streams)
    tolerance = 2e-5 if dtype == torch.float32 else 1e-12
    assert torch.allclose(found[0], wanted[0], atol=tolerance)
    assert torch.allclose(found[1], wanted[1], atol=tolerance) if two_streams else found[1] is None


def test_gradients_equal_those_of_transformers(backend):
    layer, inputs = theirs(torch.float64), Inputs(dtype=torch.float64)
    attn = xk.TwoStreamAttention.from_transformers(layer, backend)
    leaves = [x.requires_grad_() for x in (inputs.h, inputs.g, inputs.mems, inputs.rel_pos)]

    def gradients(module, outputs):
        parameters = dict(module.named_parameters())
        loss = sum((x * torch.linspace(-1, 1, x.numel()).view_as(x)).sum() for x in outputs)
        found = torch.autograd.grad(loss, [*leaves, *parameters.values()])
        return dict(zip(["h", "g", "mems", "rel_pos", *parameters], found, strict=True))

    wanted, found = gradients(layer, inputs.of_theirs(layer)), gradients(attn, inputs.of_ours(attn))
    assert wanted.keys() == found.keys()
    for name, gradient in wanted.items():
        assert torch.allclose(found[name], gradient, atol=1e-10, rtol=1e-10), name


@pytest.mark.parametrize("kind", ["rows", "batch-1", "heads"])
def test_dense_mask_equals_rank_mask(backend, kind):
    inputs, attn = Inputs(), xk.TwoStreamAttention.from_transformers(theirs(), backend)
    if kind == "batch-1":
        inputs.mask = xk.RankMask(inputs.mask.query_rank[:1], inputs.mask.key_rank[:1])
    dense = inputs.mask.to_bool("query")
    dense = {"rows": dense, "batch-1": dense[0], "heads": dense[:, None].expand(-1, H, -1, -1)}[kind]
    for two_streams in (False, True):
        found = inputs.of_ours(attn, two_streams, mask=dense)
        wanted = inputs.of_ours(attn, two_streams)
        for f, w in zip(found[: 1 + two_streams], wanted, strict=False):
            assert torch.allclose(f, w, atol=1e-5)


def test_padding_mask_of_keys_broadcasts_over_rows(backend):
    inputs, attn = Inputs(mem=0), xk.TwoStreamAttention(WIDTH, H, backend=backend)
    padding = torch.tensor([[False] * L, [False] * (L - 3) + [True] * 3])
    found = inputs.of_ours(attn, mask=~padding[:, None, :])
    wanted = inputs.of_ours(attn, mask=xk.RankMask.padding(padding))
    assert all(torch.allclose(f, w, atol=1e-6) for f, w in zip(found, wanted, strict=True))


def test_ranks_show_a_query_row_its_own_token_where_they_say_so(backend):
    attn = xk.TwoStreamAttention.from_transformers(theirs(), backend)
    h, targets, full = torch.randn(B, L, WIDTH), torch.tensor([[0, 4], [8, 8]]), xk.RankMask.full(B, L)
    mask = xk.RankMask(full.query_rank, full.key_rank)
    g = h.gather(1, targets[:, :, None].expand(-1, -1, WIDTH))  # the same input must give the same output
    out_h, out_g = attn(h, g, mask=mask, target_positions=targets)
    assert torch.allclose(out_g, out_h.gather(1, targets[:, :, None].expand(-1, -1, WIDTH)), atol=1e-6)
    everywhere = attn(h, h, mask=mask)
    assert torch.allclose(everywhere[1], everywhere[0], atol=1e-6)


@pytest.mark.parametrize("bi", [True, False], ids=["bi", "uni"])
def test_without_mask_no_row_but_its_own_sees_a_target(bi):
    """Through two layers, so that nothing comes back through the content stream."""
    inputs, attn = Inputs(bi=bi), xk.TwoStreamAttention.from_transformers(theirs())
    h, rest = inputs.h.requires_grad_(), dict(rel_pos=inputs.rel_pos, mems=inputs.mems, target_positions=inputs.targets)
    content, g = attn(*attn(h, inputs.g, **rest), **rest)
    for b in range(B):
        for n in range(N):
            (gradient,) = torch.autograd.grad(g[b, n].sum(), h, retain_graph=True)
            assert (gradient[b, inputs.targets[b, n]] == 0).all() and gradient[b].abs().sum() > 0
    target = inputs.targets[0, 0]
    assert torch.autograd.grad(content[0, target].sum(), h)[0][0, target].abs().sum() > 0


def test_query_rows_everywhere_without_mask_are_refused():
    inputs, attn = Inputs(mem=0, targets=L), xk.TwoStreamAttention(WIDTH, H)
    with pytest.raises(ValueError, match="g needs a mask or target_positions"):
        attn(inputs.h, inputs.g)
    causal = attn(inputs.h, inputs.g, xk.RankMask.causal(B, L))  # which it is by itself where nothing ahead is seen
    found = attn(inputs.h, inputs.g, rel_pos=xk.relative_positions(L, L, WIDTH, attn_type="uni"))
    assert all(torch.allclose(f, w, atol=1e-6) for f, w in zip(found, causal, strict=True))


@pytest.mark.parametrize("norm", ["pre", None])
def test_norm(norm, backend):
    """Made of the layer with its norm after the residual: what it adds to its rows is seen with another LayerNorm."""
    inputs, layer = Inputs(), theirs()
    attn = xk.TwoStreamAttention(WIDTH, H, norm=norm, backend=backend)
    assert ("layer_norm.weight" in attn.state_dict()) is (norm is not None)
    attn.load_state_dict(layer.state_dict(), strict=norm is not None)
    bare = xk.TwoStreamAttention.from_transformers(layer, backend)
    bare.layer_norm = torch.nn.Identity()
    change = {}
    if norm == "pre":
        change = {name: layer.layer_norm(getattr(inputs, name)) for name in ("h", "g", "mems")}
    seen = copy.copy(inputs)
    for name, x in change.items():
        setattr(seen, name, x)
    for name, f, w in zip("hg", inputs.of_ours(attn), seen.of_ours(bare), strict=True):
        rows = getattr(inputs, name) if norm == "pre" else 0
        assert torch.allclose(f, w - getattr(seen, name) + rows, atol=1e-5)


def test_query_row_never_depends_on_its_own_token(backend):
    inputs, layer = Inputs(mem=0, dtype=torch.float64), theirs(torch.float64)
    attn = xk.TwoStreamAttention.from_transformers(layer, backend)
    inputs.h.requires_grad_()
    g = inputs.of_ours(attn)[1]
    for b in range(B):
        for n in range(N):
            (gradient,) = torch.autograd.grad(g[b, n].sum(), inputs.h, retain_graph=True)
            assert (gradient[b, inputs.targets[b, n]] == 0).all()


def test_default_positions_are_sinusoidal(backend):
    inputs, attn = Inputs(), xk.TwoStreamAttention(WIDTH, H, backend=backend)
    wanted = inputs.of_ours(attn, rel_pos=xk.relative_positions(M + L, L, WIDTH))
    with torch.inference_mode():  # what is kept from here must still be good for training
        inputs.of_ours(attn, rel_pos=None)
    found = inputs.of_ours(attn, rel_pos=None)
    assert all(torch.equal(f, w) for f, w in zip(found, wanted, strict=True))
    found[0].sum().backward()


def test_rel_pos_per_sample(backend):
    inputs, attn = Inputs(), xk.TwoStreamAttention.from_transformers(theirs(), backend)
    both = torch.randn(B, *inputs.rel_pos.shape)
    found = inputs.of_ours(attn, rel_pos=both)
    for b in range(B):
        wanted = inputs.of_ours(attn, rel_pos=both[b])
        assert all(torch.allclose(f[b], w[b], atol=1e-5) for f, w in zip(found, wanted, strict=True))


@pytest.mark.parametrize("targets", [0, 1, N, L])
def test_query_stream_costs_its_rows_and_keys_are_projected_once(monkeypatch, targets):
    calls = []

    def counted(query, key, value, rel_key, **options):
        calls.append((query.shape[2], key.shape[2], rel_key.shape, options["memory"][0].shape[2]))
        return xk.rel_attention(query, key, value, rel_key, **options)

    monkeypatch.setattr(attention, "rel_attention", counted)
    inputs = Inputs(targets=targets)
    h, g = inputs.of_ours(xk.TwoStreamAttention(WIDTH, H))
    # one call for both streams, L + N rows, memory apart, positions without a batch dimension
    assert calls == [(L + targets, L, (H, M + 2 * L, D), M)]
    assert h.shape == (B, L, WIDTH) and g.shape == (B, targets, WIDTH)


def test_drop_in():
    attn = xk.TwoStreamAttention(512, 8)
    x = torch.randn(2, 10, 512)
    out, nothing = attn(x)
    assert out.shape == x.shape and nothing is None
    out += x  # memory of its own: in-place use is fine
    out.sum().backward()
    assert attn.q.grad is not None and attn.seg_embed.grad is None


def test_outputs_of_both_streams_may_be_changed_in_place():
    inputs, attn = Inputs(), xk.TwoStreamAttention(WIDTH, H)
    h, g = inputs.of_ours(attn)
    h += 1
    g *= 2
    (h.sum() + g.sum()).backward()


def test_names_and_shapes_are_those_of_checkpoints():
    shapes = {name: tuple(x.shape) for name, x in theirs().state_dict().items()}
    attn = xk.TwoStreamAttention(WIDTH, H)
    assert {name: tuple(x.shape) for name, x in attn.state_dict().items()} == shapes
    inputs = Inputs()
    inputs.of_ours(attn, rel_pos=None)
    assert attn.state_dict().keys() == shapes.keys()  # nothing that is kept between calls gets into checkpoints
    copy.deepcopy(attn).load_state_dict(theirs().state_dict())


def test_initialisation():
    attn = xk.TwoStreamAttention(256, 8, d_head=16)
    assert attn.q.shape == attn.o.shape == (256, 8, 16)
    assert abs(attn.q.std().item() - 0.02) < 1e-3 and (attn.layer_norm.weight == 1).all()
    assert attn.layer_norm.eps == 1e-12


def test_from_transformers_copies_and_keeps_its_settings():
    layer = theirs(torch.bfloat16, dropout=0.3).train()
    attn = xk.TwoStreamAttention.from_transformers(layer)
    assert attn.training and attn.dropout.p == 0.3 and attn.q.dtype == torch.bfloat16
    attn.q.data.zero_()
    assert layer.q.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parameters(backend, dtype):
    inputs, layer = Inputs(dtype=dtype), theirs(dtype)
    h, g = inputs.of_ours(xk.TwoStreamAttention.from_transformers(layer, backend))
    exact = copy.copy(inputs)
    for name in ("h", "g", "mems", "rel_pos"):
        setattr(exact, name, getattr(inputs, name).double())
    wanted = exact.of_ours(xk.TwoStreamAttention.from_transformers(layer.double(), "reference"))
    assert h.dtype == g.dtype == dtype
    for found, w in zip((h, g), wanted, strict=True):
        assert (found.double() - w).abs().max() < 16 * torch.finfo(dtype).eps * w.abs().max()


def test_autocast(backend):
    inputs, attn = Inputs(), xk.TwoStreamAttention(WIDTH, H, backend=backend)
    wanted = inputs.of_ours(attn)
    with torch.autocast("cpu", torch.bfloat16):
        found = inputs.of_ours(attn)
    for f, w in zip(found, wanted, strict=True):
        assert torch.allclose(f.float(), w, atol=0.05)
    found[0].sum().backward()
    assert attn.q.grad.dtype == torch.float32


@pytest.mark.parametrize("mask", ["rank", "dense"])
def test_compiles_into_one_graph_and_not_again(backend, mask):
    inputs, attn = Inputs(), xk.TwoStreamAttention(WIDTH, H, backend=backend)
    dense = inputs.mask.to_bool("query")
    compiled = torch.compile(attn, fullgraph=True, backend="aot_eager")

    def run(module):
        rel_pos = None if mask == "rank" else inputs.rel_pos
        return inputs.of_ours(module, mask=inputs.mask if mask == "rank" else dense, rel_pos=rel_pos)

    wanted, found = run(attn), run(compiled)
    assert all(torch.allclose(f, w, atol=1e-5) for f, w in zip(found, wanted, strict=True))
    with torch._dynamo.config.patch(error_on_recompile=True):
        run(compiled)


def test_dropout_gradient_flows_and_training_differs(backend):
    attn = xk.TwoStreamAttention(WIDTH, H, dropout=0.4, backend=backend)
    inputs = Inputs()
    h, g = inputs.of_ours(attn)
    (h.square().sum() + g.square().sum()).backward()
    assert all(p.grad.isfinite().all() for p in attn.parameters())


@pytest.mark.parametrize("backend", COMPILED)
def test_output_projection_gets_the_kernel_output_without_copy(backend, monkeypatch):
    seen = []
    linear = attention.linear
    monkeypatch.setattr(attention, "linear", lambda x, w: seen.append(x._base is not None) or linear(x, w))
    xk.TwoStreamAttention(WIDTH, H, backend=backend)(torch.randn(B, L, WIDTH))
    assert seen[-1]  # the last product


@pytest.mark.parametrize(
    "change, text",
    [
        (dict(h=torch.zeros(L, WIDTH)), r"h must be a tensor \(batch, length, d_model = 16\), got shape \(9, 16\)"),
        (dict(h=torch.zeros(B, L, 8)), r"h must have shape \(B, length, 16\), got \(2, 9, 8\)"),
        (dict(h=torch.zeros(B, L, WIDTH).double()), "h must be torch.float32 like the parameters, got torch.float64"),
        (dict(h=torch.zeros(B, L, WIDTH, device="meta")), "h must be on the parameters' device cpu, got meta"),
        (dict(h=None), "h must be a tensor .* got NoneType"),
        (dict(g=torch.zeros(B + 1, N, WIDTH)), r"g must have shape \(2, length, 16\), got \(3, 3, 16\)"),
        (dict(g=None), "target_positions needs a query stream, but g is None"),
        (dict(target_positions=None), "g has 3 rows and h 9: without target_positions"),
        (dict(target_positions=torch.zeros(B, N)), "target_positions must hold integers, got torch.float32"),
        (dict(target_positions=torch.zeros(N).int()), r"target_positions must be .* \(2, 3\), got shape \(3,\)"),
        (
            dict(target_positions=torch.full((B, N), L)),
            r"target_positions must lie in \[0, 9\), got values from 9 to 9",
        ),
        (dict(mems=torch.zeros(B, M, 8)), r"mems must have shape \(2, length, 16\), got \(2, 4, 8\)"),
        (dict(rel_pos=torch.zeros(21, WIDTH)), r"rel_pos must be .* P = M \+ 2 L = 22, or .* = 14 .* got \(21, 16\)"),
        (dict(rel_pos=torch.zeros(3, 22, WIDTH)), r"rel_pos must be .* got \(3, 22, 16\)"),
        (dict(rel_pos=torch.zeros(22, WIDTH).double()), "rel_pos must be torch.float32 like the parameters"),
        (dict(segment_ids=torch.zeros(B, M + L).int()), r"segment_ids must be .* shape \(2, 9\), got shape \(2, 13\)"),
        (dict(segment_ids=torch.zeros(B, L)), "segment_ids must hold integers"),
        (dict(mask=xk.RankMask.full(B, L)), r"mask must have query_rank \(2, 9\) and key_rank \(2, 13\), got"),
        (dict(mask=xk.RankMask.full(3, L, M)), "mask must have query_rank"),
        (dict(mask=torch.ones(B, N, M + L).bool()), r"mask must broadcast to .*\(2, 9, 13\), got \(2, 3, 13\)"),
        (dict(mask=torch.ones(L, M + L)), "mask must be a RankMask or a bool tensor .* got torch.float32"),
        (dict(mask=torch.ones(B, M + L).bool()), r"mask of shape \(2, 13\) may be padding of 2 sequences"),
        (dict(mask="causal"), "mask must be a RankMask or a bool tensor .* got str"),
    ],
)
def test_bad_input_is_named(change, text):
    inputs, attn = Inputs(), xk.TwoStreamAttention(WIDTH, H)
    arguments = dict(h=inputs.h, g=inputs.g, mask=inputs.mask, mems=inputs.mems, target_positions=inputs.targets)
    with pytest.raises(ValueError, match=text):
        attn(**(arguments | change))


@pytest.mark.parametrize(
    "arguments, text",
    [
        ((512, 7), r"d_head must be given where d_model \(512\) is no multiple of n_head \(7\)"),
        ((0, 8), "d_model must be a positive integer, got 0"),
        ((512, 8.0), "n_head must be a positive integer, got 8.0"),
        ((512, 8, None, 0.0, 1e-12, "gpu"), "backend must be None or one of .* got 'gpu'"),
        ((512, 8, 64, 1.0), r"dropout must be in \[0, 1\), got 1.0"),
    ],
)
def test_bad_sizes_are_named(arguments, text):
    with pytest.raises(ValueError, match=text):
        xk.TwoStreamAttention(*arguments)


def test_unknown_norm_is_named():
    with pytest.raises(ValueError, match=r"norm must be one of \('post', 'pre', None\), got 'rms'"):
        xk.TwoStreamAttention(512, 8, norm="rms")


def test_from_transformers_refuses_other_modules():
    with pytest.raises(ValueError, match="module must be transformers' XLNetRelativeAttention .* got Linear"):
        xk.TwoStreamAttention.from_transformers(torch.nn.Linear(2, 2))


def test_a_fake_call_leaves_nothing_behind_for_real_ones():
    attn = xk.TwoStreamAttention(32, 4)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        attn(torch.empty(2, 9, 32))
    out, _ = attn(torch.randn(2, 9, 32))
    assert type(out) is torch.Tensor and out.isfinite().all()
