"""`python -m xlnet_kernels` is `python -m xlnet_kernels.info`."""

import sys

from xlnet_kernels.info import run

sys.exit(run())
