"""accelerate with a window: the library's own attention under the same mask, in float64; cost."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

pytest.importorskip("transformers")

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import xlnet_kernels as xk
from tests.integrations import own_modules, test_shaw, toolkit_cases
from tests.integrations import test_speech as speech
from tests.integrations.conventions import WIDTH
from tests.integrations.speech_cases import CASES, build, one_thread  # noqa: F401
from tests.integrations.toolkit_cases import HIDDEN, LENGTH, make, positions
from xlnet_kernels.integrations import _libraries, _window, accelerated

# left, right, global tokens
WINDOWS = [(3, 2, 0), (4, 0, 0), (0, 1, 0), (2, 3, 2), (1, 0, 1)]


def sees(left: int, right: int, count: int, frames: int = LENGTH) -> torch.Tensor:
    """(K, K) bool, by the definition."""
    pairs = torch.cartesian_prod(torch.arange(frames), torch.arange(frames))
    near = [(i - left <= j <= i + right) or i < count or j < count for i, j in pairs.tolist()]
    return torch.tensor(near).view(frames, frames)


class OfSize:
    """A mask of all pairs in the place of FastSpeech2's of one row."""

    def __init__(self, visible: torch.Tensor, rows: torch.Tensor) -> None:
        self.visible, self.size = visible, rows.size

    def unsqueeze(self, dim: int) -> torch.Tensor:
        return self.visible.long().unsqueeze(dim)


def hide_outside(model: torch.nn.Module, name: str, window: tuple[int, int, int]) -> None:
    """Gives transformers' attention its mask with all other pairs hidden."""

    def with_window(module, args, kwargs):
        visible = sees(*window, (args[0] if args else kwargs["hidden_states"]).shape[1])
        mask = kwargs.get("attention_mask")
        if name == "fastspeech2":
            rows = torch.ones(2, 1, LENGTH) if mask is None else mask
            kwargs["attention_mask"] = OfSize((rows != 0) & visible, rows)
        elif name == "speecht5":  # added to scores
            mask = torch.zeros(2, 1, *visible.shape).double() if mask is None else mask
            kwargs["attention_mask"] = mask.masked_fill(~visible, torch.finfo(mask.dtype).min)
        else:
            kwargs["attention_mask"] = visible.expand(2, 1, -1, -1) if mask is None else mask & visible
        return args, kwargs

    for module in model.modules():
        if type(module).__name__ == (CASES[name][-1] if name in CASES else "SpeechT5Attention"):
            module.register_forward_pre_hook(with_window, with_kwargs=True)


