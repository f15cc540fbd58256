"""Comments, docstrings, pages and commits keep to the rules of plain English that a machine can check."""

from __future__ import annotations

import functools
import subprocess

import pytest

from tests import ROOT
from tests.docs.plain_english import Prose, cpp_prose, page_prose, problems, prose, python_prose, subject_problems

# Files and folders to check; a folder's Python, C++, CUDA and Markdown.
COVERED = (
    "CONTRIBUTING.md", "README.md", "benchmarks", "build_backend", "csrc", "docs", "examples", "experiments",
    "setup.py", "tests", "xlnet_kernels",
)  # fmt: skip
SUFFIXES = {".py", ".h", ".cuh", ".cpp", ".cu", ".md"}
GENERATED = ("docs/api/",)  # from docstrings, which are checked
# File and words of a piece that may break a rule; at most ten.
EXEMPT = (
    ("docs/tutorial.md", "The value of the of the re"),  # a small model's text
)


def files(name: str) -> list:
    path = ROOT / name
    found = [path] if path.is_file() else sorted(path.rglob("*.*"))
    found = [file for file in found if file.suffix in SUFFIXES and not _name(file).startswith(GENERATED)]
    return [file for file in found if not {"build", "__pycache__"} & {*file.relative_to(ROOT).parts}]


def _name(path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def all_problems(name: str) -> list[tuple[str, str, str]]:
    """File and line, the piece of prose, and a rule that it breaks."""
    return [
        (f"{_name(file)}:{piece.line}", piece.text, problem)
        for file in files(name)
        for piece in prose(file)
        for problem in problems(piece)
    ]


def is_exempt(place: str, text: str) -> bool:
    return any(place.startswith(f"{file}:") and words in text for file, words in EXEMPT)


@pytest.mark.parametrize("name", COVERED)
def test_prose_is_plain(name):
    assert len(files(name)) > 0
    found = [f"{place}: {problem}" for place, text, problem in all_problems(name) if not is_exempt(place, text)]
    assert not found, "\n".join(found)


def test_exemptions_are_few_and_needed():
    assert len(EXEMPT) <= 10
    pieces = [(place, text) for name in COVERED for place, text, _ in all_problems(name)]
    for file, words in EXEMPT:
        assert any(place.startswith(f"{file}:") and words in text for place, text in pieces), (file, words)


LONG = " ".join(["word"] * 26)
BAD = {
    "opening of a comment": (python_prose, "x = 1\n# Of the first row.\n"),
    "opening of a comment behind a line": (python_prose, "x = 1  # those of the first row\n# And the second.\n"),
    "reason behind a line": (python_prose, "x = 1  # because the kernels read it\n"),
    "clause": (python_prose, "# What the kernels read.\nx = 1\n"),
    "banned word in a comment": (python_prose, "# The second line of it\n# is read by nobody.\nx = 1\n"),
    "banned word in a docstring": (python_prose, 'def f():\n    """Load a row.\n\n    Not any more.\n    """\n'),
    "summary that is an opening": (python_prose, 'def f():\n    """The same for rows."""\n'),
    "summary on two lines": (python_prose, '"""Load a row\nof the table."""\n'),
    "long summary": (python_prose, f'class A:\n    """A row: {LONG}."""\n'),
    "comment in C++": (cpp_prose, 'auto name = "// not this";  // Those of the first row\n'),
    "second line of a comment in C++": (cpp_prose, "// A row that\n// no one reads.\nint x;\n"),
    "block comment in C++": (cpp_prose, "/* Until now\n * a row. */\n"),
    "question as a heading": (page_prose, "# Rows?\n"),
    "heading with a question word": (page_prose, "Text.\n\n## How rows are read\n"),
    "opening of a heading": (page_prose, "## Of the rows\n"),
    "long sentence": (page_prose, f"Short. A {LONG}.\n"),
    "long sentence in a list": (page_prose, f"* a row\n* {LONG}\n"),
    "banned word on a page": (page_prose, "A row that whoever calls\nmay read.\n"),
}
GOOD = {
    "noun": (python_prose, '"""Rows of a table."""\n# A row, which kernels read once.\nx = 1  # of a table\n'),
    "strings and directives": (python_prose, 'x = "# Of rows"  # type: ignore[assignment]\n# noqa: E402\n# Rows.\n'),
    "code is one word": (python_prose, f'"""Table `{LONG}` of rows."""\n'),
    "string in C++": (cpp_prose, 'auto name = "// Those of rows";  // the name\nauto raw = R"(// And)";\n'),
    "code on a page": (page_prose, f"# Rows\n\n```python\n# Of {LONG}\n```\n\n| What | {LONG} |\n\n<!-- {LONG} -->\n"),
    "sentences": (page_prose, f"A {LONG[:60]}. `{LONG}` {LONG[:60]}. call.py {LONG[:60]}.\n* {LONG[:60]}\n"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_prose_is_found(case):
    read, text = BAD[case]
    assert [problem for piece in read(text) for problem in problems(piece)]


@pytest.mark.parametrize("case", GOOD)
def test_good_prose_passes(case):
    read, text = GOOD[case]
    pieces = list(read(text))
    assert pieces and not [problem for piece in pieces for problem in problems(piece)]


def test_pieces_have_their_lines():
    assert list(python_prose("x = 1\n\n# A row\n# of two.\ny = 2\n")) == [Prose(3, "comment", "A row of two.")]
    assert list(cpp_prose("int x;  // a row\n\n// Two\n// rows.\n")) == [
        Prose(1, "aside", "a row"),
        Prose(3, "comment", "Two rows."),
    ]
    page = "---\na: b\n---\n# Rows\n\n```\ncode\n```\n\nA row\nof two.\n\n* one\n"
    assert list(page_prose(page)) == [
        Prose(4, "heading", "Rows"),
        Prose(10, "paragraph", "A row of two."),
        Prose(13, "paragraph", "one"),
    ]


@pytest.mark.parametrize("subject", ["docs: name a page", "csrc, tests: give rows a name", "fast path: skip checks"])
def test_good_subjects_pass(subject):
    assert not subject_problems(subject)


@pytest.mark.parametrize("subject", ["name a page", f"docs: {LONG}", "Docs: name a page"])
def test_bad_subjects_are_found(subject):
    assert subject_problems(subject)


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def test_commits_have_short_subjects_with_an_area():
    """Commits since the last tag, or since this test if there is no tag."""
    try:
        is_shallow = git("rev-parse", "--is-shallow-repository")
    except FileNotFoundError:
        pytest.skip("git is not installed")
    if is_shallow != "false" or git("rev-parse", "--show-prefix"):
        pytest.skip("no history: not a git repository of its own, or a shallow clone")
    begin = git("describe", "--tags", "--abbrev=0")
    if not begin:
        added = git("log", "--diff-filter=A", "--format=%H", "--", "tests/docs/test_plain_english.py").splitlines()
        if not added:
            pytest.skip("no history: there is neither a tag nor the commit that added this file")
        begin = f"{added[-1]}^"
    subjects = git("log", "--no-merges", "--format=%s", f"{begin}..HEAD").splitlines()
    found = {subject: wrong for subject in subjects if (wrong := subject_problems(subject))}
    assert not found, found
