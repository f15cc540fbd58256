"""The README's examples run, and what it calls equivalent is."""

import re

import pytest
import torch

import xlnet_kernels as xk
from tests import ROOT

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def block(text: str) -> str:
    (found,) = [code for code in BLOCKS if text in code]
    return found


def test_drop_in_example_runs():
    names: dict = {}
    exec(block("TwoStreamAttention(512, 8)"), names)
    assert names["h"].shape == (2, 100, 512) and names["g"].shape == (2, 15, 512)


def test_model_example_runs():
    names: dict = {}
    exec(block("XLNetLMHeadModel(XLNetConfig("), names)
    assert names["filled"].shape == (2, 50) and torch.equal(
        names["filled"][~names["targets"]], names["ids"][~names["targets"]]
    )
    assert [len(text) for text in names["texts"]] == [7, 8]


def test_accelerate_example_runs():
    transformers = pytest.importorskip("transformers")
    names: dict = {}
    exec(block("integrations.transformers.accelerate"), names)
    assert type(names["model"]) is transformers.XLNetLMHeadModel


def test_equivalent_code_is_equivalent(backend):
    torch.manual_seed(0)
    batch, heads, length, mem_len, width = 2, 3, 7, 4, 8
    keys = mem_len + length

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    inputs = {name: normal(batch, heads, length, width) for name in ("query", "key", "value")}
    inputs |= {"rel_key": normal(heads, keys + length, width), "max_distance": keys, "scale": 0.3}
    inputs |= {"content_bias": normal(heads, width), "position_bias": normal(heads, width)}
    inputs["query_positions"] = torch.arange(length).expand(batch, -1)
    ids = torch.randint(0, 2, (batch, keys))
    inputs["segments"] = xk.Segments(ids[:, mem_len:], ids, normal(2, heads, width), normal(heads, width))
    inputs["mask"] = torch.rand(batch, 1, length, keys) < 0.7
    inputs["mask"][..., 0] = True  # every row sees something
    memory = normal(batch, heads, mem_len, width), normal(batch, heads, mem_len, width)
    names = inputs | {"torch": torch, "mem_key": memory[0], "mem_value": memory[1]}
    exec(block("by_row.gather"), names)
    torch.testing.assert_close(xk.rel_attention(**inputs, memory=memory, backend=backend), names["out"])