@pytest.mark.parametrize("masked", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_transformers_under_the_mask(name, window, masked, calls):
    left, right, count = window
    plain = build(name)
    model = xk.accelerate(copy.deepcopy(plain), window=(left, right), global_tokens=count)
    found = speech.run(name, model, masked)
    hide_outside(plain, name, window)
    speech.assert_same(found, speech.run(name, plain, masked), 1e-12)
    assert len(calls) == (6 if count else 2) and calls[0]["max_distance"] == left


@pytest.mark.parametrize("lengths", [None, [LENGTH, 9]], ids=["full", "padded"])
@pytest.mark.parametrize("window", WINDOWS[:4], ids=str)
def test_speecht5_under_the_mask(window, lengths):
    """Gradients of rows of padding aside, which see nothing where the window has only padding."""
    left, right, count = window
    plain = test_shaw.build("speecht5")
    model = xk.accelerate(copy.deepcopy(plain), window=(left, right), global_tokens=count)
    found = test_shaw.run(model, LENGTH, lengths)
    hide_outside(plain, "speecht5", window)
    wanted = test_shaw.run(plain, LENGTH, lengths)
    assert same(found["out"], wanted["out"])
    if lengths is None:
        toolkit_cases.assert_same(found, wanted)


def test_attention_in_blocks_is_refused():
    reason = "window must be None for transformers GraniteSpeechConformerAttention: it attends within blocks"
    with pytest.raises(ValueError, match=reason):
        xk.accelerate(test_shaw.build("granite"), window=(2, 2))


def call_toolkit(name: str, attention: torch.nn.Module, x: torch.Tensor, padded: bool, visible: torch.Tensor | None):
    """The attention with padding, and, of a library's own, with the pairs hidden that are not visible."""
    hidden = HIDDEN if padded else torch.zeros_like(HIDDEN)
    table = positions(LENGTH if "legacy" in name else 2 * LENGTH - 1).to(x)
    if name == "speechbrain":
        window = None if visible is None else ~visible
        return attention(x, x, x, table, key_padding_mask=hidden, attn_mask=window)[0]
    if name.startswith("fairseq2"):
        if visible is not None:
            attention.bias.visible = lambda length: visible[:length, :length]
        out = toolkit_cases.call_fairseq2(attention, x, padded)
        return out.masked_fill(hidden[..., None], 0.0)  # padded rows see padding, here that of the window
    if name == "nemo-transformer":
        parts = [lambda b, h, q, k: ~hidden[b, k]] * padded + [lambda b, h, q, k: visible[q, k]] * (visible is not None)
        return attention(x, block_mask=toolkit_cases.block_mask(parts), pos_emb=table)
    mask = ~hidden[:, None] & (torch.ones(LENGTH, LENGTH, dtype=torch.bool) if visible is None else visible)
    if "nemo" in name:
        return attention(query=x, key=x, value=x, mask=~mask | hidden[:, :, None], pos_emb=table)
    return attention(x, x, x, table, mask)


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize(
    "name",
    ["nemo", "nemo-transformer", "espnet", "espnet-triu", "espnet-legacy", "speechbrain", "fairseq2", "fairseq2-shaw"],
)
def test_toolkits_under_the_mask(name, window, padded, toolkits, calls, monkeypatch):
    left, right, count = window
    attention = make(name, toolkits)
    if name.startswith("fairseq2") and not hasattr(attention.bias, "visible"):
        pytest.skip("fairseq2 has no bias of any two sides")
    plain = copy.deepcopy(attention)
    xk.accelerate(attention, window=(left, right), global_tokens=count)
    for model, visible in ((attention, None), (plain, sees(*window))):
        case = (None, lambda attention, x, padded, v=visible: call_toolkit(name, attention, x, padded, v))
        monkeypatch.setitem(toolkit_cases.CASES, "here", (*case, toolkit_cases.CASES[name][2]))
        result = toolkit_cases.run("here", model, padded)
        if model is attention:
            found = result
    toolkit_cases.assert_same(found, result, toolkit_cases.CASES[name][2])
    assert len(calls) == (3 if count else 1) and calls[0]["max_distance"] == left
    if name.startswith("espnet"):
        assert torch.allclose(attention.attn, plain.attn, atol=1e-12)


def parakeet_layer(**options) -> tuple[torch.nn.Module, torch.nn.Module]:
    layer = build("parakeet").layers[0].self_attn
    return copy.deepcopy(layer), xk.accelerate(layer, **options)


def run_layer(layer: torch.nn.Module, mask: torch.Tensor | None = None, frames: int = LENGTH) -> torch.Tensor:
    torch.manual_seed(3)
    x = torch.randn(2, frames, WIDTH, dtype=torch.float64)
    return layer(x, torch.randn(1, 2 * frames - 1, WIDTH, dtype=torch.float64).expand(2, -1, -1), mask)[0]


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.allclose(found, wanted, rtol=0, atol=1e-12)


def test_sequences_no_longer_than_window_over_are_seen_whole():
    plain, layer = parakeet_layer(window=(2, 1), window_over=LENGTH)
    assert same(run_layer(layer), run_layer(plain))
    found, wanted = (run_layer(x, mask, LENGTH + 1) for x, mask in ((layer, None), (plain, sees(2, 1, 0, LENGTH + 1))))
    assert same(found, wanted)


@pytest.mark.parametrize("left, right", [(LENGTH - 1, LENGTH - 1), (100, 100), (100, 2), (2, 100)])
def test_windows_may_be_larger_than_the_sequence(left, right):
    plain, layer = parakeet_layer(window=(left, right))
    assert same(run_layer(layer), run_layer(plain, sees(left, right, 0)))


@pytest.mark.parametrize("count", [LENGTH - 1, LENGTH, 100])
def test_all_frames_may_be_global(count):
    plain, layer = parakeet_layer(window=(2, 1), global_tokens=count)
    assert same(run_layer(layer), run_layer(plain))


def test_a_second_accelerate_changes_the_window_and_restore_removes_it():
    plain, layer = parakeet_layer(window=(2, 1), global_tokens=1)
    for options in (dict(window=(4, 0)), {}):
        xk.accelerate(layer, **options)
        assert same(run_layer(layer), run_layer(plain, sees(*options["window"], 0) if options else None))
    xk.restore(xk.accelerate(layer, window=(2, 1)))
    assert type(layer) is type(plain) and vars(layer).keys() == vars(plain).keys()
    assert torch.equal(run_layer(layer), run_layer(plain))


def test_copies_and_pickles_keep_the_window():
    plain, layer = parakeet_layer(window=(2, 1))
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert same(run_layer(other), run_layer(plain, sees(2, 1, 0))) and accelerated(other)


def test_masks_of_every_pair_are_on_top():
    """A map with holes, for the frames of a window and for global ones."""
    plain, layer = parakeet_layer(window=(3, 1), global_tokens=2)
    mask = torch.rand(2, 1, LENGTH, LENGTH) < 0.5
    mask[0, 0, 7] = False  # a fully masked row
    assert same(run_layer(layer, mask), run_layer(plain, mask & sees(3, 1, 2)))


def test_dropout_drops_what_the_window_shows():
    """In the mean of many passes it changes nothing: the standard error here is about 0.01."""
    plain, layer = parakeet_layer(window=(3, 1), global_tokens=2)
    layer.attention_dropout = 0.2
    layer.train()
    with torch.no_grad():
        outs = torch.stack([run_layer(layer) for _ in range(2)])
    assert torch.equal(outs[0], outs[1])  # the seed is the same
    torch.manual_seed(0)
    x, table = torch.randn(1, LENGTH, WIDTH).double(), torch.randn(1, 2 * LENGTH - 1, WIDTH).double()
    with torch.no_grad():
        outs = torch.stack([layer(x, table)[0] for _ in range(400)])
        error = (outs.mean(0) - plain(x, table, sees(3, 1, 2))[0]).abs() / (outs.std(0) / 20)
    assert outs.std(0).max() > 0.1 and error.max() < 6  # of 416 numbers


@pytest.mark.parametrize("window", [(3, 1), (8, 8)], ids=str)
def test_cached_frames_are_in_the_window(window, small, calls):
    """NeMo's cache of 6 frames before chunks of 4."""
    attention = make("nemo", lambda toolkit: small)
    plain = copy.deepcopy(attention)
    xk.accelerate(attention, window=window)
    torch.manual_seed(1)
    cache, x, table = (torch.randn(2, n, WIDTH, dtype=torch.float64) for n in (6, 4, 19))
    mask = torch.zeros(2, 4, 10, dtype=torch.bool)
    mask[0, :, :6] = True
    found = attention(x, x, x, mask, table[:1], cache)
    wanted = plain(x, x, x, mask | ~sees(*window, 0, 10)[6:], table[:1], cache)
    assert all(map(same, found, wanted)) and calls[0]["query_positions"].tolist() == [[6, 7, 8, 9]] * 2


@pytest.mark.parametrize("rows", [2 * LENGTH - 1, LENGTH], ids=["all", "ends at 0"])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_registered_classes_have_a_window(window, rows, monkeypatch):
    """Without rows for keys ahead these are invisible."""
    monkeypatch.setitem(_libraries.REGISTERED, own_modules.CosyVoice, own_modules.FusedCosyVoice)
    left, right, count = window
    plain = own_modules.CosyVoice().double()
    module = xk.accelerate(copy.deepcopy(plain), window=(left, right), global_tokens=count)
    x, table = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64), positions(2 * LENGTH - 1)
    visible = sees(*window) if rows > LENGTH else sees(*window).tril()
    wanted = plain(x, x, x, visible.expand(2, -1, -1), table)[0]
    assert same(module(x, x, x, pos_emb=table[:, :rows])[0], wanted)


