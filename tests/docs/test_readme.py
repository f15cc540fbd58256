"""README: each example runs by itself, its numbers are those of their file, it is short; equivalent code is."""

import importlib.util
import json
import re
import subprocess
import sys

import pytest
import torch

import xlnet_kernels as xk
from tests import ROOT

PAGES = [ROOT / name for name in ("README.md", "docs/api/operator.md", "docs/how-to/model.md")]
README = PAGES[0].read_text()
BLOCKS = [code for page in PAGES for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)]


def block(text: str) -> str:
    (found,) = [code for code in BLOCKS if text in code]
    return found


# what a block asserts of the names it has made
SHOWN = {
    "TwoStreamAttention(512, 8)": "assert h.shape == (2, 100, 512)",
    "xk.accelerate(model)": "assert type(model) is transformers.XLNetLMHeadModel",
}


@pytest.mark.parametrize("text", SHOWN)
def test_each_block_runs_alone_and_without_a_warning(text):
    """In a process of its own, as it is pasted: nothing that another block or test has imported helps it."""
    code = block(text)
    if "import transformers" in code:
        assert 'pip install "transformers>=' in README.partition(code)[0].rpartition("\n## ")[2]
        if importlib.util.find_spec("transformers") is None:
            pytest.skip("the block says that it needs transformers")
    done = subprocess.run([sys.executable, "-c", code + SHOWN[text]], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, "Warning" in done.stderr) == (0, False), done.stderr


def test_every_block_is_run():
    found = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(found) == len(SHOWN) and all(any(text in code for text in SHOWN) for code in found)


def test_numbers_are_those_of_the_picture(monkeypatch):
    """Both come from one results file."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from lib.headline import highlights

    (picture,) = re.findall(r"!\[.*?\]\((benchmarks/results/[\w-]+)-summary\.png\)", README)
    (shown,) = re.findall(r"<!-- highlights -->\n(.*?)<!-- end -->", README, re.DOTALL)
    assert shown.strip() == highlights(json.loads((ROOT / f"{picture}.json").read_text()))
    assert len(re.findall(r"^\* \*\*", shown, re.MULTILINE)) == 3


def test_short():
    lines = README.splitlines()
    assert len(lines) <= 150 and len(re.findall(r"\w+", re.sub(r"```.*?```", "", README, flags=re.DOTALL))) < 1000
    first_screen = "\n".join(lines[:45])
    for part in ("![", "<!-- highlights -->", "pip install .", "info --check", "= attn(h"):
        assert part in first_screen, part


def test_model_example_runs():
    names: dict = {}
    exec(block("XLNetLMHeadModel(XLNetConfig("), names)
    assert names["filled"].shape == (2, 50) and torch.equal(
        names["filled"][~names["targets"]], names["ids"][~names["targets"]]
    )
    assert [len(text) for text in names["texts"]] == [7, 8]


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
