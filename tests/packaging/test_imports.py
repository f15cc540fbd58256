"""Imports within the package point one way: no module leads back to itself, imports inside functions included."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests import ROOT

PACKAGE = ROOT / "xlnet_kernels"


def _name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def _imports(tree: ast.AST) -> Iterator[ast.ImportFrom]:
    """All but those for type checkers alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield node
        elif not (isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"):
            yield from _imports(node)


def _needed(name: str) -> set[str]:
    """The package's modules that this one imports; a package's own name only where one of its names is taken."""
    path, found = MODULES[name], set()
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in _imports(ast.parse(path.read_text())):
        base = ".".join(package[: len(package) - node.level + 1] + ([node.module] if node.module else []))
        for alias in node.names:
            found.add(f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base)
    return found - {name, "xlnet_kernels"}


def test_no_module_imports_itself_through_others():
    needed = {name: _needed(name) for name in MODULES if name != "xlnet_kernels"}
    assert {"xlnet_kernels.call", "xlnet_kernels.ops"} <= needed["xlnet_kernels.backends.blocks"]
    left = dict(needed)
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free:
            del left[name]
    assert not left, {name: sorted(others & left.keys()) for name, others in left.items()}