@pytest.mark.parametrize("rows", [2 * LENGTH - 1, LENGTH], ids=["all", "ends at 0"])
def test_registered_classes_see_the_same_where_a_file_of_onnx_has_free_lengths(rows, monkeypatch):
    monkeypatch.setitem(_libraries.REGISTERED, own_modules.CosyVoice, own_modules.FusedCosyVoice)
    module = xk.accelerate(own_modules.CosyVoice().double(), window=(2, 3))
    x, table = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64), positions(2 * LENGTH - 1)[:, :rows]
    wanted = module.relative_attention(*module.project_heads(x, x, x), table)
    monkeypatch.setattr(_window, "is_free_in_onnx", lambda keys: True)
    assert same(module.relative_attention(*module.project_heads(x, x, x), table), wanted)


@pytest.mark.parametrize("kind", ["causal", "documents", "some rows"])
def test_global_tokens_under_ranks_that_show_a_row_its_own_key(kind, monkeypatch):
    monkeypatch.setitem(_libraries.REGISTERED, own_modules.CosyVoice, own_modules.FusedCosyVoice)
    module = xk.accelerate(own_modules.CosyVoice().double(), window=(2, 3), global_tokens=2)
    mask = xk.RankMask.causal(1, LENGTH)
    if kind == "documents":
        mask = xk.RankMask.packed(torch.tensor([[0] * 4 + [1] * (LENGTH - 4), [0] * LENGTH]), causal=True)
    if kind == "some rows":
        mask = mask.seeing_self(torch.arange(LENGTH)[None] % 3 > 0)
    x, table = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64), positions(2 * LENGTH - 1)
    found, wanted = (
        module.relative_attention(*module.project_heads(x, x, x), table, visible)
        for visible in (mask, mask.to_bool().expand(2, -1, -1))
    )
    assert same(found, wanted)


