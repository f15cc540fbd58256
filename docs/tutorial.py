"""Write tutorial.md as a notebook: prose becomes Markdown cells, commands and Python become code.

python docs/tutorial.py                  tutorial.ipynb, in the root of the source tree, where its commands run
python docs/tutorial.py NOTEBOOK.ipynb   another file
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

PAGE = Path(__file__).with_suffix(".md")
BLOCK = re.compile(r"^(?:<!-- (not [^\n]*) -->\n)?```(bash|python)\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
OUTPUT = re.compile(r"^```text\n(.*?)^```\n", re.DOTALL | re.MULTILINE)  # of the code before it
# Jupyter asks programs for colour and progress bars as in a terminal, which a notebook shows as thousands of lines.
SETUP = "%env FORCE_COLOR="


def cells(page: str) -> list[tuple[str, str]]:
    """The kind ("markdown" or "code") and content of each cell."""
    page = OUTPUT.sub("", page)
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
    for number, (kind, content) in enumerate([("code", SETUP), *cells(page)]):
        cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": content.splitlines(keepends=True)}
        made.append(cell | ({"execution_count": None, "outputs": []} if kind == "code" else {}))
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return {"cells": made, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}


def main(target: Path) -> None:
    target.write_text(json.dumps(notebook(PAGE.read_text(encoding="utf-8")), indent=1) + "\n", encoding="utf-8")
    print(target)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "notebook", type=Path, nargs="?", default=PAGE.parent.parent / "tutorial.ipynb", help="file to write"
    )
    main(parser.parse_args().notebook)
