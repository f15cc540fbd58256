"""Tensors on the CPU where torch.set_default_device names another: nothing is made on the other device."""

from __future__ import annotations

import ast
from collections.abc import Callable

import pytest
import torch

import xlnet_kernels as xk
from tests import ROOT
from tests.model.twins import make_inputs, ours
from xlnet_kernels.backends import reference, self_check
from xlnet_kernels.model.sampling import Sampler
from xlnet_kernels.pretraining import DataCollatorForPermutationLM, Vocabulary

IDS = [[7, 3, 9, 12, 40, 41], [11, 5, 6, 7, 8, 9]]
FACTORIES = {"arange", "as_tensor", "empty", "eye", "full", "linspace", "normal", "ones", "rand", "randint", "randn"}
FACTORIES |= {"randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros"}


@pytest.fixture
def meta():
    """A default device that computes nothing: what is made there cannot meet a tensor of the CPU, or be read."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.fixture(scope="module")
def lm():
    return ours("XLNetLMHeadModel", eos_token_id=2, pad_token_id=5)


@pytest.fixture(scope="module")
def inputs():
    return make_inputs()


def test_model_computes(lm, inputs, meta):
    with torch.no_grad():
        for _ in range(2):  # the second time with kept positions
            output = lm(**inputs, use_mems=True)
        assert output.logits.isfinite().all()
        memory = lm.transformer.project_mems(batch=2)
        assert lm(inputs["input_ids"], mems=memory).logits.isfinite().all()
    lm(**inputs, labels=inputs["input_ids"][:, :3]).loss.backward()
    assert lm.lm_loss.bias.grad.isfinite().all()


@pytest.mark.parametrize("options", [dict(seed=1), dict(), dict(temperature=0), dict(top_k=5, top_p=0.9)])
def test_text_is_generated(lm, options, meta):
    texts = lm.generate(IDS, 3, eos_token_id=(), **options)
    assert [text.device.type for text in texts] == ["cpu"] * 2 and all(len(text) == 9 for text in texts)


@pytest.mark.parametrize("order", ["left-to-right", "random", "confident"])
def test_missing_tokens_are_filled_in(lm, order, meta):
    ids = torch.tensor(IDS, device="cpu")
    filled = lm.fill(ids, ids > 8, order)
    assert torch.equal(filled[ids <= 8], ids[ids <= 8])


def test_seeds_give_the_same_draws_whatever_the_default_device_is():
    logits, found = torch.randn(2, 3, 40), []
    for device in (None, "meta"):
        torch.set_default_device(device)
        found.append(Sampler(2, seed=3)(logits, [3, 2]))
    torch.set_default_device(None)
    assert torch.equal(found[0][0], found[1][0])


def test_attention_chooses_its_own_mask_and_positions(meta):
    attn = xk.TwoStreamAttention(32, 4, dropout=0.1, device="cpu")
    h, g = torch.randn(2, 6, 32, device="cpu"), torch.randn(2, 2, 32, device="cpu")
    targets = torch.tensor([[4, 5], [0, 3]], device="cpu")
    for output in attn(h, g, target_positions=targets, segment_ids=torch.zeros(2, 6, dtype=torch.int32, device="cpu")):
        output.sum().backward(retain_graph=True)
    assert attn.q.grad.isfinite().all()


def test_backend_is_checked(meta):
    for problem in self_check.problems()[:3]:
        assert problem.results(reference, torch.float32)["out"].isfinite().all()


def test_pretraining_batches_are_on_the_cpu(meta):
    vocabulary = Vocabulary(size=50, sep=4, cls=3, mask=6, pad=5)
    batch = DataCollatorForPermutationLM(vocabulary)([{"input_ids": ids} for ids in IDS])
    assert batch["input_ids"].device.type == batch["mask"].query_rank.device.type == "cpu"


def test_every_factory_call_names_its_device():
    """Parameters aside: modules are made on the default device, as torch's are."""
    found = []
    for path in sorted((ROOT / "xlnet_kernels").rglob("*.py")):
        tree = ast.parse(path.read_text())
        parameters = {id(call) for call in _calls(tree, lambda name: name == "nn.Parameter") for call in ast.walk(call)}
        for call in _calls(tree, lambda name: name.startswith("torch.") and name[6:] in FACTORIES):
            if id(call) not in parameters and not any(option.arg == "device" for option in call.keywords):
                found.append(f"{path.name}:{call.lineno}: {ast.unparse(call)}")
    assert not found


def _calls(tree: ast.AST, wanted: Callable[[str], bool]) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and wanted(ast.unparse(node.func))]
