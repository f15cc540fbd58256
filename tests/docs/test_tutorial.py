"""The tutorial, run as a notebook in an empty folder: it prints the page's outputs, and the page's claims hold."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import sys
from pathlib import Path

import pytest

import xlnet_kernels as xk
from tests import ROOT

DOCS = ROOT / "docs"


@pytest.fixture
def tutorial(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    import tutorial

    return tutorial


def test_the_notebook_is_made_of_the_page(tutorial, tmp_path):
    page = tutorial.PAGE.read_text()
    kinds = [kind for kind, _ in tutorial.cells(page)]
    assert kinds.count("code") == 6 and kinds[0] == "markdown"
    tutorial.main(tmp_path / "made.ipynb")
    first, *cells = json.loads((tmp_path / "made.ipynb").read_text())["cells"]
    assert first["source"] == ["%env FORCE_COLOR="] and [cell["cell_type"] for cell in cells] == kinds
    page = "a\n\n<!-- not in the notebook -->\n```bash\nb\n```\n\n<!-- not run: here -->\n```python\nc\n```\n"
    wanted = [("markdown", "a\n\n<!-- not in the notebook -->\n```bash\nb\n```"), ("code", "c")]
    assert tutorial.cells(page) == tutorial.cells(page + "\n```text\noutput\n```\n") == wanted


def execute(tutorial, folder: Path, page: str) -> list[str]:
    """The printed text of each code cell of a page, run in `folder`."""
    nbformat, nbclient, _ = map(pytest.importorskip, ("nbformat", "nbclient", "ipykernel"))
    (folder / "examples").symlink_to(ROOT / "examples")
    book = nbformat.reads(json.dumps(tutorial.notebook(page)), as_version=4)
    nbclient.NotebookClient(book, timeout=900, resources={"metadata": {"path": str(folder)}}).execute()
    printed = []
    for cell in book.cells[1:]:
        if cell.cell_type == "code":
            printed.append("".join(out.get("text", "") for out in cell.outputs if out.output_type == "stream"))
    return printed


def check_outputs(tutorial, printed: list[str]) -> None:
    """The lines that the page shows are printed by the cell before them, numbers aside."""
    number = r"-?\d[\d.,]*(?:e-?\d+)?"
    shown = [tutorial.OUTPUT.findall(part) for part in tutorial.BLOCK.split(tutorial.PAGE.read_text())[4::4]]
    for outputs, cell in zip(shown[1:], printed, strict=True):  # the first block installs
        for line in "".join(outputs).splitlines():
            pattern = number.join(map(re.escape, re.split(r"(?<![\w.])" + number, line)))
            assert re.search(pattern, cell), line


@pytest.fixture
def environment(monkeypatch):
    """Programs of this environment, and this package, in the notebook's commands."""
    for name in ("rich", "transformers", "sklearn"):
        pytest.importorskip(name)
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")


def check_claims(printed: list[str], runs: Path) -> None:
    """Claims that hold for any number of steps."""
    data, _, perplexity, written, tuned, used = printed
    assert len("".join(printed).splitlines()) < 200  # no progress bars
    rows = {name: list(csv.DictReader(open(runs / "data" / f"{name}.csv", newline=""))) for name in ("train", "test")}
    text = " ".join(" ".join(path.read_text().split()) for path in (runs / "data" / "texts").iterdir())
    assert f"test.csv: {len(rows['test'])} rows" in data and len({row["label"] for row in rows["train"]}) == 8
    assert not any(row["text"] in text for row in rows["test"])
    assert "500 ids" in data

    found = json.loads((runs / "evaluation" / "results.json").read_text())
    assert f"perplexity {found['causal']['perplexity']:.3f}" in perplexity
    assert "The value of the" in written
    filled = json.loads((runs / "filled.jsonl").read_text())["text"]
    assert filled in written and filled.startswith("If the object is not found, an ") and filled.endswith(" is raised.")

    results = json.loads((runs / "classifier" / "results.json").read_text())
    assert f"accuracy {results['this model']['accuracy']:.3f}" in tuned
    assert len(re.findall(r"0\.\d\d [a-z-]+$", used, re.MULTILINE)) == 3
    assert float(used.rsplit(":", 1)[1]) < 1e-4
    for folder, kind in (("pretrain", xk.XLNetLMHeadModel), ("classifier", xk.XLNetForSequenceClassification)):
        kind.from_pretrained(runs / folder)


@pytest.mark.slow
def test_the_tutorial_runs(tutorial, tmp_path, environment):
    """With a fifth of the steps at most."""
    page = tutorial.PAGE.read_text()
    for whole, part in (("--steps 300", "--steps 30"), ("--steps 200 --eval-every 50", "--steps 40 --eval-every 20")):
        assert page.count(whole) == 1
        page = page.replace(whole, part)
    printed = execute(tutorial, tmp_path, page)
    check_outputs(tutorial, printed)
    check_claims(printed, tmp_path / "runs")


@pytest.mark.thorough
def test_the_tutorial_says_the_truth(tutorial, tmp_path, environment):
    printed = execute(tutorial, tmp_path, tutorial.PAGE.read_text())
    check_outputs(tutorial, printed)
    runs = tmp_path / "runs"
    check_claims(printed, runs)
    lines = [json.loads(line) for line in (runs / "pretrain" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    entropy = float(re.search(r"unigram entropy of the text: ([\d.]+)", printed[1])[1])
    # all tokens equally likely, then the entropy of single tokens, then well below it
    assert losses[0] == pytest.approx(math.log(500), abs=0.3) and len(losses) == 300
    assert min(losses[:100]) < entropy and lines[-1]["validation_loss"] < entropy - 1

    found = json.loads((runs / "evaluation" / "results.json").read_text())
    assert found["partial"]["nats per token"] < found["causal"]["nats per token"] < entropy
    likelier, other = (float(value) for value in re.findall(r"^(-[\d.]+) nats", printed[3], re.MULTILINE))
    assert likelier > other
    results = json.loads((runs / "classifier" / "results.json").read_text())
    accuracy = {name: numbers["accuracy"] for name, numbers in results.items()}
    assert accuracy["this model"] > 1.5 * accuracy["majority"] and accuracy["bag of words"] > accuracy["this model"]
