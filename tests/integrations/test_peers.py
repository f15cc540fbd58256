"""peers.py on checkouts of one file: the tests that differ, exit status, and checkouts that cannot be compared."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.integrations import peers

SUITE = Path(peers.PEERS["transformers"].tests[0])
MODEL = """
import os, pathlib, pytest, torch, transformers
from transformers.models.xlnet import modeling_xlnet

def model():
    made = transformers.XLNetModel(transformers.XLNetConfig(vocab_size=20, d_model=8, n_layer=1, n_head=2, d_inner=8))
    made(torch.ones(1, 3, dtype=torch.long))
    return made
"""


@pytest.fixture
def checkout(tmp_path):
    """Writes the file of tests of a checkout whose library is the installed one."""
    (tmp_path / "src/transformers").mkdir(parents=True)
    (tmp_path / SUITE).parent.mkdir(parents=True)

    def write(code: str) -> str:
        (tmp_path / SUITE).write_text(code)
        return str(tmp_path)

    return write


def test_prints_the_tests_that_differ(checkout, tmp_path, capsys):
    pytest.importorskip("transformers")
    folder = checkout(
        MODEL
        + """
def test_same():
    assert model()
def test_without_a_model():
    assert True
def test_fails_always():
    assert model() is None
def test_class():
    assert type(model().layer[0].rel_attn) is modeling_xlnet.XLNetRelativeAttention, "another class"
def test_class_is_skipped():
    if type(model().layer[0].rel_attn) is not modeling_xlnet.XLNetRelativeAttention:
        pytest.skip()
def test_every_second_time():
    count = pathlib.Path("count")
    count.write_text("x" + (count.read_text() if count.exists() else ""))
    assert len(count.read_text()) != 2
def test_seed():
    assert torch.initial_seed() == 0 and os.environ["HF_HUB_OFFLINE"] == "1"
"""
    )
    outcomes = tmp_path / "outcomes.json"
    assert peers.main([folder, "--json", str(outcomes)]) == 1
    *table, first, second, last = capsys.readouterr().out.splitlines()
    assert first == f"differs: {SUITE}::test_class: passed plain, failed accelerated: AssertionError: another class"
    assert second == f"differs: {SUITE}::test_class_is_skipped: passed plain, skipped accelerated"
    assert last == "2 tests differ"
    assert f"varies with random numbers: {SUITE}::test_every_second_time" in table
    # tests, passed plain, passed accelerated, with accelerated models, differing
    assert [line.split()[1:] for line in table if line.startswith(str(SUITE))] == [["7", "6", "3", "4", "2"]]
    facts = json.loads(outcomes.read_text())
    assert facts["accelerated"]["versions"].keys() == {"Python", "torch", "transformers"}
    assert not any(test["accelerated"] for test in facts["plain"]["tests"].values())


@pytest.fixture
def told(checkout, monkeypatch):
    """Exit status of runs whose outcomes are given: name of the test -> plain, accelerated, whether by a model."""

    def status(tests: dict[str, tuple[str, str, bool]], message: str = "") -> int:
        def run_tests(folder, names, options, seed, accelerated):
            outcomes = {
                name: {"outcome": way[accelerated], "message": message, "accelerated": accelerated and way[2]}
                for name, way in tests.items()
            }
            return {"tests": outcomes, "versions": {}, "refused": [], "seconds": 0.0}

        monkeypatch.setattr(peers, "run_tests", run_tests)
        return peers.main([checkout("")])

    return status


def test_status_0_where_no_test_differs(told, capsys):
    assert (
        told({"a": ("passed", "passed", True), "b": ("failed", "failed", False), "c": ("skipped", "skipped", True)})
        == 0
    )
    assert capsys.readouterr().out.splitlines()[-1] == "0 tests differ"


def test_a_test_in_one_run_alone_differs():
    outcomes = {"passed": {"outcome": "passed", "message": ""}}
    assert peers.differing({"tests": {}}, {"tests": outcomes}) == {"passed": ("absent", "passed", "")}


def test_runs_without_an_accelerated_model(told, capsys):
    assert told({"a": ("passed", "passed", False)}) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "no test called an accelerated model"
    assert told({"a": ("failed", "failed", False)}, "No module named 'parameterized'") == 2
    assert capsys.readouterr().err.splitlines()[-1] == "No module named 'parameterized'"


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (f"{MODEL}\ntransformers.__version__ = '5.1'\ndef test(): model()", "version 5.18 or later is needed"),
        ("import os\nos._exit(3)", "pytest ended with status 3 and without outcomes:\n"),
    ],
)
def test_runs_that_compare_nothing(checkout, capsys, code, text):
    pytest.importorskip("transformers")
    assert peers.main([checkout(code)]) == 2
    printed = capsys.readouterr()
    assert text in printed.err and not printed.out


def test_the_checkout_comes_before_an_installed_library(checkout, tmp_path, capsys):
    folder = checkout("import transformers\nraise ImportError(transformers.__file__)")
    sources = tmp_path / "src/transformers/__init__.py"
    sources.write_text("")
    assert peers.main([folder]) == 2
    assert f"ImportError: {sources}" in capsys.readouterr().err


def test_folders_that_are_no_checkout(checkout, tmp_path, capsys, monkeypatch):
    def refusal(*arguments: str) -> str:
        assert peers.main([*arguments]) == 2
        return capsys.readouterr().err.strip()

    absent = tmp_path / "absent"
    assert refusal(str(absent)) == f"CHECKOUT must be a folder, got {absent}, which is none"
    text = refusal(str(tmp_path / "tests"))
    assert text.startswith(
        "CHECKOUT must be a checkout with one of src/transformers (transformers), nemo/collections/asr"
    )
    assert text.endswith(f"got {tmp_path / 'tests'}")
    assert f"got {tmp_path} without them" in refusal(str(tmp_path))
    folder = checkout("")
    assert refusal(folder, "--tests", "no/test.py").endswith("got no/test.py, which is not there")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert refusal(folder).startswith("pytest must be installed for ")
