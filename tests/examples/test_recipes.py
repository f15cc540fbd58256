"""Examples to copy: Conformer attention with ESPnet's and NeMo's names, and the examples that learn a tiny task."""

from __future__ import annotations

import importlib
import runpy
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import xlnet_kernels as xk
from tests import ROOT
from xlnet_kernels.integrations.conformer import RelPositionAttention, conformer_positions

EXAMPLES = ROOT / "examples"

pytestmark = pytest.mark.usefixtures("scripts", "one_thread")


def plain_attention(attn: RelPositionAttention, x: Tensor, frames: Tensor, pos_emb: Tensor, visible: Tensor) -> Tensor:
    """Plain torch, every map in memory: query i and key j, distance M + i - j, (B, L, M + L) visible."""

    def heads(linear: torch.nn.Linear, rows: Tensor) -> Tensor:
        return linear(rows).unflatten(-1, attn.pos_bias_u.shape).transpose(-3, -2)

    query, key, value = heads(attn.linear_q, x), heads(attn.linear_k, frames), heads(attn.linear_v, frames)
    length, keys = x.shape[1], frames.shape[1]
    distance = torch.arange(keys - length, keys)[:, None] - torch.arange(keys)
    score = (query + attn.pos_bias_u[:, None]) @ key.mT
    by_row = (query + attn.pos_bias_v[:, None]) @ heads(attn.linear_pos, pos_emb).mT
    score = (score + by_row.gather(-1, (keys - 1 - distance).expand_as(score))) / query.shape[-1] ** 0.5
    score = score.masked_fill(~visible[:, None], -torch.inf)
    out = score.softmax(-1).masked_fill(~visible[:, None], 0.0) @ value
    return attn.linear_out(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("mask", ["none", "ranks", "row", "map"])
@pytest.mark.parametrize("mem_len", [0, 3], ids=["", "cache"])
def test_conformer_attention_equals_plain_torch(mask, mem_len, backend):
    attn = RelPositionAttention(4, 32, backend=backend).double()
    x, cache = torch.randn(2, 7, 32, dtype=torch.float64), torch.randn(2, mem_len, 32, dtype=torch.float64)
    keys = mem_len + 7
    pos_emb = torch.randn(2 * keys - 1, 32, dtype=torch.float64)
    hidden = torch.arange(keys) >= torch.tensor([[keys], [keys - 2]])
    options = {
        "none": (None, torch.ones(2, 7, keys, dtype=torch.bool)),
        "ranks": (xk.RankMask(torch.ones(2, 7, dtype=torch.int), hidden.int()), ~hidden[:, None].expand(-1, 7, -1)),
        "row": (~hidden[:, None], ~hidden[:, None].expand(-1, 7, -1)),
        "map": (torch.rand(2, 7, keys) < 0.5,) * 2,
    }
    given, visible = options[mask]
    leaves = [x.requires_grad_(), cache.requires_grad_(), pos_emb.requires_grad_(), *attn.parameters()]
    found = attn(x, pos_emb, given, cache if mem_len else None)
    wanted = plain_attention(attn, x, torch.cat([cache, x], 1), pos_emb, visible)
    assert torch.allclose(found, wanted, atol=1e-12)
    weights = torch.randn_like(wanted)
    gradients = [torch.autograd.grad(out, leaves, weights, materialize_grads=True) for out in (found, wanted)]
    for one, other in zip(*gradients, strict=True):
        assert torch.allclose(one, other, atol=1e-11)


def test_positions_have_any_of_three_shapes():
    attn, x, pos_emb = RelPositionAttention(2, 8), torch.randn(3, 4, 8), torch.randn(7, 8)
    wanted = attn(x, pos_emb)
    assert torch.equal(attn(x, pos_emb[None]), wanted)
    assert torch.allclose(attn(x, pos_emb.expand(3, -1, -1)), wanted, atol=1e-6)


def test_a_row_that_sees_nothing_gives_the_bias():
    attn = RelPositionAttention(2, 8)
    visible = torch.ones(1, 4, 4, dtype=torch.bool)
    visible[0, 2] = False
    assert torch.equal(attn(torch.randn(1, 4, 8), torch.randn(7, 8), visible)[0, 2], attn.linear_out.bias)


def test_dropout_is_for_training():
    attn, x, pos_emb = RelPositionAttention(2, 8, dropout_rate=0.5), torch.randn(1, 9, 8), torch.randn(17, 8)
    assert not torch.equal(attn(x, pos_emb), attn(x, pos_emb))
    assert torch.equal(attn.eval()(x, pos_emb), attn(x, pos_emb))


def test_an_espnet_checkpoint_loads_and_gives_the_same():
    """transformers' FastSpeech2-Conformer is ESPnet's module: its names, its order of positions, its sinusoids."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.fastspeech2_conformer import modeling_fastspeech2_conformer as espnet

    config = transformers.FastSpeech2ConformerConfig(hidden_size=32)
    sizes = {"num_attention_heads": 4, "attention_dropout_rate": 0.0, "positional_dropout_rate": 0.0}
    theirs = espnet.FastSpeech2ConformerAttention(config, sizes)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    ours = RelPositionAttention(4, 32)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 11, 32)
    pos_emb = espnet.FastSpeech2ConformerRelPositionalEncoding(config, sizes)(x)[1]
    assert torch.allclose(conformer_positions(11, 32), pos_emb[0], atol=2e-6)
    mask = torch.arange(11) < torch.tensor([[[11]], [[6]]])
    wanted, _ = theirs(x, mask, pos_emb)
    assert torch.allclose(ours(x, pos_emb, mask), wanted, atol=1e-5 * wanted.abs().max().item())


@pytest.mark.parametrize(
    "arguments, words",
    [
        (dict(n_head=0, n_feat=8), "n_head must be a positive integer, got 0"),
        (dict(n_head=2, n_feat="8"), "n_feat must be a positive integer, got '8'"),
        (dict(n_head=3, n_feat=8), r"n_feat must be a multiple of n_head \(3\), got 8"),
        (dict(n_head=2, n_feat=8, dropout_rate=1), r"dropout_rate must be in \[0, 1\), got 1"),
    ],
)
def test_bad_sizes_are_named(arguments, words):
    with pytest.raises(ValueError, match=words):
        RelPositionAttention(**arguments)


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(x=torch.zeros(2, 8)), r"x must have shape \(B, length, 8\), got \(2, 8\)"),
        (dict(x=torch.zeros(2, 4, 6)), r"x must have shape \(B, length, 8\), got \(2, 4, 6\)"),
        (dict(cache=torch.zeros(2, 4)), r"cache must have shape \(B, length, 8\), got \(2, 4\)"),
        (dict(pos_emb=torch.zeros(8, 8)), r"pos_emb must have shape .* = 7, got \(8, 8\)"),
        (dict(pos_emb=torch.zeros(8)), r"pos_emb must have shape .*, got \(8,\)"),
        (dict(mask=torch.ones(2, 4, dtype=torch.bool)), r"mask must be \(B, L, M \+ L\) or .*, got shape \(2, 4\)"),
        (dict(mask=torch.ones(2, 1, 4)), "mask must be a RankMask or a bool tensor"),
    ],
)
def test_bad_inputs_are_named(change, words):
    inputs = dict(x=torch.zeros(2, 4, 8), pos_emb=torch.zeros(7, 8)) | change
    with pytest.raises(ValueError, match=words):
        RelPositionAttention(2, 8)(**inputs)


def test_conformer_positions_refuses_odd_widths():
    with pytest.raises(ValueError, match="d_model must be even"):
        conformer_positions(4, 7)


def test_a_conformer_block_ignores_padding():
    import conformer

    block = conformer.ConformerBlock(32, 4, 48, kernel_size=5).double().eval()
    x = torch.randn(1, 9, 32, dtype=torch.float64)
    wanted = block(x, conformer_positions(9, 32, dtype=x.dtype))
    longer = F.pad(x, (0, 0, 0, 4), value=5.0)
    found = block(longer, conformer_positions(13, 32, dtype=x.dtype), torch.arange(13)[None] >= 9)
    assert torch.allclose(found[:, :9], wanted, atol=1e-12)


def test_segments_with_memory_are_one_pass_over_the_text():
    import transformer_xl

    model = transformer_xl.TransformerXL().double()
    for layer in model.layers:
        torch.nn.init.normal_(layer.content_bias)
        torch.nn.init.normal_(layer.position_bias)
    ids = torch.randint(transformer_xl.SYMBOLS, (2, 20))
    wanted, _ = model(ids)
    mems, found = None, []
    for part in ids.split(7, 1):
        scores, mems = model(part, mems, mem_len=20)
        found.append(scores)
    assert torch.allclose(torch.cat(found, 1), wanted, atol=1e-12)
    assert not any(mem.requires_grad for mem in mems)
    ids[:, 12:] += 1  # what comes later is not seen
    assert torch.equal(model(ids % transformer_xl.SYMBOLS)[0][:, :12], wanted[:, :12])


def test_what_stands_in_a_gap_is_not_seen():
    import drop_in

    model = drop_in.GapFiller()
    ids, gaps = drop_in.make_batch(3)
    other = ids.scatter(1, gaps, 0)
    assert torch.equal(model(ids, gaps), model(other, gaps)) and not torch.equal(ids, other)


@pytest.mark.parametrize("name, steps, chance", [("conformer", 40, 1 / 8), ("drop_in", 70, 1 / 16)])
def test_examples_learn(name, steps, chance, capsys):
    assert importlib.import_module(name).main(["--steps", str(steps)]) > 0.8 > 5 * chance
    assert "by chance" in capsys.readouterr().out


def test_memory_is_what_the_transformer_xl_learns_with(capsys):
    import transformer_xl

    remembering, forgetting = transformer_xl.main(["--steps", "70"])
    assert remembering < 0.7 and forgetting > 1.8  # log 8 = 2.08 is knowing nothing
    assert "32 symbols of memory" in capsys.readouterr().out


@pytest.mark.parametrize("name, least", [("conformer", 1), ("drop_in", 1), ("transformer_xl", 3)])
def test_too_few_steps_are_refused(name, least, capsys):
    main = importlib.import_module(name).main
    for steps in (least - 1, 0, -3):
        with pytest.raises(SystemExit, match="2"):
            main(["--steps", str(steps)])
        assert f"argument --steps: must be in [{least}, inf), got {steps}" in capsys.readouterr().err
    main(["--steps", str(least)])


@pytest.mark.parametrize("name", ["conformer", "drop_in", "transformer_xl"])
def test_ctrl_c_stops_without_a_traceback(name, monkeypatch, capsys):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", [name])
    monkeypatch.setattr(torch.optim, "AdamW", interrupted)
    with pytest.raises(SystemExit, match="130"):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert capsys.readouterr().err == f"{name}.py: stopped\n"
