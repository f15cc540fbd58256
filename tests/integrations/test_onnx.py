"""torch.onnx.export of modules and models: onnxruntime computes what torch does, on other lengths too."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import xlnet_kernels as xk
from tests import ROOT
from tests.docs.test_pages import BLOCK
from tests.integrations import conventions
from xlnet_kernels.integrations.conformer import RelPositionAttention, conformer_positions

for needed in ("onnx", "onnxscript", "onnxruntime"):
    onnxruntime = pytest.importorskip(needed, reason="pip install xlnet-kernels[onnx]")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
B, L = torch.export.Dim("B", min=1), torch.export.Dim("L", min=2)


class Call(nn.Module):
    """A module with tensors for arguments and outputs."""

    def __init__(self, inner: nn.Module, call) -> None:
        super().__init__()
        self.inner, self.call = inner.eval(), call

    def forward(self, *inputs):
        return self.call(self.inner, *inputs)


def assert_exports(model, inputs, dynamic_shapes=None, *others) -> None:
    """The file has ONNX's own operators alone, none of them a loop, and computes what the model does."""
    program = torch.onnx.export(model, inputs, dynamo=True, dynamic_shapes=dynamic_shapes, verbose=False)
    nodes = program.model_proto.graph.node
    assert not program.model_proto.functions and {node.domain for node in nodes} == {""}
    assert not {node.op_type for node in nodes} & {"Loop", "Scan", "If"}
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    names = [x.name for x in session.get_inputs()]
    for given in (inputs, *others):
        found = session.run(None, {name: x.numpy() for name, x in zip(names, given, strict=True)})
        wanted = model(*given)
        wanted = wanted if isinstance(wanted, tuple) else (wanted,)
        for one, other in zip(found, wanted, strict=True):
            # sums in another order, twice: 1e-5 relative, as for float32 everywhere
            assert torch.allclose(torch.from_numpy(one), other.detach(), rtol=1e-5, atol=1e-5)


def seen(*lengths: int) -> torch.Tensor:
    return torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


@pytest.mark.slow
def test_conformer_attention():
    """With padding, and a sequence that is all padding: zeros, then the bias."""

    def call(attention, x, mask):
        return attention(x, conformer_positions(x.shape[1], 32, dtype=x.dtype), mask[:, None])

    inputs, others = ((torch.randn(*mask.shape, 32), mask) for mask in (seen(7, 4), seen(11, 5, 0)))
    model = Call(RelPositionAttention(4, 32), call)
    assert_exports(model, inputs, (({0: B, 1: L}, {0: B, 1: L}),), others)


@pytest.mark.slow
def test_two_streams_memory_and_segments():
    torch.manual_seed(0)
    attention = xk.TwoStreamAttention(32, 4)

    def call(inner, h, g, mems, steps, targets, positions, ids):
        mask = xk.RankMask.from_order(steps=steps, targets=targets, mem_len=3)
        return inner(h, g, mask=mask, mems=mems, target_positions=positions, segment_ids=ids)

    positions = torch.tensor([[1, 3, 5], [0, 2, 6]])
    targets = torch.zeros(2, 7, dtype=torch.bool).scatter(1, positions, True)
    steps = torch.stack([torch.randperm(7) for _ in range(2)])
    ids = (torch.arange(7) > 3).long().expand(2, -1).contiguous()
    h, g, mems = torch.randn(2, 7, 32), torch.randn(2, 3, 32), torch.randn(2, 3, 32)
    assert_exports(Call(attention, call), (h, g, mems, steps, targets, positions, ids))


@pytest.mark.slow
def test_language_model():
    config = xk.XLNetConfig(vocab_size=50, d_model=32, n_layer=2, n_head=4, d_inner=64, use_mems_eval=False)
    model = Call(xk.XLNetLMHeadModel(config), lambda lm, ids, mask: lm(ids, attention_mask=mask).logits)
    inputs, others = ((torch.randint(50, mask.shape), mask.long()) for mask in (seen(9, 5), seen(12, 12, 2)))
    assert_exports(model, inputs, (({0: B, 1: L}, {0: B, 1: L}),), others)


