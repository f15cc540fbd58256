"""Every term of the glossary in docs/math.md is found in the sources of the wings that it names."""

import re

import pytest

from tests import ROOT

PACKAGE = ROOT / "xlnet_kernels"
WINGS = {
    "reference": [PACKAGE / "backends/reference.py", *(PACKAGE / f"{name}.py" for name in ("masks", "segments"))],
    "cpu": [ROOT / "csrc/rel_attention.h", *sorted((ROOT / "csrc/cpu").rglob("*.*"))],
    "cuda": [ROOT / "csrc/rel_attention.h", *sorted((ROOT / "csrc/cuda").rglob("*.*"))],
    "triton": sorted((PACKAGE / "backends/triton").glob("*.py")),
}
GLOSSARY = (ROOT / "docs/math.md").read_text().partition("## Glossary")[2]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in GLOSSARY.splitlines() if line.startswith("|")]
TERMS = [(term.strip("` "), where.split(", ")) for terms, _, where in ROWS[2:] for term in terms.split(", ")]


def uses(text: str, term: str) -> bool:
    """As a word or a part of a name, in the singular or the plural."""
    stem = re.escape(term.removesuffix("y"))
    ending = "(y|ies)" if term.endswith("y") else "s?"
    return re.search(rf"(?<![A-Za-z]){stem}{ending}(?![A-Za-z])", text) is not None


@pytest.mark.parametrize("wing", WINGS)
def test_terms_are_found_where_the_glossary_says(wing):
    text = "\n".join(path.read_text() for path in WINGS[wing])
    terms = [term for term, where in TERMS if wing in where]
    assert len(terms) >= 15 and not [term for term in terms if not uses(text, term)]


def test_wings_are_known():
    assert {wing for _, where in TERMS for wing in where} == set(WINGS)
