"""Contents of an open token file, read by position and checked against checksums, without a memory map."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import weakref
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..model.files import check_regular

BLOCK = 1 << 14  # bytes under one checksum
DTYPES = {np.dtype(kind).str: np.dtype(kind) for kind in ("|u1", "<u2", "<u4")}
# Header written by numpy. Not read by numpy, because its reader evaluates the text as Python and may raise any parser
# error.
_HEADER = re.compile(
    rb"\x93NUMPY([\x01\x02])\x00(?:(?<=\x01\x00)(..)|(....))"
    rb"(\{'descr': '([^']*)', 'fortran_order': (?:False|True), 'shape': \(([^)]*)\), \} *\n)",
    re.DOTALL,
)
_LONGEST_HEADER = 4096  # bytes
_position = threading.Lock()


class Contents:
    """Contents of an open token file.

    Attributes:
        count: number of tokens. dtype: of the ids in the file.
        bounds: (documents + 1,) int64. vocab_size: every id is below it.
        checksums: (blocks,) of the tokens' bytes, or None in old files.
        fingerprint: equal for files with the same content; for old files, with the same bounds and size.

    Raises:
        OSError: it is missing or cannot be read.
        ValueError: it is not a token file, or damaged outside its tokens.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        check_regular(path)
        self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        weakref.finalize(self, os.close, self._descriptor)
        size = os.fstat(self._descriptor).st_size
        head = self._bytes(0, min(size, _LONGEST_HEADER))
        version, descr, shape, self._begin = self._header(head, 0, "it does not begin with an .npy header")
        found = re.fullmatch(r"(\d{1,18}),", shape)
        if found is None or descr not in DTYPES:
            raise self._refuse(
                f"it begins with {descr} of shape ({shape}), not with a vector of uint8, uint16 or uint32"
            )
        self.count, self.dtype = int(found[1]), DTYPES[descr]
        end = self._begin + self.count * self.dtype.itemsize
        if size < end:
            raise ValueError(f"{path} is truncated: {self.count} tokens need {end} bytes, the file has {size}")
        if self.count == 0:
            raise self._refuse("it has no tokens; its writer was interrupted")
        rest = self._bytes(end, size - end)
        head = head[: self._begin]
        # Without the file's own sum at the end, because with it all files would have the same sum.
        checksum = zlib.crc32(rest[:-4], zlib.crc32(head))
        self.fingerprint = size, checksum
        checked = version == 2
        if checked and checksum.to_bytes(4, "little") != rest[-4:]:
            raise ValueError(
                f"{path} is truncated or damaged: its header, document bounds, vocabulary size and checksums are not "
                f"those that were written"
            )
        self._take(rest, checked)

    def _take(self, rest: bytes, checked: bool) -> None:
        """Read the arrays after the tokens."""
        bounds, place = self._array(rest, 0, "<i8")
        vocab_size, place = self._array(rest, place, "<i8")
        self.checksums = None
        if checked:
            checksums, place = self._array(rest, place, "<u4")
            blocks = -(-self.count * self.dtype.itemsize // BLOCK)
            if checksums.shape != (blocks + 1,):
                raise self._refuse(f"it has {checksums.size} checksums instead of {blocks + 1}")
            self.checksums = checksums[:-1].tolist()
        if place != len(rest):
            raise self._refuse(f"bytes follow after its {'checksums' if checked else 'vocabulary size'}")
        whole = bounds.ndim == 1 and len(bounds) > 1
        if not whole or bounds[0] != 0 or bounds[-1] != self.count or (np.diff(bounds) <= 0).any():
            raise self._refuse(f"its document bounds do not rise from 0 to its {self.count} tokens")
        if vocab_size.shape != () or vocab_size < 1:
            raise self._refuse("its vocabulary size is no positive integer")
        self.bounds, self.vocab_size = bounds, int(vocab_size)

    def read(self, begin: int, end: int) -> np.ndarray:
        """The tokens [begin, end), in the file's dtype.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file was truncated, or its bytes were changed.
        """
        first, last, whole = (i * self.dtype.itemsize for i in (begin, end, self.count))
        if self.checksums is None or first == last:
            return np.frombuffer(self._bytes(self._begin + first, last - first), self.dtype)
        start = first - first % BLOCK
        content = memoryview(self._bytes(self._begin + start, min(-(-last // BLOCK) * BLOCK, whole) - start))
        for place in range(0, len(content), BLOCK):
            if zlib.crc32(content[place : place + BLOCK]) != self.checksums[(start + place) // BLOCK]:
                token, end = (start + place) // self.dtype.itemsize, min(start + place + BLOCK, whole)
                raise ValueError(
                    f"{self.path} is damaged or was changed while it was open: its tokens {token} to "
                    f"{end // self.dtype.itemsize} are not those that were written"
                )
        return np.frombuffer(content[first - start : last - start], self.dtype)

    def mapped(self, begin: int, count: int) -> np.memmap:
        """The tokens from `begin` on as a memory map."""
        with os.fdopen(os.dup(self._descriptor), "rb") as file:
            return np.memmap(file, self.dtype, "r", self._begin + begin * self.dtype.itemsize, (count,))

    def _bytes(self, begin: int, count: int) -> bytes:
        parts, missing = [], count
        while missing:
            with self._named():
                part = _pread(self._descriptor, missing, begin + count - missing)
            if not part:
                raise ValueError(f"{self.path} was cut while it was open: it ends before byte {begin + count}")
            parts.append(part)
            missing -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            error.filename = str(self.path)
            raise

    def _array(self, data: bytes, place: int, descr: str) -> tuple[np.ndarray, int]:
        """The array of int64 or uint32 at `place`, and its end."""
        torn = (
            f"after {self.count} tokens it has no whole document bounds, vocabulary size and checksums; it is "
            f"truncated or was written by something else"
        )
        _, found, shape, begin = self._header(data, place, torn)
        sizes = [int(size) for size in re.findall(r"\d{1,18}", shape)]
        count = sizes[0] if sizes else 1
        end = begin + count * np.dtype(descr).itemsize
        if found != descr or len(sizes) > 1 or end > len(data):
            raise self._refuse(torn)
        array = np.frombuffer(data, descr, count, begin)
        return array.astype(array.dtype.newbyteorder("=")).reshape(sizes), end

    def _header(self, data: bytes, place: int, reason: str) -> tuple[int, str, str, int]:
        """Version, dtype and shape in an .npy header at `place`, and its end."""
        found = _HEADER.match(data, place)
        if found is None or int.from_bytes(found[2] or found[3], "little") != len(found[4]):
            raise self._refuse(reason)
        return found[1][0], found[5].decode("latin-1"), found[6].decode("latin-1"), found.end()

    def _refuse(self, reason: str) -> ValueError:
        return ValueError(f"{self.path} is no token file of write_tokens: {reason}")


def _pread(descriptor: int, count: int, begin: int) -> bytes:
    """Bytes of a file, read without its position where possible, because forked processes share the position."""
    if hasattr(os, "pread"):
        return os.pread(descriptor, count, begin)
    with _position:
        os.lseek(descriptor, begin, os.SEEK_SET)
        return os.read(descriptor, count)
