"""accelerate and restore on the attention of NeMo, ESPnet, SpeechBrain and fairseq2.

Each test runs on small modules of ours with the toolkits' conventions, and, marked slow, on the toolkits' own classes
where these are installed (`pip install nemo-toolkit espnet speechbrain fairseq2`, each in an environment of its own).
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import logging
import pickle
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import xlnet_kernels as xk
from tests.integrations import conventions
from tests.integrations.conventions import HEADS, WIDTH
from xlnet_kernels import info
from xlnet_kernels.integrations import _relative, accelerated
from xlnet_kernels.integrations._libraries import LIBRARIES

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTH, SHORT = 13, 9  # frames of the two sequences of a batch
HIDDEN = torch.arange(LENGTH) >= torch.tensor([[LENGTH], [SHORT]])  # where there is no frame
FILES = {
    "nemo": "nemo.collections.asr.parts.submodules.multi_head_attention",
    "espnet": "espnet.nets.pytorch_backend.transformer.attention",
    "speechbrain": "speechbrain.nnet.attention",
    "fairseq2": "fairseq2.models.transformer.sdpa.relative",
}


def real(toolkit: str):
    """The toolkit's own module."""
    if not any(importlib.util.find_spec(name) for name in (toolkit, f"{toolkit}2")):
        pytest.skip(f"{toolkit} is not installed")
    from lib.toolkits import leave_out_unneeded

    leave_out_unneeded(toolkit)
    if toolkit == "espnet" and importlib.util.find_spec("espnet") is None:  # from 202609 on
        return importlib.import_module(FILES["espnet"].replace("espnet.", "espnet2.legacy."))
    return importlib.import_module(FILES[toolkit])


@pytest.fixture(params=["small", pytest.param("real", marks=pytest.mark.slow)])
def toolkits(request, scripts):
    """toolkit -> what has its classes."""
    if request.param == "real":
        yield real
    else:
        with conventions.installed():
            yield lambda toolkit: conventions


@pytest.fixture
def small():
    with conventions.installed():
        yield conventions


@pytest.fixture
def calls(monkeypatch) -> list[dict]:
    """The keyword arguments of each call of the operator."""
    seen: list[dict] = []

    def spy(*args, **kwargs):
        seen.append(kwargs)
        return xk.rel_attention(*args, **kwargs)

    monkeypatch.setattr(_relative, "rel_attention", spy)
    return seen


def positions(rows: int, batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, rows, WIDTH, dtype=torch.float64)


def nemo(source, cls="RelPositionMultiHeadAttention", dropout=0.0, **options):
    module = source("nemo")
    if module is conventions:
        attention = getattr(module, cls)(dropout)
        for name, value in options.items():
            setattr(attention, name, value)
        return attention
    return getattr(module, cls)(HEADS, WIDTH, dropout, None, None, **options)


def espnet(source, cls="RelPositionMultiHeadedAttention", dropout=0.0, zero_triu=False):
    module = source("espnet")
    if module is conventions:
        return getattr(module, cls)(zero_triu, dropout)
    return getattr(module, cls)(HEADS, WIDTH, dropout, zero_triu)


def fairseq2(source, bias="IdentityBias", *options):
    module = source("fairseq2")
    if module is conventions:
        kinds = encoding = module
        encoding = module.RelativePositionalEncoding()
    else:
        kinds = importlib.import_module("fairseq2.models.transformer.attention_bias")
        encoding = module.RelativePositionalEncoding(WIDTH, 50)
    return module.RelativePositionSDPA(WIDTH, HEADS, encoding, getattr(kinds, bias)(*options))


def of_fairseq2(attention):
    """Its layouts and cache of biases."""
    if type(attention.bias).__module__ == conventions.__name__:
        return conventions.BatchLayout, conventions.AttentionBiasCache
    nn_module = importlib.import_module("fairseq2.nn")
    return nn_module.BatchLayout, importlib.import_module(
        "fairseq2.models.transformer.attention_bias"
    ).AttentionBiasCache


