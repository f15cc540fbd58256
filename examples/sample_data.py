"""Write sample data for the other commands from Python's manual: texts, and a labelled table.

    python examples/sample_data.py --output runs/data

texts/ has a file for each topic. train.csv and test.csv have paragraphs of the longest topics, labelled with their
topic; those of test.csv are not in texts/.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from parts import sample
from parts.command import check_output, make_parser, refuse
from parts.table import Row


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit status 0, or 2 for invalid options."""
    parser = make_parser(__doc__)
    parser.add_argument("--output", type=Path, default=Path("runs/data"), help="folder of all that")
    parser.add_argument("--overwrite", action="store_true", help="replace the files in --output")
    options = parser.parse_args(arguments)

    def work() -> None:
        check_output(options.output, options.overwrite)
        (options.output / "texts").mkdir(parents=True, exist_ok=True)
        for name, text in sample.texts().items():
            (options.output / "texts" / f"{name}.txt").write_text(text, encoding="utf-8")
        for name, rows in zip(("train", "test"), sample.topics(), strict=True):
            write(options.output / f"{name}.csv", rows)
            print(f"{name}.csv: {len(rows):,} rows")

    return refuse("sample_data.py", work)


def write(path: Path, rows: list[Row]) -> None:
    with open(path, "w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, ["text", "label"])
        table.writeheader()
        table.writerows(rows)


if __name__ == "__main__":
    sys.exit(main())
