"""Rules of the Python code that no linter has: names that say something, functions that fit a screen or two."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests import ROOT

FOLDERS = ("xlnet_kernels", "tests", "benchmarks", "experiments", "examples", "docs")
LONGEST = 99  # lines of a function, without its signature and docstring
DEFINED = (ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def everywhere() -> Iterator[tuple[str, ast.AST]]:
    """Every node of the syntax trees, with its file."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield from ((str(path.relative_to(ROOT)), node) for node in nodes(path))


def is_class_method(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and [ast.unparse(x) for x in node.decorator_list] == ["classmethod"]


def names(node: ast.AST) -> Iterator[str | None]:
    """Variables, parameters and functions that this node mentions or makes, class methods aside."""
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.alias):
        yield from (node.name, node.asname)
    elif isinstance(node, DEFINED) and not is_class_method(node):
        yield node.name


def body_length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from the first statement behind the docstring to the last."""
    has_docstring = ast.get_docstring(function, clean=False) is not None
    body = function.body[has_docstring:]
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def test_no_variable_is_called_of():
    """A name says what it holds; a class method may be read with its class, as in `XLNetConfig.of(config)`."""
    assert not [f"{file}:{node.lineno}" for file, node in everywhere() if "of" in names(node)]


def test_functions_are_short():
    long = [
        f"{file}:{node.lineno} {node.name} has {body_length(node)} lines"
        for file, node in everywhere()
        if isinstance(node, DEFINED) and body_length(node) > LONGEST
    ]
    assert not long
