"""Token files, with the tokens of many documents in one file, and vocabularies."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from .._checks import shortened
from .token_contents import BLOCK, DTYPES, Contents

_format = np.lib.format


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Size of a vocabulary, and its special tokens.

    Args:
        size: number of ids.
        sep, cls, pad, mask: ids of SEP, CLS, padding and the masked LM's MASK; all different.
        others: further ids that are never predicted (end of document, unknown, ...).
        word_starts: (size,) bool, True for tokens that begin a word; spans of targets then begin there, as in the
            published models. None: they begin anywhere.

    Raises:
        ValueError: an id lies outside the vocabulary or is used twice.
    """

    size: int
    sep: int
    cls: int
    pad: int
    mask: int
    others: tuple[int, ...] = ()
    word_starts: np.ndarray | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        special = (self.sep, self.cls, self.pad, self.mask, *self.others)
        if not all(isinstance(token, int) and 0 <= token < self.size for token in special):
            raise ValueError(f"Vocabulary: sep, cls, pad, mask and others must lie in [0, {self.size}), got {special}")
        if len(set(special)) < len(special):
            raise ValueError(f"Vocabulary: sep, cls, pad, mask and others must all differ, got {special}")
        if self.word_starts is not None and (self.word_starts.dtype != bool or self.word_starts.shape != (self.size,)):
            raise ValueError(
                f"Vocabulary: word_starts must be bool of shape ({self.size},), got {self.word_starts.dtype} of shape "
                f"{self.word_starts.shape}"
            )

    @cached_property
    def special(self) -> np.ndarray:
        """(size,) bool, True for the ids that are never predicted."""
        flags = np.zeros(self.size, bool)
        flags[[self.sep, self.cls, self.pad, self.mask, *self.others]] = True
        return flags

    @cached_property
    def ordinary(self) -> np.ndarray:
        """The ids of text, in order."""
        return np.flatnonzero(~self.special)


