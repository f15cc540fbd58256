"""Atomic writing of files, and reading of regular files only."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_LARGEST_JSON = 1 << 28  # bytes: the index of 100,000 tensors takes 10 MB


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` with a temporary path beside `path` and rename; a kill leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def check_regular(path: Path) -> None:
    """Refuse pipes, devices and folders, because reading a pipe or a device may never end.

    Raises:
        OSError: `path` is missing or cannot be accessed.
        ValueError: it is not a file.
    """
    kind = stat.S_IFMT(os.stat(path).st_mode)
    if kind != stat.S_IFREG:
        raise ValueError(f"{path} must be a file, got {_KINDS.get(kind, 'something else')}")


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading; every OSError names it.

    Raises:
        OSError, ValueError: as `check_regular` does.
    """
    check_regular(path)
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        OSError: it is missing or cannot be read.
        ValueError: it is not a file or not JSON; the text names it.
    """
    with open_regular(path) as file:
        content = file.read(_LARGEST_JSON + 1)
    if len(content) > _LARGEST_JSON:
        raise ValueError(f"{path}: a JSON file must have at most {_LARGEST_JSON} bytes, this one has more")
    return parse_json(content, str(path))


def parse_json(content: bytes, name: str) -> Any:
    """The value of a JSON text; the ValueError names it `name`."""
    try:
        return json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: it must be JSON, got: {error}") from error


def entry_of(path: Path, name: str) -> Path:
    """`path`, or the file `name` in it if it is a folder.

    Raises:
        FileNotFoundError: `path` is missing; where it may be the name of a model on the Hugging Face Hub, the text says
            how to fetch its folder.
    """
    if path.is_dir():
        return path / name
    if not os.path.lexists(path):
        hint = ""
        if re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", path.as_posix()):
            hint = (
                f". Nothing is downloaded: if that is a model of the Hugging Face Hub, load the folder that "
                f'huggingface_hub.snapshot_download("{path.as_posix()}") fetches and returns'
            )
        raise FileNotFoundError(f"there is no folder {str(path)!r} with a {name}{hint}")
    return path
