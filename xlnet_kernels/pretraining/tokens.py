"""Token files: the tokens of many documents in one file that is read through a memory map, and what the ids mean."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

_format = np.lib.format
_DTYPES = {np.dtype(kind).str: np.dtype(kind) for kind in ("|u1", "<u2", "<u4")}


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The size of a vocabulary and its tokens that are not text.

    Args:
        size: number of ids.
        sep, cls, pad, mask: ids of SEP, CLS, padding and the masked LM's MASK; all different.
        others: further ids that are never predicted (end of document, unknown, ...).
        word_starts: (size,) bool, which tokens begin a word; spans of targets then begin there, as in the published
            models. None: they begin anywhere.

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
    """Text as its UTF-8 bytes: 256 ids, then SEP, CLS, PAD and MASK. No file, no training, no unknown text.

    Any other tokeniser serves as well: what is needed is an `encode` from text to ids and a Vocabulary.

    >>> ByteTokenizer().decode(ByteTokenizer().encode("New York"))
    'New York'
    """

    vocabulary = Vocabulary(size=260, sep=256, cls=257, pad=258, mask=259)

    def encode(self, text: str | bytes) -> np.ndarray:
        """(length,) int64."""
        data = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
        return np.frombuffer(data, np.uint8).astype(np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; special ones are left out, broken characters replaced."""
        return bytes(int(token) for token in ids if token < 256).decode("utf-8", "replace")


def write_tokens(path: str | os.PathLike, documents: Iterable[np.ndarray], vocab_size: int) -> None:
    """Writes a token file; `path` holds either all of it or what it held before.

    The file is an .npy array of the tokens in the smallest of uint8, uint16 and uint32 (so that
    ``np.load(path, mmap_mode="r")`` reads them), followed by an .npy array with the begin of each document and the end
    of the last, and one with the vocabulary size. Documents are written as they come; empty ones are left out.

    Args:
        documents: each a 1-dimensional array or list of ids.

    Raises:
        ValueError: a document holds something else than ids of the vocabulary, or there are no tokens at all.
    """
    path = Path(path)
    if not 0 < vocab_size <= 2**32:
        raise ValueError(f"vocab_size must be in [1, 2^32], got {vocab_size}")
    dtype = next(kind for kind in _DTYPES.values() if vocab_size - 1 <= np.iinfo(kind).max)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            _write_header(file, dtype, 0)
            bounds = [0]
            for index, document in enumerate(documents):
                ids = _check_document(index, document, vocab_size)
                if ids.size:
                    file.write(ids.astype(dtype).tobytes())
                    bounds.append(bounds[-1] + ids.size)
            if bounds[-1] == 0:
                raise ValueError("documents must hold at least one token")
            _format.write_array(file, np.array(bounds, np.int64), version=(1, 0))
            _format.write_array(file, np.array(vocab_size, np.int64), version=(1, 0))
            file.seek(0)
            _write_header(file, dtype, bounds[-1])
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


