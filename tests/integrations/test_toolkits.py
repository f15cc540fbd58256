"""accelerate and restore on the attention of NeMo, ESPnet, SpeechBrain and fairseq2.

Each test runs on small modules of ours with the toolkits' conventions, and, marked slow, on the toolkits' own classes
where these are installed (`pip install nemo-toolkit espnet speechbrain fairseq2`, each in an environment of its own).
"""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import xlnet_kernels as xk
from tests.integrations import conventions, toolkit_cases
from tests.integrations.conventions import HEADS, WIDTH
from tests.integrations.toolkit_cases import (
    CASES,
    HIDDEN,
    LENGTH,
    assert_same,
    fairseq2,
    make,
    of_fairseq2,
    positions,
    run,
)
from xlnet_kernels.integrations import accelerated

pytestmark = pytest.mark.usefixtures("one_thread")


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


@pytest.mark.parametrize("name", ["nemo-local", "espnet", "speechbrain"])
def test_a_sequence_may_be_all_padding(name, small, monkeypatch):
    """Zeros, then the bias, and no warning that padding may be inverted."""
    attention = make(name, lambda toolkit: small)
    monkeypatch.setattr(toolkit_cases, "HIDDEN", HIDDEN | torch.tensor([[False], [True]]))
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
    for module in attention.modules():  # alone, as for Monte Carlo estimates
        module.train(isinstance(module, nn.Dropout))
    run(name, attention)
    for module in attention.modules():
        module.train(not isinstance(module, nn.Dropout))
    run(name, attention)
    assert [call["dropout_p"] for call in calls] == [0.25, 0.0, 0.25, 0.0]
    assert [call["backend"] for call in calls] == ["reference"] * 4


@pytest.mark.parametrize("name", CASES)
def test_copies_are_accelerated(name, toolkits, calls):
    attention = xk.accelerate(make(name, toolkits))
    wanted = run(name, attention)
    for other in (copy.deepcopy(attention), pickle.loads(pickle.dumps(attention))):
        assert_same(run(name, other), wanted)
    assert len(calls) == 3


@pytest.mark.parametrize("name", ["nemo", "nemo-local", "nemo-transformer-causal", "espnet", "speechbrain"])
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


CHANGES = {
    "nothing": lambda attention, weight: None,
    "in place": lambda attention, weight: weight.mul_(2),
    "without a trace": lambda attention, weight: weight.data.mul_(2),
    "loaded": lambda attention, weight: attention.load_state_dict({k: 2 * v for k, v in attention.named_parameters()}),
    "rounded": lambda attention, weight: attention.bfloat16(),
}


@pytest.mark.parametrize("name", [name for name in CASES if "shaw" not in name])  # whose table is not projected
def test_positions_are_projected_once_at_inference(name, toolkits, monkeypatch):
    """Once more after a change of the weight, or with gradients."""
    attention = make(name, toolkits).eval()
    plain, part = copy.deepcopy(attention), "r_proj" if name.startswith("fairseq2") else "linear_pos"
    projection, projected = getattr(xk.accelerate(attention), part), []
    forward = type(projection).forward  # one of the instance's own would be heeded

    def counted(self, x):
        if self is projection:
            projected.append(x.shape[-2])
        return forward(self, x)

    monkeypatch.setattr(type(projection), "forward", counted)
    with torch.no_grad():
        (every, _) = infer_both(name, attention, plain, projected)
        assert every > 1
        for what, change in CHANGES.items():
            for module in (attention, plain):
                change(module, getattr(module, part).weight)
                module.to(CASES[name][2])
            assert (infer_both(name, attention, plain, projected) == [1]) == (what == "nothing"), what
            assert infer_both(name, attention, plain, projected) == [1]
    # Not plain.train(), because training of NeMo's global attention is in float32 alone; nothing drops out.
    assert infer_both(name, attention.train(), plain, projected) == [every]
    assert run(name, attention)[f"{part}.weight"].any()
    assert "kept" in vars(attention) and "kept" not in vars(xk.restore(attention))


def infer_both(name, attention, plain, projected) -> list[int]:
    """Both give the same; how many rows the accelerated one has projected, call by call."""
    projected.clear()
    x, outs = torch.randn(2, LENGTH, WIDTH, dtype=CASES[name][2]), []
    for module in (attention, plain):
        torch.manual_seed(1)  # of the positions
        outs.append(CASES[name][1](module, x, False))
    assert_same({"out": outs[0]}, {"out": outs[1]}, CASES[name][2])
    return list(projected)


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


@pytest.mark.parametrize("name", ["espnet", "espnet-triu"])
@pytest.mark.parametrize("changed", range(7), ids=["query", "key", "value", "positions", "mask", "weight", "bias"])
def test_espnet_has_the_map_of_its_last_call(changed, name, toolkits):
    """Later writes to its inputs do not change it, even those that no version counts."""
    attention = make(name, toolkits)
    inputs = [torch.randn(2, LENGTH, WIDTH, dtype=torch.float64) for _ in range(3)]
    inputs += [positions(2 * LENGTH - 1), (~HIDDEN[:, None]).long()]
    attention(*inputs)
    wanted = attention.attn.detach().clone()
    xk.accelerate(attention)(*inputs)
    part = [*inputs, attention.linear_q.weight, attention.pos_bias_u][changed]
    part.detach().numpy()[:] *= 0 if changed == 4 else 2
    assert torch.allclose(attention.attn, wanted, rtol=0, atol=1e-12)
    attention(*inputs)
    assert (changed == 2) == torch.allclose(attention.attn, wanted, rtol=0, atol=1e-12)


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