class LargestStorage(TorchDispatchMode):
    """Bytes of the largest storage that an operator returns."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return out


def largest(step) -> int:
    with LargestStorage() as mode:
        step().sum().backward()
    return mode.bytes


def assert_linear(step) -> None:
    """At 2000 frames a bool for each pair is 8 MB, and no other storage is larger than 5."""
    small, large = (largest(lambda frames=frames: step(frames)) for frames in (1000, 2000))
    assert large < 2.1 * small


@pytest.mark.parametrize("name", ["parakeet", "fastspeech2", "wav2vec2", "bert", "bert-key", "seamless", "seamless2"])
def test_encoders_need_memory_linear_in_length(name):
    """With padding, whose masks would be maps. Nemotron's encoder makes its map of chunks itself."""
    model = build(name, dtype=torch.float32)
    if name == "seamless2":
        model.config.speech_encoder_chunk_size = 20000  # the default
    xk.accelerate(model, window=(8, 4), global_tokens=2)

    def step(frames):
        seen = torch.arange(frames) < torch.tensor([[frames], [frames - 90]])
        if name == "parakeet":
            out = model(torch.randn(2, 8 * frames, 16), seen.repeat_interleave(8, 1))
        else:
            out = model(torch.randn(2, frames, 32), seen[:, None].long() if name == "fastspeech2" else seen)
        return out if isinstance(out, torch.Tensor) else out[0] if isinstance(out, tuple) else out.last_hidden_state

    assert_linear(step)


@pytest.mark.parametrize("name", ["nemo", "espnet", "speechbrain", "fairseq2"])
def test_toolkits_need_memory_linear_in_length(name, small):
    if name == "nemo":
        model = xk.accelerate(toolkit_cases.nemo_encoder(lambda toolkit: small).float(), window=(8, 4), global_tokens=2)
        assert_linear(lambda frames: model(torch.randn(2, frames, WIDTH), torch.tensor([frames, frames - 90])))
        return
    attention = xk.accelerate(make(name, lambda toolkit: small).float(), window=(8, 4), global_tokens=2)

    def step(frames):
        x, table = torch.randn(2, frames, WIDTH), positions(2 * frames - 1).float()
        hidden = torch.arange(frames) >= torch.tensor([[frames], [frames - 90]])
        if name == "fairseq2":
            layout, q = small.BatchLayout((2, frames), [frames, frames - 90]), x.unflatten(-1, (4, -1))
            return attention(q, layout, q, layout, q, small.AttentionBiasCache())[0]
        if name == "espnet":
            return attention(x, x, x, table, ~hidden[:, None])
        return attention(x, x, x, table, key_padding_mask=hidden)[0]

    assert_linear(step)