def call_nemo(attention, x, padded):
    mask = (HIDDEN[:, None] | HIDDEN[:, :, None]) if padded else None
    return attention(query=x, key=x, value=x, mask=mask, pos_emb=positions(2 * LENGTH - 1).to(x))


def call_longformer(attention, x, padded):
    pad_mask = HIDDEN if padded else torch.zeros_like(HIDDEN)
    return attention(query=x, key=x, value=x, pad_mask=pad_mask, pos_emb=positions(7).to(x))


def call_espnet(attention, x, padded):
    return attention(x, x, x, positions(2 * LENGTH - 1).to(x), ~HIDDEN[:, None] if padded else None)


def call_legacy(attention, x, padded):
    return attention(x, x, x, positions(LENGTH).to(x), (~HIDDEN)[:, None].long() if padded else None)


def call_speechbrain(attention, x, padded):
    out, weights = attention(x, x, x, positions(2 * LENGTH - 1).to(x), key_padding_mask=HIDDEN if padded else None)
    assert (weights is None) == hasattr(attention, "backend")
    return out


def call_fairseq2(attention, x, padded):
    layout, cache = of_fairseq2(attention)
    layout = layout((2, LENGTH), [LENGTH, SHORT] if padded else None)
    q, k, v = (f(x).unflatten(-1, (HEADS, -1)) for f in (torch.sin, torch.cos, torch.tanh))
    return attention(q, layout, k, layout, v, cache())[0].flatten(2)


# id: make, call, dtype (softmax is in float32 in SpeechBrain and fairseq2)
CASES = {
    "nemo": (nemo, call_nemo, torch.float64),
    "nemo-sdpa": (lambda s: nemo(s, use_pytorch_sdpa=True), call_nemo, torch.float64),
    "nemo-local": (
        lambda s: nemo(s, "RelPositionMultiHeadAttentionLongformer", att_context_size=[3, 3]),
        call_longformer,
        torch.float64,
    ),
    "espnet": (espnet, call_espnet, torch.float64),
    "espnet-triu": (lambda s: espnet(s, zero_triu=True), call_espnet, torch.float64),
    "espnet-legacy": (
        lambda s: espnet(s, "LegacyRelPositionMultiHeadedAttention", zero_triu=True),
        call_legacy,
        torch.float64,
    ),
    "speechbrain": (lambda s: s("speechbrain").RelPosMHAXL(WIDTH, HEADS), call_speechbrain, torch.float32),
    "speechbrain-vbias": (
        lambda s: s("speechbrain").RelPosMHAXL(WIDTH, HEADS, vbias=True),
        call_speechbrain,
        torch.float32,
    ),
    "fairseq2": (fairseq2, call_fairseq2, torch.float32),
    "fairseq2-causal": (lambda s: fairseq2(s, "CausalAttentionBias"), call_fairseq2, torch.float32),
}


def make(name, source):
    """The attention of that case with weights of some size, biases included."""
    attention = CASES[name][0](source)
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.3)
    return attention.to(CASES[name][2])


def run(name, attention, padded=False):
    """Outputs, and gradients of some sum of them: of the input and of all parameters by name."""
    torch.manual_seed(1)
    x = torch.randn(2, LENGTH, WIDTH, dtype=CASES[name][2], requires_grad=True)
    out = CASES[name][1](attention, x, padded)
    named = {"input": x} | dict(attention.named_parameters())
    gradients = torch.autograd.grad((out * torch.randn_like(out)).sum(), list(named.values()), allow_unused=True)
    return {"out": out} | dict(zip(named, gradients, strict=True))


