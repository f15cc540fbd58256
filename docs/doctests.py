"""Docstrings' doctests as blocks of code on the site; Markdown alone takes `>>>` for quotations."""

import re

import griffe

DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class Doctests(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **_) -> None:
        if obj.docstring:
            obj.docstring.value = DOCTEST.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
