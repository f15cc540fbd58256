"""Quotes in docs/troubleshooting.md are messages of the package."""

import re

import pytest

from tests import ROOT

PAGE = (ROOT / "docs/troubleshooting.md").read_text()
FILES = [ROOT / "setup.py", *(ROOT / "xlnet_kernels").rglob("*.py"), *(ROOT / "build_backend").glob("*.py")]
# Strings that a line's length has broken in two are one; what is filled in splits them.
SAID = re.sub(r'"\n\s*f?"', "", "\n".join(path.read_text() for path in FILES))
# Messages with a value in the middle: the page gives an example.
FILLED_IN = {
    "it serves cuda tensors, query is on cpu": "it serves {backend.DEVICE} tensors, query is on {device_type}",
    "compiled kernels need torch 2.10 or later": "compiled kernels need torch {least} or later",
}
QUOTES = re.findall(r'"([^"`]{8,})"', re.sub(r"```.*?```|`[^`\n]*`", "", PAGE, flags=re.DOTALL).replace("\n", " "))


@pytest.mark.parametrize("quote", dict.fromkeys(QUOTES))
def test_quoted_messages_exist(quote):
    assert FILLED_IN.get(quote, quote) in SAID
