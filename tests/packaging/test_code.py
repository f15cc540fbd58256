"""Rules of the Python code that no linter has: names that say something, functions that fit a screen or two."""

import ast
import re
import symtable
from collections.abc import Iterator

from tests import ROOT

FOLDERS = ("xlnet_kernels", "tests", "benchmarks", "experiments", "examples", "docs")
LONGEST = 99  # lines of a function, without its signature and docstring
DEFINED = (ast.FunctionDef, ast.AsyncFunctionDef)


def sources() -> Iterator[tuple[str, str]]:
    """Every file's name and text."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(ROOT)), path.read_text()


def scopes(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    """A scope and all within it."""
    yield table
    for child in table.get_children():
        yield from scopes(child)


def is_class_method(scope: symtable.SymbolTable, text: str) -> bool:
    """The name "of" of this scope is a class method."""
    if scope.get_type() != "class":
        return False
    found = [child.get_lineno() for child in scope.get_children() if child.get_name() == "of"]
    return len(found) == 1 and "@classmethod" in "".join(text.splitlines()[found[0] - 2 : found[0]])


def body_length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from the first statement behind the docstring to the last."""
    has_docstring = ast.get_docstring(function, clean=False) is not None
    body = function.body[has_docstring:]
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def test_no_variable_is_called_of():
    """A name says what it holds; a class method may be read with its class, as in `XLNetConfig.of(config)`."""
    assert not [
        f"{file}:{scope.get_lineno()} {scope.get_name()}"
        for file, text in sources()
        for scope in scopes(symtable.symtable(text, file, "exec"))
        if "of" in scope.get_identifiers() and not is_class_method(scope, text)
    ]


def test_functions_are_short():
    long = [
        f"{file}:{node.lineno} {node.name} has {body_length(node)} lines"
        for file, text in sources()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, DEFINED) and body_length(node) > LONGEST
    ]
    assert not long


def test_scripts_read_arguments_by_a_parser():
    """To avoid "--help" as the name of a file."""
    unpacked = re.compile(r"\*sys\.argv|sys\.argv\[1\]")
    assert not [file for file, text in sources() if not file.startswith("tests/") and unpacked.search(text)]
