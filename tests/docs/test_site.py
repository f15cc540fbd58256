"""`make docs`: API pages say what the docstrings say; the site has every page, and all its links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys

import pytest

import xlnet_kernels as xk
from tests import ROOT

PAGES = sorted((ROOT / "docs/api").glob("*.md"))
REFERENCE = {page.stem: re.findall(r"^<!-- docstring of (\S+) -->$", page.read_text(), re.M) for page in PAGES}
BUILT = ROOT / "build" / "docs"


def test_reference_has_every_public_name():
    documented = {name.rpartition(".")[2] for names in REFERENCE.values() for name in names}
    wanted = {*xk.__all__, *xk.pretraining.__all__, *xk.integrations.__all__, "RelPositionAttention"}
    assert wanted - documented == {"__version__", "conformer", "integrations", "pretraining", "transformers"}


@pytest.fixture
def api_pages(monkeypatch):
    pytest.importorskip("griffe", reason="API pages need pip install '.[docs]'")
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import api_pages

    return api_pages


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_api_pages_say_what_the_docstrings_say(api_pages, path):
    text = path.read_text()
    assert api_pages.page(text, api_pages.load()) == text, "run `python docs/api_pages.py`, and commit docs/api"


def test_an_entry_has_signature_arguments_errors_and_example(api_pages):
    shown = (ROOT / "docs/api/masks.md").read_text().partition("## Segments\n")[2].partition("<!--")[0]
    head = "class Segments(query_ids: Tensor, key_ids: Tensor, embed: Tensor, bias: Tensor | None = None)"
    assert shown.startswith(f"\n```py\n{head}\n```\n\nSegment term ")
    assert "\n**Arguments**\n\n* `query_ids`: (B, L) integers" in shown and "\n**Raises**\n\n* `ValueError`: " in shown
    assert "\n```pycon\n>>> ids = " in shown and shown.endswith("torch.Size([1, 4, 5, 8])\n```\n\n")
    model = (ROOT / "docs/api/model.md").read_text()
    assert "\nclass XLNetLMHeadModel(config: XLNetConfig, backend: str | None = None)\n" in model
    assert "\n### PretrainedModel.from_pretrained\n" in model and "\n* Prompts with their continuations: " in model
    assert "\n### RankMask.causal\n\n```py\ncausal(\n    batch: int,\n" in PAGES[1].read_text()


@pytest.fixture(scope="module")
def site():
    """The site of `make docs`, by this Python; strict, so that a link into nowhere is an error."""
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("griffe") is None:
        pytest.skip("the site needs pip install '.[docs]'")
    make = ["make", "docs", f"RUN={sys.executable}", "--assume-old=.venv/docs"]
    done = subprocess.run(make, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stdout + done.stderr
    return BUILT


def test_site_has_every_page(site):
    pages = [ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    built = [str(page.relative_to(ROOT).with_suffix(".html")).replace("README", "index") for page in pages]
    assert not [name for name in ["index.html", *built] if not (site / name).is_file()]


def test_site_has_the_tables_of_all_results(site):
    text = (site / "benchmarks" / "tables.html").read_text()
    names = {path.stem for path in (ROOT / "benchmarks" / "results").glob("*.json")} - {"pretrain-xeon-2-cores"}
    assert names == {*re.findall(r'<h2 id="[^"]*">([\w-]+)', text)}


@pytest.mark.parametrize("page", REFERENCE)
def test_docstrings_are_rendered(site, page):
    text = (site / "docs" / "api" / f"{page}.html").read_text()
    for name in REFERENCE[page]:
        assert f'<h2 id="{name.rpartition(".")[2].lower()}">' in text, name
    assert "<blockquote>" not in text  # what Markdown takes `>>>` for
    assert "<strong>Raises</strong></p>\n<ul>" in text


def test_formulas_are_rendered(site):
    text = (site / "docs" / "math.html").read_text()
    assert text.count('<math display="block"') + text.count("<math ") >= 5 and "$$" not in text
