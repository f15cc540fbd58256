"""The documentation's examples run, page by page; its links, files and commands exist."""

from __future__ import annotations

import functools
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests import ROOT
from tests.cases import MODULES, make
from xlnet_kernels import call_checks
from xlnet_kernels._ops import ops
from xlnet_kernels.call import DIFFERENTIABLE, collect

PAGES = sorted((ROOT / "docs").rglob("*.md"))
ALL_PAGES = [ROOT / "README.md", *PAGES]
FOLDERS = ("build_backend", "csrc", "xlnet_kernels", "benchmarks", "examples", "experiments", "tests", "docs")
FILE_NAMES = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")}
FILE_NAMES |= {path.name for path in ROOT.glob("*.*")}
# An example that needs a download or minutes has <!-- not run: REASON --> above it.
BLOCK = re.compile(r"^(?:<!-- (not run): \S[^\n]* -->\n)?```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def examples(page: Path) -> list[str]:
    return [code for skipped, code in BLOCK.findall(page.read_text()) if not skipped]


# Cached, because an operator is defined once in a process.
@functools.cache
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
    assert [code for skipped, code in BLOCK.findall(page * 2) if not skipped] == ["a = 1\n"] * 2


def test_global_tokens_are_those_of_a_dense_mask():
    """The merged calls of masks.md give what a mask of every pair gives."""
    names = run(ROOT / "docs" / "how-to" / "masks.md")
    position, is_global = torch.arange(names["L"]), names["is_global"]
    distance = position[:, None] - position
    is_seen = (distance <= names["left"]) & (distance >= -names["right"]) | is_global[:, :, None] | is_global[:, None]
    wanted = names["attend"](is_seen[:, None])
    for name in ("out", "both"):
        torch.testing.assert_close(names[name], wanted, rtol=0, atol=1e-5)


@pytest.fixture
def new_backend():
    """The module of add-a-backend.md with its kernels."""
    return run(ROOT / "docs" / "how-to" / "add-a-backend.md")


@pytest.mark.parametrize("limits", [{}, {"DEVICE": None, "DTYPES": None}], ids=["as it stands", "for any tensors"])
@pytest.mark.parametrize("part", ["in_torch", "rel_attention"])
def test_new_backend_is_right(monkeypatch, new_backend, part, limits):
    """Named where the page says, without its kernels and with them it gives what the reference gives."""
    new = SimpleNamespace(**new_backend | limits | {"rel_attention": new_backend[part]})
    monkeypatch.setattr(sys.modules["xlnet_kernels.backends"], "_BACKENDS", {"new": new} | MODULES)
    problem = make(2, 3, 7, mem=4, width=8, dtype=torch.float64)
    found, wanted = (problem.results(name) for name in ("new", "reference"))
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=name)


def test_new_kernels_are_an_operator(new_backend):
    """Schema, and shapes and strides without data, are what torch asks for."""
    leaves = make(2, 3, 7, width=8, dtype=torch.float64).leaves
    call = call_checks.check(collect(*(leaves[name].detach() for name in ("query", "key", "value", "rel_key"))))
    forward, backward = (getattr(ops, new_backend["NAME"] + end).default for end in ("", "_backward"))
    torch.library.opcheck(forward, (*call, True))
    out, lse, row_max, row_sum, out_residual = forward(*call, True)
    saved = torch.randn_like(out), torch.randn_like(lse), out, out_residual, row_max, row_sum
    arguments = *saved, [leaf is not None for leaf in call[:DIFFERENTIABLE]], *call
    on_meta = [given.to("meta") if isinstance(given, torch.Tensor) else given for given in arguments]
    # Not by opcheck, because it looks at storage, which tensors of vjp do not have.
    gradients, fakes = backward(*arguments), backward(*on_meta)
    assert [(x.shape, x.stride(), x.dtype) for x in gradients] == [(x.shape, x.stride(), x.dtype) for x in fakes]
    assert all(x.isfinite().all() for x in gradients) and len(gradients[0]) == 2


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