def assert_same(found, wanted, dtype=torch.float64):
    """All sums differ in order alone; float32 as docs/validation.md has it."""
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    scale = max(x.abs().max() for x in wanted.values() if x is not None)
    for name, value in wanted.items():
        assert (value is None) == (found[name] is None), name
        if value is not None:
            assert (found[name] - value).abs().max() <= tolerance * scale, name


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_the_same(name, padded, toolkits, calls):
    attention = make(name, toolkits)
    model = nn.Sequential(nn.Linear(1, 1), nn.ModuleDict({"inside": attention}))
    kind, state = type(attention), {key: value.data_ptr() for key, value in model.state_dict().items()}
    wanted = run(name, attention, padded)
    attributes = dict(vars(attention))
    assert xk.accelerate(model) is model and sum(accelerated(model).values()) == 1
    found = run(name, attention, padded)
    assert len(calls) == 1
    assert_same(found, wanted, CASES[name][2])
    if padded:
        assert isinstance(calls[0]["mask"], xk.RankMask)
    if name == "nemo-local":  # a table of the window alone
        assert calls[0]["max_distance"] == 3
    assert {key: value.data_ptr() for key, value in model.state_dict().items()} == state
    assert isinstance(attention, kind) and type(attention).__name__ == kind.__name__
    xk.restore(model)
    assert type(attention) is kind and vars(attention).keys() == attributes.keys() and not accelerated(model)
    again = run(name, attention, padded)
    assert len(calls) == 1 and all(
        x is y is None or torch.equal(x, y) for x, y in zip(again.values(), wanted.values(), strict=True)
    )


@pytest.mark.parametrize("name", ["nemo", "espnet", "speechbrain"])
def test_masks_of_every_pair(name, toolkits, calls):
    """Windows become ranks, holes stay a dense mask, rows that see nothing give what the toolkit gives."""
    attention = make(name, toolkits)
    x, table = torch.randn(2, LENGTH, WIDTH, dtype=CASES[name][2]), positions(2 * LENGTH - 1).to(CASES[name][2])
    window = xk.RankMask.local(1, LENGTH, 4, 2).to_bool()[0]
    holes = torch.rand(LENGTH, LENGTH) < 0.6
    holes[3] = False
    for visible in (window, holes):
        both = visible & ~HIDDEN[:, None]
        if name == "speechbrain":
            options = dict(attn_mask=~visible, key_padding_mask=HIDDEN)
            wanted = attention(x, x, x, table, **options)[0]
            found = xk.accelerate(attention)(x, x, x, table, return_attn_weights=False, **options)
        elif name == "nemo":
            wanted = attention(x, x, x, ~both, table)
            found = xk.accelerate(attention)(x, x, x, ~both, table)
        else:
            wanted = attention(x, x, x, table, both)
            found = xk.accelerate(attention)(x, x, x, table, both)
        assert isinstance(calls[-1]["mask"], xk.RankMask) == (visible is window)
        assert_same({"out": found}, {"out": wanted}, CASES[name][2])
        xk.restore(attention)


def test_nemo_streams_with_its_cache(toolkits, calls):
    """Chunks of 4 frames with 6 cached ones, of which the first sequence has none yet."""
    attention = make("nemo", toolkits)
    attention.cache_drop_size = 0
    torch.manual_seed(1)
    mask = torch.zeros(2, 4, 10, dtype=torch.bool)
    mask[0, :, :6] = True
    cache, table = torch.randn(2, 6, WIDTH, dtype=torch.float64), positions(19)
    chunks = torch.randn(3, 2, 4, WIDTH, dtype=torch.float64)

    def outputs():
        past = cache
        for chunk in chunks:
            out, past = attention(query=chunk, key=chunk, value=chunk, mask=mask, pos_emb=table, cache=past)
            yield from (out, past)

    wanted = list(outputs())
    xk.accelerate(attention)
    for one, other in zip(outputs(), wanted, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)
    assert len(calls) == 3 and calls[0]["query_positions"].tolist() == [[6, 7, 8, 9]] * 2


