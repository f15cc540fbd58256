"""Writes signatures and docstrings into docs/api/*.md: python docs/api_pages.py.

The text above a page's first `<!-- docstring of NAME -->` is written by hand. Text below such a line is replaced.
The sources are parsed, not imported, so that neither torch nor a compiler is needed.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import griffe

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs" / "api").glob("*.md"))
MARK = re.compile(r"^<!-- docstring of (\S+) -->\n", re.MULTILINE)
# Fenced, because Markdown takes `>>>` for quotations.
DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)
NEXT_PARAMETER = re.compile(r", (?=\*|\w+: |\w+=)")
WIDTH = 100  # of a signature on one line
TITLES = {"parameters": "Arguments", "attributes": "Attributes", "returns": "Returns", "raises": "Raises"}
DOCSTRINGS = {
    # Because "key, value: ..." stands for both.
    "warn_unknown_params": False,
    "warn_missing_types": False,
    "returns_multiple_items": False,
    "returns_named_value": False,
}


def load() -> griffe.Module:
    """The package, parsed from its sources."""
    options = {"docstring_parser": "google", "docstring_options": DOCSTRINGS, "allow_inspection": False}
    return griffe.load("xlnet_kernels", search_paths=[ROOT], **options)


def page(text: str, package: griffe.Module) -> str:
    """The page with the text after each mark replaced."""
    head, *parts = MARK.split(text)
    made = [f"<!-- docstring of {path} -->\n{entry(_object(package, path))}" for path in parts[::2]]
    return "\n\n".join([head.rstrip(), *made]) + "\n"


def entry(found: griffe.Object, level: int = 2) -> str:
    """Heading, signature, docstring, then the documented public members of a class."""
    parent = f"{found.parent.name}." if level > 2 and found.parent else ""
    parts = [f"{'#' * level} {parent}{found.name}"]
    if not found.is_attribute and not _is_property(found):
        # "py", because the examples of "python" are run.
        parts.append(f"```py\n{_signature(found)}\n```")
    parts.append(_docstring(found))
    if found.is_class:
        members = [member for member in found.members.values() if not member.is_alias and _is_shown(member)]
        parts += [entry(member, level + 1) for member in members]
    return "\n\n".join(filter(None, parts))


def _object(package: griffe.Module, path: str) -> griffe.Object:
    try:
        found = package[path.removeprefix(f"{package.name}.")]
    except KeyError:
        raise LookupError(f"{path}, which a page of docs/api names, is not in the sources") from None
    return found.final_target if found.is_alias else found


def _is_property(found: griffe.Object) -> bool:
    return "property" in found.labels


def _is_shown(member: griffe.Object) -> bool:
    is_documented = bool(member.docstring) and (not member.name.startswith("_") or member.name == "__getitem__")
    return is_documented or member.name == "forward"  # whose arguments the docstring of the class may explain


def _signature(found: griffe.Object) -> str:
    text = found.signature()
    if found.is_class:
        init = found.all_members.get("__init__")
        if init is not None and init.is_alias and init.resolved:  # inherited
            text = init.final_target.signature(return_type=False, name=found.name)
        text = f"class {text or found.name}"
    if len(text) <= WIDTH:
        return text
    start, _, rest = text.partition("(")
    inside, end, returned = rest.rpartition(")" if found.is_class or ") -> " not in rest else ") -> ")
    lines = "".join(f"    {parameter},\n" for parameter in NEXT_PARAMETER.split(inside))
    return f"{start}(\n{lines}{end}{returned}"


def _docstring(found: griffe.Object) -> str:
    sections = found.docstring.parsed if found.docstring else []
    if found.is_class and "__init__" in found.members and found.members["__init__"].docstring:
        sections = [*sections, *found.members["__init__"].docstring.parsed]
    return "\n\n".join(_section(section, str(getattr(found, "annotation", None))) for section in sections)


def _section(section: griffe.DocstringSection, returned: str) -> str:
    kind = section.kind.value
    if kind == "text":
        return DOCTEST.sub(r"```pycon\n\g<0>\n```", section.value)
    lines = [f"**{TITLES[kind]}**", ""]
    for item in section.value:
        name = str(item.annotation) if kind == "raises" else getattr(item, "name", "")
        body = textwrap.indent(item.description, "    ").strip()
        if kind == "returns" and str(item.annotation) != returned:  # griffe takes words before a colon for a type
            body = f"{item.annotation}: {body}"
        lines.append(f"* `{name}`: {body}" if name else f"* {body}")
    return "\n".join(lines)


if __name__ == "__main__":
    source = load()
    for path in PAGES:
        path.write_text(page(path.read_text(encoding="utf-8"), source), encoding="utf-8")