@pytest.mark.slow
def test_memory_in_and_out():
    """Memory of any length, as long as the caller keeps it."""
    model = xk.XLNetLMHeadModel(xk.XLNetConfig(vocab_size=50, d_model=32, n_layer=2, n_head=4, d_inner=64))

    def call(lm, ids, *mems):
        found = lm(ids, mems=[*mems])
        return found.logits, *found.mems

    def inputs(batch, length, mem):
        return torch.randint(50, (batch, length)), *(torch.randn(mem, batch, 32) for _ in range(2))

    free = torch.export.Dim.AUTO
    shapes = (({0: free, 1: free},) * 3,)
    assert_exports(Call(model, call), inputs(2, 7, 5), shapes, inputs(3, 11, 4), inputs(2, 3, 9))


@pytest.mark.slow
def test_a_window_with_memory():
    """Sequences shorter than the window, of less than a block and of several."""

    def call(rel_key, query, key, value, mem, is_token):
        mask = xk.RankMask.padding(attention_mask=is_token, mem_len=mem.shape[2])
        memory = mem, mem + 1
        return xk.rel_attention(query, key, value, rel_key.weight, mask=mask, memory=memory, max_distance=9)

    def inputs(mem, *lengths):
        rows = [torch.randn(len(lengths), 2, count, 8) for count in (*[max(lengths)] * 3, mem)]
        return *rows, seen(*lengths)

    table = nn.Module()
    table.weight = nn.Parameter(torch.randn(2, 15, 8))
    heads = {0: B, 2: L}
    shapes = ((heads, heads, heads, {0: B, 2: torch.export.Dim("M", min=1)}, {0: B, 1: L}),)
    assert_exports(Call(table, call), inputs(4, 7, 5), shapes, inputs(2, 6), inputs(5, 300, 64, 65))


@pytest.mark.slow
@pytest.mark.parametrize("length", [7, 150], ids=["one block", "several blocks"])
def test_shapes_of_a_window_in_the_file(length):
    """Free dimensions stay free for any number of traced blocks: onnxruntime reuses memory by these shapes."""
    model = Call(nn.Identity(), lambda _, x, rel_key: xk.rel_attention(x, x, x, rel_key, max_distance=4))
    rows, rel_key = (lambda count, n: torch.randn(count, 2, n, 8)), torch.randn(2, 9, 8)
    shapes = (({0: B, 2: L}, None),)
    assert_exports(model, (rows(2, length), rel_key), shapes, (rows(1, 200), rel_key), (rows(3, 5), rel_key))
    program = torch.onnx.export(model, (rows(2, length), rel_key), dynamo=True, dynamic_shapes=shapes, verbose=False)
    found = {value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
             for value in program.model_proto.graph.value_info}  # fmt: skip
    products = [found[node.output[0]] for node in program.model_proto.graph.node if node.op_type == "Softmax"]
    assert products and all(isinstance(shape[2], str) for shape in products), products


