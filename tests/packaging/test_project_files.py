"""CITATION.cff, the workflows and the issue forms agree with the project they are of."""

import re
import subprocess

import pytest

import xlnet_kernels as xk
from tests import ROOT

yaml = pytest.importorskip("yaml")
GITHUB = ROOT / ".github"
MAKEFILE = (ROOT / "Makefile").read_text()


def test_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == xk.__version__ and citation["license"] == "Apache-2.0"
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()


def commands(workflow):
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    return [step["run"] for job in jobs for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("workflow", sorted((GITHUB / "workflows").glob("*.yml")), ids=lambda path: path.name)
def test_workflows_call_what_there_is(workflow):
    targets = re.findall(r"^([\w-]+):", MAKEFILE, re.MULTILINE)
    found = commands(workflow)
    assert found
    for command in found:
        assert set(re.findall(r"\bmake ([a-z][\w-]*)", command)) <= set(targets), command


@pytest.mark.parametrize("workflow", sorted((GITHUB / "workflows").glob("*.yml")), ids=lambda path: path.name)
def test_actions_are_pinned_by_commit(workflow):
    """A tag can be moved to other code, a commit cannot; the tag is in a comment, for readers."""
    used = re.findall(r"uses: (.*)", workflow.read_text())
    assert used and all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", one) for one in used), used


def make(*arguments):
    return subprocess.run(["make", *arguments], cwd=ROOT, capture_output=True, text=True).stdout


def test_make_alone_prints_help():
    shown = make()
    targets = set(re.findall(r"`make ([a-z][\w-]*)", shown))
    assert targets == set(re.findall(r"[a-z][\w-]+", re.search(r"^\.PHONY: help (.*) clean FORCE$", MAKEFILE, re.M)[1]))
    assert "#" not in shown and "pip" not in shown


@pytest.mark.parametrize(
    ("target", "extras"), [("bench", "bench"), ("bench-suite", "bench"), ("docs", "docs"), ("test", "bench,docs,test")]
)
def test_make_installs_what_its_target_needs(target, extras):
    """`make bench` is on its way to its first number, and the documentation's tools are not."""
    assert re.findall(r"pip install -v -e '\.\[(.*?)\]'", make("-n", target, "VENV=build/no-such-environment")) == [
        extras
    ]


def test_docs_workflow_installs_the_extra():
    (extra,) = re.findall(r"^docs = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    (command,) = [command for command in commands(GITHUB / "workflows" / "docs.yml") if "pip install" in command]
    assert sorted(re.findall(r'"(.+?)"', extra)) == sorted(command.partition(" # ")[0].replace('"', "").split()[2:])


def test_examples_extra_has_what_the_trainer_needs():
    (extra,) = re.findall(r"^examples = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert "transformers.Trainer(" in (ROOT / "docs" / "how-to" / "pre-train.md").read_text()
    assert {"transformers>=5.18", "accelerate"} <= set(re.findall(r'^ *"(.+?)"', extra, re.MULTILINE))


@pytest.mark.parametrize("form", ["bug", "slow", "model"])
def test_issue_forms_have_what_forms_need(form):
    found = yaml.safe_load((GITHUB / "ISSUE_TEMPLATE" / f"{form}.yml").read_text())
    assert found["name"] and found["description"]
    assert all(part["type"] == "textarea" and part["attributes"]["label"] for part in found["body"])
