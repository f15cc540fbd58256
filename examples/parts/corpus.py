"""Token files of any text: Python's own manual, a file or a folder."""

from __future__ import annotations

import hashlib
import math
import pydoc_data.topics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from parts.tokenizer import TextTokenizer
from xlnet_kernels.pretraining import TokenFile, Vocabulary, write_tokens


@dataclass(frozen=True)
class Corpus:
    """Tokens of a text, with their tokenizer, the number of bytes they stand for, and a digest of the text."""

    text: TokenFile
    tokenizer: TextTokenizer
    bytes: int
    sha256: str

    @property
    def vocabulary(self) -> Vocabulary:
        return self.tokenizer.vocabulary

    @property
    def facts(self) -> dict:
        return {"bytes": self.bytes, "tokens": len(self.text), "sha256": self.sha256}

    def split(self, held_out: float) -> tuple[TokenFile, TokenFile]:
        """Split off the last share of the tokens.

        Raises:
            ValueError: one side is empty.
        """
        end = len(self.text) - round(len(self.text) * held_out)
        if not 0 < end < len(self.text):
            raise ValueError(f"--held-out {held_out} leaves nothing on one side of {len(self.text)} tokens")
        return self.text.part(0, end), self.text.part(end, len(self.text))

    def describe(self, nats: float) -> str:
        """Text of a loss per token, also in bits per byte, to compare runs with different tokenizers."""
        bits = nats / math.log(2) * len(self.text) / self.bytes
        return f"{nats:.3f} nats per token, {bits:.3f} bits per byte"


@lru_cache(maxsize=8)
def unigram_entropy(text: TokenFile) -> float:
    """Nats per token of the best model that depends on token frequencies only."""
    counts = np.zeros(text.vocab_size, np.int64)
    for begin in range(0, len(text), 1 << 22):
        counts += np.bincount(text.read(begin, min(begin + (1 << 22), len(text))), minlength=len(counts))
    share = counts[counts > 0] / len(text)
    return float(-(share * np.log(share)).sum())


def prepare(path: Path, text: str | None, tokenizer: TextTokenizer, known: dict | None = None) -> Corpus:
    """The corpus of a text, its tokens written to `path`.

    Args:
        text: a file, a folder, or None for Python's manual.
        known: `facts` of the corpus in `path`, if it exists; written again if not.

    Raises:
        ValueError: there is no text, the tokenizer cannot read it, or it is not the known text.
    """
    size = known["bytes"] if known else 0
    if known is None or not path.exists():
        size = 0

        def encoded() -> Iterator[np.ndarray]:
            nonlocal size
            for name, document in read_documents(text):
                size += len(document)
                try:
                    yield tokenizer.encode(document)
                except UnicodeDecodeError as error:
                    raise ValueError(f"--text: {name} is not UTF-8, which --tokenizer needs: {error}") from None
            if size == 0:
                raise ValueError(f"--text: {text} holds no text")

        path.parent.mkdir(parents=True, exist_ok=True)
        write_tokens(path, encoded(), tokenizer.vocabulary.size)
    tokens = TokenFile(path)
    sha256 = hashlib.sha256()
    for begin in range(0, len(tokens), 1 << 20):
        sha256.update(tokens.read(begin, begin + (1 << 20)).astype(tokens.dtype))
    digest = sha256.hexdigest()
    if known and digest != known["sha256"]:
        raise ValueError(f"--text: {text or 'the manual'} has changed since the checkpoint was written")
    return Corpus(tokens, tokenizer, size, digest)


def read_documents(text: str | None) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the manual's topics, of a file, or of all files under a folder (except hidden files).

    Raises:
        ValueError: `text` does not exist.
    """
    if text is None:
        yield from ((name, topic.encode()) for name, topic in sorted(pydoc_data.topics.topics.items()))
        return
    root = Path(text)
    if root.is_file():
        paths = [root]
    elif root.is_dir():
        files = (path for path in root.rglob("*") if path.is_file())
        paths = sorted(path for path in files if not any(n.startswith(".") for n in path.relative_to(root).parts))
    else:
        raise ValueError(f"--text: there is no file or folder {text}")
    yield from ((str(path), path.read_bytes()) for path in paths)