STYLES = [
    ("regular", (-1, -1)),
    ("regular", (4, 1)),
    ("regular", (4, -1)),
    ("chunked_limited", (6, 2)),
    ("chunked_limited", (-1, 1)),
    ("chunked_limited", (-1, -1)),
    ("chunked_limited_with_rc", (4, 3, 2)),
    ("chunked_limited_with_rc", (-1, -1, -1)),
]


@pytest.mark.parametrize("offset", [None, torch.tensor([0, 3])], ids=["whole", "cached"])
@pytest.mark.parametrize("style, context", STYLES, ids=str)
def test_nemo_encoders_make_ranks(style, context, offset, toolkits):
    encoder = nemo_encoder(toolkits, style, context)
    arguments = list(context), torch.tensor([LENGTH, SHORT]), LENGTH, offset, torch.device("cpu")
    padding, hidden = encoder._create_masks(*arguments)
    xk.accelerate(encoder)
    same, ranks = encoder._create_masks(*arguments)
    if offset is not None:
        hidden, ranks = hidden[:, 5:], ranks[:, 5:]
    assert isinstance(ranks, xk.RankMask)
    assert torch.equal(same, padding) and torch.equal(ranks.to_bool(), ~hidden)
    xk.restore(encoder.layers[1])  # attention that takes tensors alone
    again = encoder._create_masks(*arguments)[1]
    assert torch.equal(again if offset is None else again[:, 5:], hidden)


def nemo_encoder(source, style="regular", context=(-1, -1)):
    if source("nemo") is conventions:
        return conventions.ConformerEncoder(style, context).double()
    module = importlib.import_module("nemo.collections.asr.modules.conformer_encoder")
    if context == (-1, -1) and style == "chunked_limited":
        context = (6, 2)  # it has the other as one of several
    return module.ConformerEncoder(
        16, 2, WIDTH, n_heads=HEADS, att_context_style=style, att_context_size=list(context), subsampling_factor=2,
        subsampling="dw_striding", dropout=0.0, dropout_emb=0.0, dropout_pre_encoder=0.0, dropout_att=0.0,
        conv_kernel_size=5, causal_downsampling=False,
    ).double()  # fmt: skip


def test_a_whole_nemo_encoder(toolkits, calls):
    encoder = nemo_encoder(toolkits, "regular", (6, 6)).eval()
    if toolkits("nemo") is conventions:
        inputs = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64), torch.tensor([LENGTH, SHORT])
    else:
        inputs = torch.randn(2, 16, 2 * LENGTH, dtype=torch.float64), torch.tensor([2 * LENGTH, 2 * SHORT])

    def outputs():
        out = encoder(*inputs) if toolkits("nemo") is conventions else encoder(audio_signal=inputs[0], length=inputs[1])
        return out if isinstance(out, torch.Tensor) else out[0]

    wanted = outputs()
    xk.accelerate(encoder)
    assert (outputs() - wanted).abs().max() < 1e-11
    assert len(calls) == 2 and calls[0]["mask"].query_rank is calls[1]["mask"].query_rank
    assert torch.equal(xk.restore(encoder) and outputs(), wanted)


@pytest.mark.slow
def test_a_streaming_nemo_encoder(scripts, calls):
    """NeMo's own cache-aware encoder, chunk after chunk, from an empty cache on; one sequence is shorter."""
    real("nemo")
    encoder = importlib.import_module("nemo.collections.asr.modules.conformer_encoder").ConformerEncoder(
        16, 2, WIDTH, n_heads=HEADS, att_context_style="chunked_limited", att_context_size=[6, 2],
        subsampling_factor=4, subsampling="dw_striding", causal_downsampling=True, conv_context_size="causal",
        conv_kernel_size=5, conv_norm_type="layer_norm",
    ).double().eval()  # fmt: skip
    encoder.setup_streaming_params()
    config = encoder.streaming_cfg
    first, other = config.chunk_size[0], config.chunk_size[1] + config.pre_encode_cache_size[1]
    chunks = [torch.randn(2, 16, size, dtype=torch.float64) for size in (first, other, other, other)]

    @torch.no_grad()
    def outputs():
        state = encoder.get_initial_cache_state(2, dtype=torch.float64, device=torch.device("cpu"))
        for chunk in chunks:
            names = ("cache_last_channel", "cache_last_time", "cache_last_channel_len")
            lengths = torch.tensor([chunk.shape[2], chunk.shape[2] - 4])
            given = dict(zip(names, state, strict=True))
            out, _, *state = encoder.cache_aware_stream_step(chunk, lengths, **given, keep_all_outputs=True)
            yield from (out, *state)

    wanted = list(outputs())
    xk.accelerate(encoder)
    for one, same in zip(outputs(), wanted, strict=True):
        assert torch.allclose(one, same, rtol=0, atol=1e-12)
    assert len(calls) == 8 and all(isinstance(call["mask"], xk.RankMask) for call in calls)


