"""The tables of a run into a page: `python benchmarks/report.py RESULTS.json PAGE.md`."""

import sys

from lib.report import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
