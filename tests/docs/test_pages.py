"""The documentation's examples run, page by page; its links, files, commands and drawings exist."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import xlnet_kernels as xk
from tests import ROOT
from tests.cases import MODULES

PAGES = sorted((ROOT / "docs").rglob("*.md"))
ALL_PAGES = [ROOT / "README.md", *PAGES]
FOLDERS = ("build_backend", "csrc", "xlnet_kernels", "benchmarks", "examples", "experiments", "tests", "docs")
FILE_NAMES = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")}
FILE_NAMES |= {path.name for path in ROOT.glob("*.*")}
# An example that needs a download or minutes has <!-- not run: REASON --> above it.
BLOCK = re.compile(r"^(?:<!-- (not run): \S.* -->\n)?```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def examples(page: Path) -> list[str]:
    return [code for skipped, code in BLOCK.findall(page.read_text()) if not skipped]


def run(page: Path) -> dict:
    """The names that a page's examples have made, one after the other, as a reader's session would."""
    code = "\n".join(examples(page))
    if "import transformers" in code:
        pytest.importorskip("transformers")
    names: dict = {"__name__": "page"}
    with mock.patch.dict(os.environ):  # one has the names of a process group's, which others would join
        exec(compile(code, name_of(page), "exec"), names)
    return names


@pytest.mark.parametrize("page", [page for page in PAGES if examples(page)], ids=name_of)
def test_examples_run(page):
    torch.use_deterministic_algorithms(False)  # a reader's session
    before = dict(os.environ)
    assert run(page) and os.environ == before


def test_what_may_not_run_is_marked():
    page = "```python\na = 1\n```\n\n<!-- not run: minutes -->\n```python\nb = 2\n```\n"
    assert [code for skipped, code in BLOCK.findall(page) if not skipped] == ["a = 1\n"]


@pytest.mark.parametrize("limits", [{}, {"DEVICE": None, "DTYPES": None}], ids=["as it stands", "for any tensors"])
def test_new_backend_is_right(monkeypatch, limits):
    """The one of the how-to, named where it says, gives what the reference gives."""
    module = sys.modules["xlnet_kernels.backends"]
    new = SimpleNamespace(**run(ROOT / "docs" / "how-to" / "add-a-backend.md") | limits)
    monkeypatch.setattr(module, "_BACKENDS", {"new": new} | MODULES)
    query, key, value = (torch.randn(2, 3, 7, 8, dtype=torch.float64) for _ in range(3))
    rel_key, bias = torch.randn(3, 18, 8, dtype=torch.float64), torch.randn(3, 8, dtype=torch.float64)
    memory = tuple(torch.randn(2, 3, 4, 8, dtype=torch.float64) for _ in range(2))
    options = {"content_bias": bias, "position_bias": -bias, "memory": memory, "mask": xk.RankMask.causal(2, 7, 4)}
    outputs = [xk.rel_attention(query, key, value, rel_key, backend=name, **options) for name in ("new", "reference")]
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("page", ALL_PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", ALL_PAGES, ids=name_of)
def test_named_files_and_targets_exist(page):
    text = page.read_text()
    for script in re.findall(r"(?:python|torchrun [^\n`]*?) ((?:\w+/)+\w+\.py)", text):
        assert (ROOT / script).is_file(), script
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z][\w-]*)", text, re.MULTILINE)) <= targets
    new = set(re.findall(r"`([\w./-]+)`, new", text))  # what a reader is asked to write
    for folder in ("csrc", "xlnet_kernels", "benchmarks", "examples", "tests", "docs"):
        for name in re.findall(rf"`({folder}/[\w./-]+)`", text):
            assert (ROOT / name).exists() or name in new, name
    for name in re.findall(r"`([\w./-]*\w\.(?:py|h|cuh|cu|cpp|md))`", text):  # by their last names, as pages have them
        assert Path(name).name in FILE_NAMES or name in new, name


@pytest.fixture
def drawings(monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "pictures"))
    import shift

    return shift


def test_drawings_are_those_of_the_script(drawings, tmp_path):
    drawings.main(tmp_path)
    committed = {path.name for path in (ROOT / "docs" / "pictures").glob("*.svg")}
    assert {path.name for path in tmp_path.iterdir()} == committed
    for name in committed:
        shown = [
            re.findall(r">([^<>\n]+)</text>", path.read_text())
            for path in (tmp_path / name, ROOT / "docs/pictures" / name)
        ]
        assert shown[0] == shown[1]  # same words and keys, whatever version of matplotlib drew them


def test_drawn_rotation_ends_in_order(drawings):
    """Triton's picture shows the kernel's own steps: picked from two blocks, then three exchanges."""
    picked, *_, last = drawings.butterfly()
    assert picked[0] == [5, 6, 7, 0, 1, 2, 3, 4] and last == [list(range(8))] * 4