def test_espnet_has_its_maps_when_asked(toolkits):
    """Its trainer plots them; they are those of the last call, in training mode too, and cost no random numbers."""
    attention = make("espnet", toolkits).train()
    attention.dropout.p = 0.5
    x, table = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64), positions(2 * LENGTH - 1)
    assert xk.accelerate(attention).attn is None
    attention(x, x, x, table, ~HIDDEN[:, None])
    state = torch.get_rng_state()
    found = attention.attn
    assert torch.equal(torch.get_rng_state(), state) and attention.attn is found and not found.requires_grad
    xk.restore(attention)(x, x, x, table, ~HIDDEN[:, None])
    assert torch.allclose(attention.attn, found, atol=1e-12) and "_last_call" not in vars(attention)


@pytest.mark.parametrize("changed", range(6), ids=["query", "key", "value", "positions", "mask", "weight"])
def test_espnet_has_no_map_of_what_was_changed(changed, toolkits):
    attention = xk.accelerate(make("espnet", toolkits))
    inputs = [torch.randn(2, LENGTH, WIDTH, dtype=torch.float64) for _ in range(3)]
    inputs += [positions(2 * LENGTH - 1), (~HIDDEN[:, None]).long()]
    attention(*inputs)
    with torch.no_grad():
        [*inputs, attention.linear_q.weight][changed].mul_(2)
    assert attention.attn is None
    attention(*inputs)
    assert attention.attn is not None


def test_espnet_copies_are_without_inputs(toolkits):
    attention = xk.accelerate(make("espnet", toolkits))
    run("espnet", attention)
    for other in (copy.deepcopy(attention), pickle.loads(pickle.dumps(attention))):
        assert "_last_call" not in vars(other) and other.attn is None
    assert attention.attn is not None


def test_speechbrain_makes_its_maps_and_soft_masks(toolkits, calls):
    attention = make("speechbrain", toolkits)
    x, table = torch.randn(2, LENGTH, WIDTH), positions(2 * LENGTH - 1).float()
    soft = torch.randn(LENGTH, LENGTH)
    ways = [dict(return_attn_weights=True), dict(attn_mask=soft), dict(attn_mask=soft, return_attn_weights=False)]
    wanted = [attention(x, x, x, table, **way) for way in ways]
    xk.accelerate(attention)
    for one, way in zip(wanted, ways, strict=True):
        found = attention(x, x, x, table, **way)
        assert all(torch.equal(a, b) for a, b in zip(found, one, strict=True))
    assert not calls


