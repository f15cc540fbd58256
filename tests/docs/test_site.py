"""`make docs`: the site is built from every page and every public docstring, and all its links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys

import pytest

import xlnet_kernels as xk
from tests import ROOT

REFERENCE = {page.stem: re.findall(r"^::: (\S+)$", page.read_text(), re.M) for page in (ROOT / "docs/api").glob("*.md")}
BUILT = ROOT / "build" / "docs"


def test_reference_has_every_public_name():
    documented = {name.rpartition(".")[2] for names in REFERENCE.values() for name in names}
    wanted = {*xk.__all__, *xk.pretraining.__all__, *xk.integrations.__all__, "RelPositionAttention"}
    assert wanted - documented == {"__version__", "conformer", "integrations", "pretraining", "transformers"}


@pytest.fixture(scope="module")
def site():
    """What `make docs` makes, with the Python that runs this; strict, so that a link into nowhere is an error."""
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("mkdocstrings") is None:
        pytest.skip("the site needs pip install '.[docs]'")
    make = ["make", "docs", f"RUN={sys.executable}", "--assume-old=.venv/docs"]
    done = subprocess.run(make, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stdout + done.stderr
    return BUILT


def test_site_has_every_page(site):
    pages = [ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    built = [str(page.relative_to(ROOT).with_suffix(".html")).replace("README", "index") for page in pages]
    assert not [name for name in ["index.html", *built] if not (site / name).is_file()]


@pytest.mark.parametrize("page", REFERENCE)
def test_docstrings_are_rendered(site, page):
    text = (site / "docs" / "api" / f"{page}.html").read_text()
    for name in REFERENCE[page]:
        assert f'id="{name}"' in text, name
    assert "<blockquote>" not in text  # what Markdown takes `>>>` for
    assert re.search(r"<th>(Name|Type)</th>", text)  # sections of docstrings are tables


def test_formulas_are_rendered(site):
    text = (site / "docs" / "math.html").read_text()
    assert text.count('<math display="block"') + text.count("<math ") >= 5 and "$$" not in text