@pytest.mark.slow
def test_accelerated_attention():
    """NeMo's, with a mask that a file must keep as it is."""
    with conventions.installed():
        attention = xk.accelerate(conventions.RelPositionMultiHeadAttention())

    def call(inner, x, table, hidden):
        return inner(x, x, x, hidden, table)

    hidden = torch.rand(2, 7, 7) < 0.5
    assert_exports(Call(attention, call), (torch.randn(2, 7, 32), torch.randn(1, 13, 32), hidden))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, window", [("xlnet", None), ("parakeet", None), ("bert", None), ("parakeet", (6, 3))], ids=str
)
def test_accelerated_transformers_models(name, window):
    """With padding, on other lengths than the one they were exported for: with a window, shorter than it is too."""
    pytest.importorskip("transformers")
    from tests.integrations.speech_cases import build
    from tests.model.twins import theirs

    if name == "xlnet":
        model = Call(xk.accelerate(theirs("XLNetModel", use_mems_eval=False)), lambda xlnet, *x: xlnet(*x)[0])
    else:
        model = xk.accelerate(build(name, dtype=torch.float32), window=window)
        model = Call(model, lambda encoder, *x: encoder(*x)[0])

    def inputs(*lengths):
        mask = seen(*lengths)
        if name == "xlnet":
            return torch.randint(50, mask.shape), mask.float()
        mask = mask.repeat_interleave(8, 1) if name == "parakeet" else mask  # 8 mel frames are one frame
        return torch.randn(*mask.shape, 16 if name == "parakeet" else 32), mask

    free = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
    assert_exports(model, inputs(13, 9), ((free, free),), inputs(11, 5, 11), inputs(5, 2), inputs(140))


@pytest.mark.parametrize("options", [dict(window_over=20), dict(global_tokens=2)], ids=str)
def test_windows_that_depend_on_the_length_are_refused(options):
    """Where the file is for all lengths: it would be right for some lengths alone."""
    pytest.importorskip("transformers")
    from tests.integrations.speech_cases import build

    encoder = xk.accelerate(build("bert", dtype=torch.float32), window=(6, 3), **options)
    model = Call(encoder, lambda inner, x, mask: inner(x, mask)[0])
    free = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
    text = "window_over and global_tokens must be 0 where torch.onnx.export keeps lengths free, got "
    with pytest.raises(Exception, match=text):
        torch.onnx.export(
            model, (torch.randn(2, 13, 32), seen(13, 9)), dynamo=True, dynamic_shapes=((free, free),), verbose=False
        )


class SecondAttempt(Call):
    """A call that fails in the exporter's first attempt: its second has Dynamo trace it."""

    def forward(self, *inputs):
        if torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling():
            raise RuntimeError("the first attempt")
        return self.call(self.inner, *inputs)


@pytest.mark.slow
@pytest.mark.parametrize("options", [dict(window_over=20), dict(window_over=5), dict(global_tokens=2)], ids=str)
def test_windows_of_a_fixed_length(options):
    """In the exporter's second attempt too, where the window is wider than the sequence to one side."""
    with conventions.installed():
        attention = xk.accelerate(conventions.RelPositionMultiHeadAttention(), window=(16, 3), **options)
    inputs = torch.randn(2, 13, 32), torch.randn(1, 25, 32), torch.rand(2, 13, 13) < 0.5
    for kind in (Call, SecondAttempt):
        assert_exports(kind(attention, lambda inner, x, table, hidden: inner(x, x, x, hidden, table)), inputs)


def test_rows_of_a_fixed_length_are_checked():
    x, rel_key = torch.randn(1, 2, 7, 16), torch.randn(2, 20, 16)
    model = Call(nn.Identity(), lambda _, x, rel_key: xk.rel_attention(x, x, x, rel_key, max_distance=9))
    with pytest.raises(Exception, match="rel_key must have 1 to 16 rows"):
        torch.onnx.export(model, (x, rel_key), dynamo=True, verbose=False)


def test_other_backends_are_refused():
    attention = xk.TwoStreamAttention(32, 4, backend="cpu")
    with pytest.raises(Exception, match='backend="cpu" is unavailable: torch.onnx.export needs None'):
        torch.onnx.export(Call(attention, lambda inner, h: inner(h)[0]), (torch.randn(2, 7, 32),), dynamo=True)


@pytest.mark.slow
def test_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "how-to" / "export-to-onnx.md").read_text()
    names: dict = {}
    exec("\n".join(code for _, code in BLOCK.findall(page)), names)
    assert (tmp_path / "encoder.onnx").exists()
