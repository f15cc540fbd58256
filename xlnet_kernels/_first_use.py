"""The word that a user hears while a first call takes long: one INFO line on the logger "xlnet_kernels"."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

_LOGGER = logging.getLogger("xlnet_kernels")
SECONDS = 1.0  # taking a compiled kernel from a cache on disk needs less


@contextlib.contextmanager
def compiling(what: str) -> Iterator[None]:
    """Log that `what` is being compiled if the block takes longer than `SECONDS`."""
    timer = threading.Timer(SECONDS, say, (what,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def say(what: str) -> None:
    """Log that `what` is being compiled."""
    _LOGGER.info("compiling %s once; a cache on disk keeps the result", what)
