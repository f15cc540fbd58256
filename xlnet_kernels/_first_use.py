"""Log line for a slow first call: one INFO line on the logger "xlnet_kernels"."""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import threading
from collections.abc import Iterator

_LOGGER = logging.getLogger("xlnet_kernels")
SECONDS = 1.0  # shorter compilations are not logged
# Triton's files that run only while it compiles a kernel or its launcher, not when it takes one from its cache. With
# versions that have other files nothing is logged.
TRITON = re.compile(r"triton/(compiler/code_generator|backends/\w+/compiler|runtime/build)\.py$")


@contextlib.contextmanager
def compiling(what: str, compiler: re.Pattern[str] = TRITON) -> Iterator[None]:
    """Log that `what` is being compiled if the block takes longer than `SECONDS` and is in a file of `compiler`."""
    if not _LOGGER.isEnabledFor(logging.INFO):
        yield
        return
    done, thread = threading.Event(), threading.get_ident()

    def watch() -> None:
        while not done.wait(SECONDS):
            if _is_inside(thread, compiler):
                say(what)
                return

    threading.Thread(target=watch, name=what, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _is_inside(thread: int, files: re.Pattern[str]) -> bool:
    """Whether a function of one of `files` is on a thread's stack."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if files.search(frame.f_code.co_filename.replace("\\", "/")):
            return True
        frame = frame.f_back
    return False


def say(what: str) -> None:
    """Log that `what` is being compiled."""
    _LOGGER.info("compiling %s once; a cache on disk keeps the result", what)
