"""Text from anywhere as a token file: Python's own manual, any file or folder, bytes or any `tokenizers` file."""

from __future__ import annotations

import hashlib
import math
import pydoc_data.topics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from xlnet_kernels.pretraining import ByteTokenizer, TokenFile, Vocabulary, write_tokens

LINES = 1024  # of text that are encoded at a time
# What tokenizers call the tokens a Vocabulary needs.
SPECIAL = {
    "sep": ("<sep>", "[SEP]", "</s>"),
    "cls": ("<cls>", "[CLS]", "<s>"),
    "pad": ("<pad>", "[PAD]"),
    "mask": ("<mask>", "[MASK]"),
}


@dataclass(frozen=True)
class Tokenizer:
    """`encode` from the bytes of a text to its ids, and what the ids mean."""

    encode: Callable[[bytes], np.ndarray]
    vocabulary: Vocabulary


@dataclass(frozen=True)
class Corpus:
    """The tokens of a text, what they mean, how many bytes they stand for, and a digest that tells texts apart."""

    text: TokenFile
    vocabulary: Vocabulary
    bytes: int
    sha256: str

    @property
    def facts(self) -> dict:
        return {"bytes": self.bytes, "tokens": len(self.text), "sha256": self.sha256}

    def split(self, held_out: float) -> tuple[TokenFile, TokenFile]:
        """All but the last share of the tokens, and these.

        Raises:
            ValueError: there is nothing left on one side.
        """
        end = len(self.text) - round(len(self.text) * held_out)
        if not 0 < end < len(self.text):
            raise ValueError(f"--held-out {held_out} leaves nothing on one side of {len(self.text)} tokens")
        return self.text.part(0, end), self.text.part(end, len(self.text))

    def describe(self, nats: float) -> str:
        """A loss per token, also as bits per byte of text, by which runs with other tokenizers can be compared."""
        bits = nats / math.log(2) * len(self.text) / self.bytes
        return f"{nats:.3f} nats per token, {bits:.3f} bits per byte"


def unigram_entropy(text: TokenFile) -> float:
    """Nats per token: the loss of the best model that knows how frequent tokens are, and nothing else."""
    counts = np.zeros(text.vocab_size, np.int64)
    for begin in range(0, len(text), 1 << 22):
        counts += np.bincount(text.read(begin, min(begin + (1 << 22), len(text))), minlength=len(counts))
    share = counts[counts > 0] / len(text)
    return float(-(share * np.log(share)).sum())


def prepare(path: Path, text: str | None, tokenizer: str | None, known: dict | None = None) -> Corpus:
    """The corpus of a text, its tokens written to `path`.

    Args:
        text: a file, a folder, or None for Python's manual.
        tokenizer: a tokenizer.json, or None for bytes.
        known: `facts` of the corpus that `path` already holds if it is there; written again if it is not.

    Raises:
        ValueError: there is no text, it is not what the tokenizer reads, or it is not the known one.
    """
    kind = load_tokenizer(tokenizer)
    size = known["bytes"] if known else 0
    if known is None or not path.exists():
        size = 0

        def encoded() -> Iterator[np.ndarray]:
            nonlocal size
            for name, document in read_documents(text):
                size += len(document)
                try:
                    yield kind.encode(document)
                except UnicodeDecodeError as error:
                    raise ValueError(f"--text: {name} is not UTF-8, which --tokenizer needs: {error}") from None
            if size == 0:
                raise ValueError(f"--text: {text} holds no text")

        path.parent.mkdir(parents=True, exist_ok=True)
        write_tokens(path, encoded(), kind.vocabulary.size)
    tokens = TokenFile(path)
    digest = hashlib.sha256(tokens.tokens).hexdigest()
    if known and digest != known["sha256"]:
        raise ValueError(f"--text: {text or 'the manual'} has changed since the checkpoint was written")
    return Corpus(tokens, kind.vocabulary, size, digest)


def read_documents(text: str | None) -> Iterator[tuple[str, bytes]]:
    """Names and contents: of the manual's topics, of a file, or of all files under a folder (but hidden ones).

    Raises:
        ValueError: there is nothing at `text`.
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


def load_tokenizer(path: str | None) -> Tokenizer:
    """The tokenizer of a tokenizer.json, or bytes. Special tokens that it lacks get ids after its own.

    Raises:
        ValueError: there is no such file, it is no tokenizer, or the package `tokenizers` is missing.
    """
    if path is None:
        return Tokenizer(ByteTokenizer().encode, ByteTokenizer.vocabulary)
    try:
        import tokenizers
    except ImportError:
        raise ValueError("--tokenizer needs tokenizers: pip install '.[bench]'") from None
    try:
        model = tokenizers.Tokenizer.from_str(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--tokenizer: cannot read {path}: {error.strerror}") from None
    except Exception as error:  # the package raises nothing more precise
        raise ValueError(f"--tokenizer: {path} is no tokenizer.json: {error}") from None
    model.no_truncation()
    model.no_padding()
    ids = model.get_vocab(with_added_tokens=True)
    size, special = max(ids.values(), default=-1) + 1, {}
    for role, names in SPECIAL.items():
        found = next((ids[name] for name in names if name in ids), None)
        if found is None:
            found, size = size, size + 1
        special[role] = found
    added = model.get_added_tokens_decoder()
    others = sorted({token for token, name in added.items() if name.special} - set(special.values()))

    def encode(data: bytes) -> np.ndarray:
        lines = iter(data.decode("utf-8").splitlines(keepends=True))
        blocks = iter(lambda: "".join(islice(lines, LINES)), "")
        found = [model.encode(block, add_special_tokens=False).ids for block in blocks]
        return np.array([token for block in found for token in block], np.int64)

    vocabulary = Vocabulary(size, **special, others=tuple(others), word_starts=_word_starts(ids, size))
    return Tokenizer(encode, vocabulary)


def _word_starts(ids: dict[str, int], size: int) -> np.ndarray | None:
    """Which ids begin a word, by the marks of SentencePiece, byte-level BPE or WordPiece; None where there are none."""
    for mark, begins in (("▁", True), ("Ġ", True), ("##", False)):
        marked = [token for name, token in ids.items() if name.startswith(mark)]
        if marked:
            starts = np.full(size, not begins)
            starts[marked] = begins
            return starts
    return None