class ByteTokenizer:
    """Tokeniser into UTF-8 bytes: 256 ids, then SEP, CLS, PAD and MASK. No file, no training, no unknown text.

    Any other tokeniser can be used: it needs an `encode` from text to ids, and a Vocabulary.

    >>> ByteTokenizer().decode(ByteTokenizer().encode("New York"))
    'New York'
    """

    vocabulary = Vocabulary(size=260, sep=256, cls=257, pad=258, mask=259)

    def encode(self, text: str | bytes) -> np.ndarray:
        """The ids of `text`, (length,) int64."""
        data = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
        return np.frombuffer(data, np.uint8).astype(np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; special ids are left out, broken characters replaced."""
        return bytes(int(token) for token in ids if token < 256).decode("utf-8", "replace")


def write_tokens(path: str | os.PathLike, documents: Iterable[np.ndarray], vocab_size: int) -> None:
    """Write a token file; `path` is replaced atomically.

    The file is four consecutive .npy arrays: the tokens in the smallest of uint8, uint16 and uint32 (so that
    ``np.load(path, mmap_mode="r")`` reads them); the begin of each document and the end of the last; the vocabulary
    size; and checksums (CRC-32), one for every 16 KiB of tokens and one for the rest. Documents are written one by one;
    empty documents are left out.

    Args:
        documents: each a 1-dimensional array or list of ids.

    Raises:
        ValueError: a document has other values than ids of the vocabulary, or there are no tokens.
    """
    path = Path(path)
    if not isinstance(vocab_size, (int, np.integer)) or not 0 < vocab_size <= 2**32:
        raise ValueError(f"vocab_size must be an integer in [1, 2^32], got {shortened(vocab_size)}")
    dtype = next(kind for kind in DTYPES.values() if vocab_size - 1 <= np.iinfo(kind).max)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(_header(dtype, 0))
            bounds, checksums = [0], _Checksums()
            for index, document in enumerate(documents):
                ids = _check_document(index, document, vocab_size)
                if ids.size:
                    content = ids.astype(dtype).tobytes()
                    file.write(content)
                    checksums.add(content)
                    bounds.append(bounds[-1] + ids.size)
            if bounds[-1] == 0:
                raise ValueError("documents must hold at least one token")
            header, rest = _header(dtype, bounds[-1]), io.BytesIO()
            ends = np.array(bounds, np.int64), np.array(vocab_size, np.int64), np.array([*checksums.done(), 0], "<u4")
            for array in ends:
                _format.write_array(rest, array, version=(1, 0))
            others = rest.getvalue()[:-4]  # the last checksum is still to come
            file.write(others + zlib.crc32(others, zlib.crc32(header)).to_bytes(4, "little"))
            file.seek(0)
            file.write(header)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


class TokenFile:
    """Tokens of a file written by `write_tokens`, or a part of them, read on demand.

    The file stays open, so a later replacement is not read. Each `read` compares its blocks of 16 KiB with their
    checksums: about 10 microseconds a block. Files without checksums are read unchecked.

    Attributes:
        bounds: (documents + 1,) int64, the begin of each document and the end of the last.
        vocab_size: every id is below it.
        dtype: of the ids in the file, uint8, uint16 or uint32.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: it cannot be read.
        ValueError: the file is truncated, damaged outside its tokens, or not a token file; the text says where it
            fails.
    """

    def __init__(self, path: str | os.PathLike, begin: int = 0, end: int | None = None) -> None:
        self.path = Path(path)
        self._contents = Contents(self.path)
        self._cut(begin, self._contents.count if end is None else end)

    def _cut(self, begin: int, end: int) -> None:
        count, bounds = self._contents.count, self._contents.bounds
        if not 0 <= begin < end <= count:
            raise ValueError(f"begin and end must mark tokens of {count}, got [{begin}, {end})")
        self.begin, self._count = begin, end - begin
        self.vocab_size, self.dtype = self._contents.vocab_size, self._contents.dtype
        inside = bounds[(bounds > begin) & (bounds < end)]
        self.bounds = np.concatenate([[begin], inside, [end]]) - begin

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"TokenFile({str(self.path)!r}, {self.begin}, {self.begin + len(self)})"

    def __reduce__(self):
        # Workers open the file themselves, because a descriptor is valid in one process only.
        return _reopen, (self.path, self.begin, self.begin + len(self), self._contents.fingerprint)

    @property
    def tokens(self) -> np.memmap:
        """Memory map (T,) of unsigned integers, without checksums; a truncated file ends the process."""
        return self._contents.mapped(self.begin, len(self))

    def part(self, begin: int, end: int) -> TokenFile:
        """The tokens [begin, end) of this file, for example all but the last tenth for training."""
        if not 0 <= begin < end <= len(self):
            raise ValueError(f"begin and end must mark tokens of {len(self)}, got [{begin}, {end})")
        part = object.__new__(TokenFile)
        part.path, part._contents = self.path, self._contents
        part._cut(self.begin + begin, self.begin + end)
        return part

    def read(self, begin: int, end: int) -> np.ndarray:
        """The tokens [begin, end), int64; begin and end as in a slice.

        Raises:
            OSError: the file cannot be read.
            ValueError: the tokens were changed, the file was truncated, or an id is outside the vocabulary.
        """
        begin, end, _ = slice(begin, end).indices(len(self))
        ids = self._contents.read(self.begin + begin, self.begin + max(begin, end)).astype(np.int64)
        if ids.size and ids.max() >= self.vocab_size:
            at = int(ids.argmax())
            raise ValueError(
                f"{self.path} holds id {ids[at]} at token {self.begin + begin + at}, outside its vocabulary of "
                f"{self.vocab_size}"
            )
        return ids

    def verify(self) -> None:
        """Compare all tokens with their checksums: a few seconds for a gigabyte.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is damaged (the text says where), or it has no checksums.
        """
        if self._contents.checksums is None:
            raise ValueError(f"{self.path} has no checksums: write it again with write_tokens")
        for begin in range(0, len(self), 1 << 20):
            self.read(begin, begin + (1 << 20))


def _reopen(path: Path, begin: int, end: int, fingerprint: tuple[int, int]) -> TokenFile:
    """Open the part of a file passed on by another process.

    Raises:
        ValueError: another file has replaced it.
    """
    text = TokenFile(path)
    if text._contents.fingerprint != fingerprint:
        raise ValueError(f"{path} was written again since it was opened: open it again")
    return text.part(begin, end)


class _Checksums:
    """Accumulator of CRC-32 checksums for each block of the added bytes."""

    def __init__(self) -> None:
        self._found: list[int] = []
        self._sum = self._size = 0

    def add(self, content: bytes) -> None:
        place = 0
        while place < len(content):
            piece = content[place : place + BLOCK - self._size]
            self._sum, self._size, place = zlib.crc32(piece, self._sum), self._size + len(piece), place + len(piece)
            if self._size == BLOCK:
                self._finish()

    def done(self) -> list[int]:
        if self._size:
            self._finish()
        return self._found

    def _finish(self) -> None:
        self._found.append(self._sum)
        self._sum = self._size = 0


def _header(dtype: np.dtype, count: int) -> bytes:
    # numpy pads headers, so the length does not depend on the count: 0 is written first, the true count at the end. The
    # version (2, 0) means that checksums follow.
    file = io.BytesIO()
    _format.write_array_header_2_0(file, {"descr": dtype.str, "fortran_order": False, "shape": (count,)})
    return file.getvalue()


def _check_document(index: int, document: np.ndarray, vocab_size: int) -> np.ndarray:
    ids = np.asarray(document)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(f"documents[{index}] must be 1-dimensional integers, got {ids.dtype} of shape {ids.shape}")
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        raise ValueError(
            f"documents[{index}] must hold ids in [0, {vocab_size}), got values from {ids.min()} to {ids.max()}"
        )
    return ids
