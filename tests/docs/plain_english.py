"""Prose of sources and pages, and its breaches of the rules of plain English."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MOST_WORDS = 25  # of a sentence
MOST_LETTERS = 72  # of a commit's subject
BANNED = re.compile(r"\b(any more|of now|until now|nobody|no one(?!-)|somebody|whoever)\b", re.IGNORECASE)
CONTINUATION = re.compile(r"(Of|The same|Those|And)\b")
QUESTION = re.compile(r"(What|Which|How|Who|Where|Why)\b")
REASON = re.compile(r"\b(because|to avoid)\b")
CLAUSE = re.compile(r"(What|Who|Whoever)\b")
SUBJECT = re.compile(r"[a-z][\w ,./-]*: \S")
# A tool's directive, not prose.
DIRECTIVE = re.compile(r"(type: ignore|noqa|fmt: |ruff: |pragma|clang-format|NOLINT)")
CPP = re.compile(
    r'R"(?P<mark>\w*)\(.*?\)(?P=mark)"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'|//(?P<line>[^\n]*)|/\*(?P<block>.*?)\*/',
    re.DOTALL,
)


class Prose(NamedTuple):
    """A piece of prose."""

    line: int
    # "comment", "aside" (a comment behind code), "summary" (a docstring's first paragraph), "docstring" (the rest),
    # "heading" or "paragraph"
    kind: str
    text: str


def prose(path: Path) -> Iterator[Prose]:
    """The pieces of prose in a file, by its suffix."""
    text = path.read_text()
    if path.suffix == ".py":
        yield from python_prose(text)
    elif path.suffix == ".md":
        yield from page_prose(text)
    else:
        yield from cpp_prose(text)


def python_prose(text: str) -> Iterator[Prose]:
    """Comments and docstrings of Python."""
    comments = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            is_whole = not token.line[: token.start[1]].strip()
            comments.append((token.start[0], is_whole, token.string.lstrip("#!").strip()))
    yield from _joined(comments)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            summary, _, rest = (ast.get_docstring(node) or "").partition("\n\n")
            line = node.body[0].lineno if node.body else 1
            if summary:
                yield Prose(line, "summary", summary)
            if rest:
                yield Prose(line, "docstring", rest)


def cpp_prose(text: str) -> Iterator[Prose]:
    """Comments of C++ and CUDA."""
    comments = []
    for found in CPP.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        if found["line"] is not None:
            is_whole = not text[text.rfind("\n", 0, found.start()) + 1 : found.start()].strip()
            comments.append((line, is_whole, found["line"].strip("/ ")))
        elif found["block"] is not None:
            words = re.sub(r"\n\s*\*", "\n", found["block"]).strip("* \n")
            comments.append((line, True, words))
    yield from _joined(comments)


def _joined(comments: list[tuple[int, bool, str]]) -> Iterator[Prose]:
    """Comments, with those on consecutive lines of their own as one."""
    last = 0
    begin, kind, words = 0, "comment", []
    for line, is_whole, text in [*comments, (0, False, "")]:
        if is_whole and line == last + 1 and words and text:
            words.append(text)
        else:
            if words:
                yield Prose(begin, kind, " ".join(words))
            kind = "comment" if is_whole else "aside"
            begin, words = line, [text] if text and not DIRECTIVE.match(text) else []
        last = line if is_whole else -1


def page_prose(text: str) -> Iterator[Prose]:
    """Headings and paragraphs of a page; code, tables and HTML are left out."""
    # Removed with as many line ends, to keep the numbers of lines.
    for pattern in (r"\A---\n.*?\n---\n", r"^ *```.*?^ *```", r"<!--.*?-->", r"^ *\|.*?$", r"^ *<.*?>$"):
        text = re.sub(pattern, lambda cut: "\n" * cut[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)
    begin, words = 0, []
    for line, content in enumerate([*text.splitlines(), ""], 1):
        starts = re.match(r"\s*([-*+]|\d+\.|#+) ", content) is not None
        if words and (starts or not content.strip() or content.startswith("    ")):
            yield Prose(begin, "paragraph", " ".join(words))
            words = []
        if heading := re.match(r"#+ (.*)", content):
            yield Prose(line, "heading", heading[1])
        elif content.strip() and not (content.startswith("    ") and not starts):
            begin = line if not words else begin
            words.append(re.sub(r"^\s*([-*+]|\d+\.) ", "", content).strip())


def problems(piece: Prose) -> list[str]:
    """The rules that a piece of prose breaks, each with the words that break it."""
    kind, text = piece.kind, _without_code(piece.text)
    found = [f"banned word: {word}" for word in BANNED.findall(text)]
    if kind in ("comment", "aside", "heading", "summary") and (opening := CONTINUATION.match(text)):
        found.append(f"opening: {opening[0]}")
    if kind == "aside" and REASON.search(text):
        found.append(f"a reason behind its line: {text}")
    if kind in ("comment", "aside", "summary") and (opening := CLAUSE.match(text)):
        found.append(f"a clause in place of a noun: {text[:40]}")
    if kind == "heading" and (QUESTION.match(text) or "?" in text):
        found.append(f"question as a heading: {text}")
    if kind == "summary" and (">>>" in text[:4] or "\n" in text):
        found.append(f"no summary on one line: {text[:40]}")
    if kind in ("summary", "paragraph"):
        for sentence in sentences(text):
            if (count := count_words(sentence)) > MOST_WORDS:
                found.append(f"{count} words: {sentence}")
    return found


def subject_problems(subject: str) -> list[str]:
    """The rules that a commit's subject breaks."""
    found = [] if SUBJECT.match(subject) else ["it must begin with an area: `area: ...`"]
    return found + ([f"{len(subject)} letters"] if len(subject) > MOST_LETTERS else [])


def sentences(text: str) -> list[str]:
    """The sentences of a text."""
    ended = re.sub(r"\b(e\.g|i\.e|et al|cf|vs|Fig|eq)\. ", r"\1 ", text.replace("\n", " "))
    return re.split(r"(?<=[.!?])[\"')*_]*\s+(?=[\"'(*_]*(?:[A-Z0-9-]|\w+\.\w))", ended)


def count_words(sentence: str) -> int:
    """The number of words; a quotation of code counts as one, symbols as none."""
    return sum(any(letter.isalnum() for letter in word) for word in sentence.split())


def _without_code(text: str) -> str:
    """The text with code as one word, and links as their text."""
    text = re.sub(r"``.*?``|`[^`]*`", "CODE", text, flags=re.DOTALL)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    # Shapes and formulas in parentheses, such as (B, H, L, D), count as one word too.
    return re.sub(r"\((?:[A-Z][\w +*/-]*|\d+|\.\.\.)(?:, (?:[\w +*/.-]+))*,?\)", "(shape)", text)
