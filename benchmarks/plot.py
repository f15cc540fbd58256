"""Results as a picture: `python benchmarks/plot.py RESULTS.json [PICTURE.png]`."""

import sys

from lib.plot import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