class TokenFile:
    """The tokens of a file that `write_tokens` made, or a part of them, read through a memory map.

    Attributes:
        tokens: (T,) memory-mapped unsigned integers.
        bounds: (documents + 1,) int64, the begin of each document and the end of the last.
        vocab_size: every id is below it.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is truncated, or is something else; the text says where it fails.
    """

    def __init__(self, path: str | os.PathLike, begin: int = 0, end: int | None = None) -> None:
        self.path = Path(path)
        with open(self.path, "rb") as file:
            tokens, bounds, self.vocab_size = _read(file, self.path)
        end = len(tokens) if end is None else end
        if not 0 <= begin < end <= len(tokens):
            raise ValueError(f"begin and end must mark tokens of {len(tokens)}, got [{begin}, {end})")
        self.begin, self.tokens = begin, tokens[begin:end]
        inside = bounds[(bounds > begin) & (bounds < end)]
        self.bounds = np.concatenate([[begin], inside, [end]]) - begin

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        return f"TokenFile({str(self.path)!r}, {self.begin}, {self.begin + len(self)})"

    def __reduce__(self):
        # A pickled memory map would be a copy of all tokens: workers open the file themselves.
        return TokenFile, (self.path, self.begin, self.begin + len(self))

    def part(self, begin: int, end: int) -> TokenFile:
        """The tokens [begin, end) of this, for example all but the last tenth for training."""
        if not 0 <= begin < end <= len(self):
            raise ValueError(f"begin and end must mark tokens of {len(self)}, got [{begin}, {end})")
        return TokenFile(self.path, self.begin + begin, self.begin + end)

    def read(self, begin: int, end: int) -> np.ndarray:
        """(end - begin,) int64, the tokens there.

        Raises:
            ValueError: an id is outside the vocabulary (the file was changed).
        """
        ids = np.asarray(self.tokens[begin:end]).astype(np.int64)
        if ids.size and ids.max() >= self.vocab_size:
            at = int(ids.argmax())
            raise ValueError(
                f"{self.path} holds id {ids[at]} at token {self.begin + begin + at}, outside its vocabulary of "
                f"{self.vocab_size}"
            )
        return ids


def _write_header(file, dtype: np.dtype, count: int) -> None:
    # numpy pads headers, so that one with another count is as long: 0 is written first, the true count at the end.
    _format.write_array_header_1_0(file, {"descr": dtype.str, "fortran_order": False, "shape": (count,)})


def _check_document(index: int, document: np.ndarray, vocab_size: int) -> np.ndarray:
    ids = np.asarray(document)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(f"documents[{index}] must be 1-dimensional integers, got {ids.dtype} of shape {ids.shape}")
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        raise ValueError(
            f"documents[{index}] must hold ids in [0, {vocab_size}), got values from {ids.min()} to {ids.max()}"
        )
    return ids


def _read(file, path: Path) -> tuple[np.memmap, np.ndarray, int]:
    """The tokens, bounds and vocabulary size of an open file."""

    def refuse(reason: str) -> ValueError:
        return ValueError(f"{path} is no token file of write_tokens: {reason}")

    try:
        version = _format.read_magic(file)
        if version != (1, 0):
            raise refuse(f"its .npy version is {version}, not (1, 0)")
        shape, _, dtype = _format.read_array_header_1_0(file)
    except ValueError as error:
        if "no token file" in str(error):
            raise
        raise refuse(f"it does not begin with an .npy header ({error})") from None
    if len(shape) != 1 or dtype.str not in _DTYPES:
        raise refuse(f"it begins with {dtype} of shape {shape}, not with a vector of uint8, uint16 or uint32")
    begin, size = file.tell(), os.fstat(file.fileno()).st_size
    end = begin + shape[0] * dtype.itemsize
    if size < end:
        raise ValueError(f"{path} is truncated: {shape[0]} tokens need {end} bytes, the file has {size}")
    if shape[0] == 0:
        raise refuse("it has no tokens; its writer was interrupted")
    file.seek(end)
    try:
        bounds = _format.read_array(file, allow_pickle=False)
        vocab_size = _format.read_array(file, allow_pickle=False)
    except ValueError as error:
        raise ValueError(
            f"{path} is truncated or no token file of write_tokens: after {shape[0]} tokens it has no whole document "
            f"bounds and vocabulary size ({error})"
        ) from None
    if file.read(1):
        raise refuse("bytes follow after its vocabulary size")
    whole = bounds.dtype == np.int64 and bounds.ndim == 1 and len(bounds) > 1
    if not whole or bounds[0] != 0 or bounds[-1] != shape[0] or (np.diff(bounds) <= 0).any():
        raise refuse(f"its document bounds do not rise from 0 to its {shape[0]} tokens")
    if vocab_size.dtype != np.int64 or vocab_size.shape != () or vocab_size < 1:
        raise refuse("its vocabulary size is no positive integer")
    return np.memmap(file, dtype, "r", begin, shape), bounds, int(vocab_size)
