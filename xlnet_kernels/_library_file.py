"""Check of a compiled library's file without loading it."""

from __future__ import annotations

import os
import re
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

_MACHINES = {3: "x86", 21: "PowerPC", 22: "s390x", 40: "ARM", 62: "x86-64", 183: "AArch64", 243: "RISC-V"}
_HEADER = 64  # bytes of an ELF file's header
_SEGMENT = 56  # bytes of an entry in the segment table, in 64-bit files
_SELF = Path("/proc/self/exe")
_ARGUMENTS = re.compile(rb"xlnet_kernels::rel_attention:([\w,]+)\0")  # ARGUMENTS of csrc/stable/facts.cpp


def fault(path: Path) -> str | None:
    """The reason why a library cannot be loaded into this process, as far as its file shows; None otherwise.

    Needed because loading a truncated file may end the process instead of raising.
    """
    try:
        with path.open("rb") as file:
            head, size = file.read(_HEADER), os.fstat(file.fileno()).st_size
            if sys.platform != "linux":
                return None
            if len(head) < _HEADER or head[:4] != b"\x7fELF":
                return "is no library of this platform"
            own = _own_head()
            if own and _kind(head) != _kind(own):
                return f"is for {_machine(head)}, this Python for {_machine(own)}"
            end = _end(file, head)
    except ValueError as error:
        return str(error)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return f"is truncated: it has {size} bytes of at least {end}" if size < end else None


def takes_other_arguments(path: Path, names: Sequence[str]) -> str | None:
    """The reason why a library's operator does not have these arguments; None if it has them, or cannot be read.

    Needed because torch's registry ends the import of the package where schema and kernels differ.
    """
    try:
        found = _ARGUMENTS.search(path.read_bytes())
    except OSError:
        return None
    if found is not None and found[1].decode().split(",")[:-1] == list(names):
        return None
    return "is of another version of this package: its operator has other arguments"


def _own_head() -> bytes:
    """The header of this Python's file; empty where /proc is not mounted, as in some containers."""
    try:
        with _SELF.open("rb") as python:
            return python.read(_HEADER)
    except OSError:
        return b""


def _kind(head: bytes) -> tuple[bytes, bytes]:
    """Word size and byte order, and the machine."""
    return head[4:6], head[18:20]


def _machine(head: bytes) -> str:
    number = int.from_bytes(head[18:20], "little" if head[5] == 1 else "big")
    return f"{_MACHINES.get(number, f'machine {number}')}, {32 * head[4]} bits"


def _end(file, head: bytes) -> int:
    """Least size in bytes of a 64-bit ELF file with its headers, segments and sections; 0 for a 32-bit file."""
    if head[4] != 2:
        return 0
    order = "<" if head[5] == 1 else ">"
    segments, sections = struct.unpack_from(f"{order}QQ", head, 32)
    segment_size, segment_count, section_size, section_count = struct.unpack_from(f"{order}4H", head, 54)
    if segment_count and segment_size != _SEGMENT:
        raise ValueError(f"has a damaged header: segments of {segment_size} bytes each")
    ends = [segments + segment_size * segment_count, sections + section_size * section_count]
    file.seek(segments)
    table = file.read(segment_size * segment_count)
    for start in range(0, len(table) - segment_size + 1, segment_size):
        offset, length = struct.unpack_from(f"{order}Q16xQ", table, start + 8)
        ends.append(offset + length)
    return max(ends)