def test_fairseq2_makes_its_maps_and_slopes(toolkits, calls):
    slopes = ("SlopeBias",) if toolkits("fairseq2") is conventions else ("ALiBiAttentionBias", HEADS)
    attention = fairseq2(toolkits, *slopes)
    layout, cache = of_fairseq2(attention)
    layout, q = layout((2, LENGTH), None), torch.randn(2, LENGTH, HEADS, WIDTH // HEADS)
    wanted = attention(q, layout, q, layout, q, cache())
    assert torch.equal(xk.accelerate(attention)(q, layout, q, layout, q, cache())[0], wanted[0])
    attention.bias = fairseq2(toolkits).bias
    out, weights = attention(q, layout, q, layout, q, cache(), needs_weights=True)
    assert weights.shape == (2, HEADS, LENGTH, LENGTH) and not calls
    assert torch.allclose(attention(q, layout, q, layout, q, cache())[0], out, atol=1e-6) and len(calls) == 1


def test_fairseq2_layouts_share_a_cache(toolkits, calls):
    """As they may in fairseq2, which keeps nothing where all is seen."""
    attention = fairseq2(toolkits)
    layout, cache = of_fairseq2(attention)
    q = torch.randn(2, 8, HEADS, WIDTH // HEADS)
    layouts = [layout((2, 8), lengths) for lengths in ([8, 8], [8, 5], [8, 8])]
    wanted = [attention(q, one, q, one, q, cache())[0] for one in layouts]
    shared = cache()
    xk.accelerate(attention)
    for one, out in zip(layouts, wanted, strict=True):
        assert_same({"out": attention(q, one, q, one, q, shared)[0]}, {"out": out}, torch.float32)
    assert [call["mask"] is None for call in calls] == [True, False, True]


@pytest.mark.parametrize("name, value", [("att_context_size", [4, 2]), ("global_tokens", 1)])
def test_longformer_settings_may_change_later(name, value, small, calls):
    """NeMo's own code computes what ours does not."""
    attention = make("nemo-local", lambda toolkit: small)
    setattr(attention, name, value)
    wanted = run("nemo-local", attention)
    delattr(attention, name)
    setattr(xk.accelerate(attention), name, value)
    assert torch.equal(run("nemo-local", attention)["out"], wanted["out"]) and not calls


def test_speechbrain_with_keys_of_another_tensor(toolkits, calls):
    """The weight is then laid out one projection after the other, and the queries are the last of the keys."""
    attention = make("speechbrain", toolkits)
    keys = torch.randn(2, LENGTH, WIDTH)
    table = positions(2 * LENGTH - 1).float()
    for query in (keys.sin(), keys[:, 8:].sin(), keys.clone()):
        xk.restore(attention)
        wanted = attention(query, keys, keys, table)[0]
        assert_same({"out": xk.accelerate(attention)(query, keys, keys, table)[0]}, {"out": wanted}, torch.float32)
    assert len(calls) == 3


@pytest.mark.parametrize("name", ["nemo-local", "espnet", "speechbrain"])
def test_a_sequence_may_be_all_padding(name, small, monkeypatch):
    """Zeros, then the bias, and no warning that padding may be inverted."""
    attention = make(name, lambda toolkit: small)
    monkeypatch.setitem(globals(), "HIDDEN", HIDDEN | torch.tensor([[False], [True]]))
    wanted = run(name, attention, padded=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = run(name, xk.accelerate(attention), padded=True)
    assert_same(found, wanted, CASES[name][2])


@pytest.mark.parametrize("name", ["nemo", "espnet", "speechbrain"])
def test_dropout_is_for_training(name, toolkits, calls):
    attention = make(name, toolkits)
    for module in attention.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.25
    xk.accelerate(attention, backend="reference")
    run(name, attention.train())
    run(name, attention.eval())
    assert [call["dropout_p"] for call in calls] == [0.25, 0.0]
    assert [call["backend"] for call in calls] == ["reference"] * 2


@pytest.mark.parametrize("name", CASES)
def test_copies_are_accelerated(name, toolkits, calls):
    attention = xk.accelerate(make(name, toolkits))
    wanted = run(name, attention)
    for other in (copy.deepcopy(attention), pickle.loads(pickle.dumps(attention))):
        assert_same(run(name, other), wanted)
    assert len(calls) == 3


@pytest.mark.parametrize("name", ["nemo", "nemo-local", "espnet", "speechbrain"])
def test_a_layer_compiles(name, small):
    attention = make(name, lambda toolkit: small)
    wanted = run(name, attention, padded=True)["out"]
    xk.accelerate(attention)
    compiled = torch.compile(attention, fullgraph=True, backend="eager")
    compiled.backend = None
    torch.manual_seed(1)
    x = torch.randn(2, LENGTH, WIDTH, dtype=CASES[name][2])
    assert_same({"out": CASES[name][1](compiled, x, True)}, {"out": wanted}, CASES[name][2])


@pytest.mark.parametrize("name", ["nemo", "espnet", "fairseq2"])
def test_autocast(name, toolkits):
    attention = make(name, toolkits).float()
    x = torch.randn(2, LENGTH, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        torch.manual_seed(1)
        wanted = CASES[name][1](attention, x, True)
        xk.accelerate(attention)
        torch.manual_seed(1)
        found = CASES[name][1](attention, x, True)
    assert found.dtype == wanted.dtype
    assert (found - wanted).abs().max() <= 0.05 * wanted.abs().max()  # a few roundings of 2 ** -8 of each


def test_inputs_that_no_table_fits_are_left_to_the_toolkit(small, calls):
    """Cross-attention with more queries than keys, and tables of another length: whatever happens there happens."""
    for name in ("speechbrain", "nemo", "espnet"):
        attention = xk.accelerate(make(name, lambda toolkit: small))
        query = torch.randn(2, 5, WIDTH, dtype=CASES[name][2])
        key, table = query[:, :3], positions(5).to(query)
        options = dict(query=query, key=key, value=key, mask=None, pos_emb=table)
        if name == "speechbrain":
            options = dict(query=query, key=key, value=key, pos_embs=table)
        attention(**options)
    legacy = xk.accelerate(make("espnet-legacy", lambda toolkit: small))
    legacy(query, key, key, positions(3), None)
    local = xk.accelerate(make("nemo-local", lambda toolkit: small))
    local(query, query, query, torch.zeros(2, 5, dtype=torch.bool), positions(7), query)  # with a cache
    assert not calls


REFUSED = {
    "nemo-global": (lambda s: longformer(s, global_tokens=2), "with global tokens.* got global_tokens = 2"),
    "nemo-one-side": (lambda s: longformer(s, att_context_size=[4, 2]), r"att_context_size = \[4, 2\]: NeMo adds"),
    "espnet-legacy": (
        lambda s: espnet(s, "LegacyRelPositionMultiHeadedAttention"),
        "without zero_triu: keys ahead of a query get position scores of the next query",
    ),
}


def longformer(source, att_context_size=(3, 3), **options):
    name = "RelPositionMultiHeadAttentionLongformer"
    return nemo(source, name, att_context_size=list(att_context_size), **options)


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_served_is_refused_and_nothing_is_changed(case, toolkits):
    make_one, text = REFUSED[case]
    good, bad = make("nemo", toolkits) if "nemo" in case else make("espnet", toolkits), make_one(toolkits)
    kinds = type(good), type(bad)
    with pytest.raises(ValueError, match=text):
        xk.accelerate(nn.ModuleList([good, bad]))
    assert (type(good), type(bad)) == kinds


def test_a_class_that_cannot_be_exchanged_changes_nothing(small):
    class Fixed(small.RelPositionMultiHeadAttention):
        def __setattr__(self, name, value):
            if name == "__class__":
                raise TypeError("its class is fixed")
            super().__setattr__(name, value)

    model = nn.ModuleList([make("nemo", lambda toolkit: small), Fixed()])
    kinds = [type(module) for module in model]
    with pytest.raises(TypeError, match="its class is fixed"):
        xk.accelerate(model)
    assert [type(module) for module in model] == kinds and not any("backend" in vars(module) for module in model)


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_versions_that_are_not_served_are_refused(library, small, monkeypatch):
    cls = type(next(iter(library.classes)), (nn.Module,), {"__module__": f"{library.roots[0]}.some.where"})
    monkeypatch.setitem(sys.modules, library.roots[0], SimpleNamespace(__version__="0.0.9"))
    with pytest.raises(ValueError, match=rf"{library.name} 0.0.9 cannot be accelerated: version {library.least} or"):
        xk.accelerate(nn.Sequential(cls()))


def test_a_class_of_the_same_name_with_another_forward_is_refused(small):
    """ESPnet's transducer has one."""

    def forward(self, query, key, value, pos_enc, mask, chunk_mask=None): ...

    names = {"__module__": "espnet2.asr_transducer.encoder.modules.attention", "forward": forward}
    cls = type("RelPositionMultiHeadedAttention", (nn.Module,), names)
    with pytest.raises(
        ValueError, match=r"asr_transducer.*takes \(query, key, value, pos_enc, mask, chunk_mask\), and"
    ):
        xk.accelerate(cls())


def test_models_with_nothing_to_replace_say_what_they_have():
    layer = nn.TransformerEncoderLayer(8, 2)
    with pytest.raises(ValueError, match=r"got MultiheadAttention \(torch's has no relative positions\); .*--models"):
        xk.accelerate(layer)
    with pytest.raises(ValueError, match="got Linear; .*transformers, NeMo, ESPnet, SpeechBrain, fairseq2"):
        xk.accelerate(nn.Linear(1, 1))
    capped = type("Gemma4AudioAttention", (nn.Module,), {"__module__": "transformers.models.gemma4.modeling_gemma4"})
    with pytest.raises(ValueError, match=r"got Gemma4AudioAttention \(its scores are capped before the softmax\)"):
        xk.accelerate(nn.Sequential(capped()))
    assert accelerated(layer) == {} and xk.restore(layer) is layer


def test_what_was_replaced_is_said_in_one_line(small, caplog):
    model = nn.ModuleList([make("nemo", lambda toolkit: small), make("espnet", lambda toolkit: small)])
    with caplog.at_level(logging.INFO, "xlnet_kernels"):
        xk.accelerate(model)
    wanted = {"NeMo RelPositionMultiHeadAttention": 1, "ESPnet RelPositionMultiHeadedAttention": 1}
    assert accelerated(model) == wanted
    (record,) = caplog.records
    assert record.getMessage() == "accelerated: " + ", ".join(f"1 x {name}" for name in wanted)


def test_subclasses_keep_what_they_override(small, calls):
    """As NeMo's adapters do."""

    class Adapter(small.RelPositionMultiHeadAttention):
        def forward(self, *inputs, **options):
            return super().forward(*inputs, **options) * 2

    attention = Adapter().double()
    wanted = run("nemo", attention)
    assert accelerated(xk.accelerate(attention)) == {"NeMo Adapter": 1}
    assert_same(run("nemo", attention), wanted)
    assert len(calls) == 1


def test_no_toolkit_is_imported():
    code = """
import sys, torch, xlnet_kernels as xk
before = set(sys.modules)
assert not [name for name in before if name.startswith("xlnet_kernels.integrations._accelerate")]
try:
    xk.accelerate(torch.nn.Linear(1, 1))
except ValueError:
    pass
assert xk.restore is xk.integrations.transformers.restore and "accelerate" in dir(xk)
roots = {name.partition(".")[0] for name in sys.modules}
assert not roots & {"transformers", "nemo", "espnet", "espnet2", "speechbrain", "fairseq2", "onnx"}
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_info_lists_what_is_known(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["info", "--models"])
    assert info.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 120
    for library in LIBRARIES:
        (head,) = (line for line in lines if line.startswith(f"{library.name}, from {library.least} on; here: "))
        for name in (*library.classes, *library.refused):
            assert any(line.strip().startswith(name) for line in lines), name


def test_every_stand_in_is_there():
    for library in LIBRARIES[1:]:  # those of transformers import it
        for name, (module, _) in library.classes.items():
            assert getattr(importlib.import_module(f"xlnet_kernels.integrations.{module}"), name).__name__ == name
