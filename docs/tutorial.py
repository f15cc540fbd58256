"""Makes tutorial.ipynb of tutorial.md: prose becomes Markdown cells, commands and Python become code.

python docs/tutorial.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path

PAGE, NOTEBOOK = (Path(__file__).with_suffix(suffix) for suffix in (".md", ".ipynb"))
BLOCK = re.compile(r"^(?:<!-- (not [^\n]*) -->\n)?```(bash|python)\n(.*?)^```\n", re.DOTALL | re.MULTILINE)


def cells(page: str) -> list[tuple[str, str]]:
    """The kind ("markdown" or "code") and content of each cell."""
    found, at = [], 0
    for block in BLOCK.finditer(page):
        remark, language, code = block.groups()
        if remark == "not in the notebook":
            continue
        found.append(("markdown", page[at : block.start()].strip()))
        found.append(("code", code.rstrip() if language == "python" else f"%%bash\n{code.rstrip()}"))
        at = block.end()
    return [cell for cell in (*found, ("markdown", page[at:].strip())) if cell[1]]


def notebook(page: str) -> dict:
    """The content of an .ipynb file, its code not yet run."""
    made = []
    for number, (kind, content) in enumerate(cells(page)):
        cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": content.splitlines(keepends=True)}
        made.append(cell | ({"execution_count": None, "outputs": []} if kind == "code" else {}))
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return {"cells": made, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}


if __name__ == "__main__":
    NOTEBOOK.write_text(json.dumps(notebook(PAGE.read_text(encoding="utf-8")), indent=1) + "\n", encoding="utf-8")
