"""Drawings of docs/assets: made by their sources, small, readable, and described where pages show them."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from tests import ROOT

ASSETS = ROOT / "docs" / "assets"
SVG = "{http://www.w3.org/2000/svg}"
COMMITTED = {path.stem: path.read_text() for path in sorted(ASSETS.glob("*.svg"))}
PAGES = {path: path.read_text() for path in (ROOT / "docs").rglob("*.md")}


@pytest.fixture
def sources(monkeypatch):
    """The modules that draw."""
    monkeypatch.syspath_prepend(str(ASSETS))
    import call
    import shift

    return call, shift


def test_committed_drawings_are_those_of_the_sources(sources):
    made = {name: draw().source() for module in sources for name, draw in module.DRAWINGS.items()}
    assert made == COMMITTED, "run `python docs/assets/call.py; python docs/assets/shift.py`, and commit the drawings"


def test_sources_write_their_drawings(sources, tmp_path):
    import drawing

    drawing.write(sources[0].DRAWINGS, tmp_path)
    assert {path.stem: path.read_text() for path in tmp_path.iterdir()}.items() <= COMMITTED.items()


@pytest.mark.parametrize("name", COMMITTED)
def test_a_drawing_is_small_and_readable(name):
    """Letters are 12 high or more at 800 pixels, and every text stands within the drawing."""
    text = COMMITTED[name]
    assert len(text) < 60_000
    root = ElementTree.fromstring(text)
    width, height = map(float, root.get("viewBox", "").split()[2:])
    assert width == 800 and root.findtext(f"{SVG}title")
    assert min(map(int, re.findall(r"(\d+)px", root.findtext(f"{SVG}style") or ""))) >= 12
    for label in root.iter(f"{SVG}text"):
        assert 0 <= float(label.get("x", "")) <= width and 12 <= float(label.get("y", "")) <= height - 2


@pytest.mark.parametrize("name", COMMITTED)
def test_a_page_shows_the_drawing_and_describes_it(name):
    described = [re.findall(rf"!\[([^\]]*)\]\([\w./-]*assets/{name}\.svg\)", page) for page in PAGES.values()]
    assert [alt for alts in described for alt in alts] and all(len(alt) > 20 for alts in described for alt in alts)


def test_drawn_rotation_ends_in_order(sources):
    """Triton's drawing shows the kernel's own steps: picked from two blocks, then three exchanges."""
    picked, *_, last = sources[1].butterfly()
    assert picked[0] == [5, 6, 7, 0, 1, 2, 3, 4] and last == [list(range(8))] * 4
