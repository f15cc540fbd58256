"""Tokenizer folders for `AutoTokenizer`: bytes, or any file or folder of the tokenizers library."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads conflict with processes of a DataLoader

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from xlnet_kernels.pretraining import ByteTokenizer, Vocabulary

LINES = 1024  # of text encoded at a time
# Special tokens of a Vocabulary, and their names in tokenizers; the first name is used for added tokens.
SPECIAL = {
    "sep": ("<sep>", "[SEP]", "</s>"),
    "cls": ("<cls>", "[CLS]", "<s>"),
    "pad": ("<pad>", "[PAD]"),
    "mask": ("<mask>", "[MASK]"),
}
# Special tokens of the public XLNet, ids 0 to 8.
XLNET = ("<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>")
KINDS = ("bpe", "unigram", "bytes")


@dataclass(frozen=True)
class TextTokenizer:
    """Tokenizer of text to ids and back, with the meaning of the ids.

    Attributes:
        fast: transformers' tokenizer, which adds SEP, CLS and token types as in pre-training, and pads on the left.
        is_bytes: whether an id below 256 is that byte; then any data can be encoded, UTF-8 or not.
    """

    fast: PreTrainedTokenizerFast
    vocabulary: Vocabulary
    is_bytes: bool

    def encode(self, data: bytes) -> np.ndarray:
        """The ids (length,) int64 of a text, without special tokens.

        Raises:
            UnicodeDecodeError: the text is not UTF-8, and the tokenizer is not bytes.
        """
        if self.is_bytes:
            return ByteTokenizer().encode(data)
        lines = iter(data.decode("utf-8").splitlines(keepends=True))
        blocks = iter(lambda: "".join(islice(lines, LINES)), "")
        found = [self.fast.backend_tokenizer.encode(block, add_special_tokens=False).ids for block in blocks]
        return np.array([token for block in found for token in block], np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, special tokens left out."""
        return self.fast.decode([int(token) for token in ids], skip_special_tokens=True)

    def config(self) -> dict[str, int | None]:
        """Entries of config.json with special tokens; None for tokens that the tokenizer lacks."""
        roles = ("bos", "eos", "pad", "sep", "cls", "mask")
        return {f"{role}_token_id": getattr(self.fast, f"{role}_token_id") for role in roles}

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json."""
        self.fast.save_pretrained(folder)


def load_tokenizer(path: str | Path | None) -> TextTokenizer:
    """The tokenizer of a folder for `AutoTokenizer`, of a tokenizer.json, or bytes; missing special tokens get new ids.

    Raises:
        ValueError: there is no tokenizer at `path`.
    """
    if path is None:
        return wrap(bytes_tokenizer())
    path = Path(path)
    if path.is_dir():
        try:
            fast = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        # Every exception, because the library raises many kinds.
        except Exception as error:
            raise ValueError(f"--tokenizer: {path} holds no tokenizer that AutoTokenizer loads: {error}") from None
        roles = {role: getattr(fast, f"{role}_token") for role in ("unk", "bos", "eos", *SPECIAL)}
        return wrap(fast.backend_tokenizer, **roles)
    try:
        model = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--tokenizer: cannot read {path}: {error.strerror}") from None
    # Every exception, because the package raises nothing more precise.
    except Exception as error:
        raise ValueError(f"--tokenizer: {path} is no tokenizer.json: {error}") from None
    ids = model.get_vocab()
    named = {"unk": ("<unk>", "[UNK]"), "bos": ("<s>",), "eos": ("</s>",)} | SPECIAL
    return wrap(model, **{role: next((n for n in names if n in ids), None) for role, names in named.items()})


def wrap(model: Tokenizer, **roles: str | None) -> TextTokenizer:
    """A tokenizers.Tokenizer completed with XLNet's special tokens, token types and padding."""
    model.no_truncation()
    model.no_padding()
    names = {role: roles.get(role) or SPECIAL[role][0] for role in SPECIAL}
    model.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names.values()])
    sep, cls = names["sep"], names["cls"]
    model.post_processor = processors.TemplateProcessing(
        single=f"$A:0 {sep}:0 {cls}:2",
        pair=f"$A:0 {sep}:0 $B:1 {sep}:1 {cls}:2",
        special_tokens=[(name, model.token_to_id(name)) for name in (sep, cls)],
    )
    others = {role: roles[role] for role in ("unk", "bos", "eos") if roles.get(role)}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=model,
        padding_side="left",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **{f"{role}_token": name for role, name in (names | others).items()},
    )
    ids = model.get_vocab()
    size, used = max(ids.values()) + 1, {role: ids[name] for role, name in names.items()}
    added = model.get_added_tokens_decoder()
    rest = {token for token, name in added.items() if name.special} | {ids[name] for name in others.values()}
    is_bytes, rest = _is_bytes(model), rest - set(used.values())
    starts = None if is_bytes else _word_starts(ids, size)
    return TextTokenizer(fast, Vocabulary(size, **used, others=tuple(sorted(rest)), word_starts=starts), is_bytes)


def bytes_tokenizer() -> Tokenizer:
    """`ByteTokenizer` as a byte-level BPE without merges: id b is byte b."""
    model = Tokenizer(models.BPE(vocab=_byte_names(), merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    return model


def train_tokenizer(kind: str, texts: Iterator[str], vocab_size: int, show_progress: bool = True) -> TextTokenizer:
    """A new tokenizer of a text.

    Args:
        kind: "bpe" (byte-level, keeps every character), "unigram" (as in XLNet: quotes unified, white space collapsed,
            NFKC; unknown characters become <unk>), or "bytes" (needs no training).
        vocab_size: largest number of ids, special tokens included.

    Raises:
        ValueError: vocab_size is below the kind's initial number of ids.
    """
    if kind == "bytes":
        return load_tokenizer(None)
    trainer: Any
    options = dict(vocab_size=vocab_size, special_tokens=list(XLNET), show_progress=show_progress)
    if kind == "bpe":
        least = len(XLNET) + 256
        if vocab_size < least:
            raise ValueError(f"--vocab-size must be at least {least} for bpe: 256 bytes and special tokens")
        model = Tokenizer(models.BPE())
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **options)
    else:
        model = Tokenizer(models.Unigram())
        quotes = [normalizers.Replace(two, '"') for two in ("``", "''")]
        space = [normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
        model.normalizer = normalizers.Sequence([*quotes, normalizers.NFKC(), *space])
        model.pre_tokenizer = pre_tokenizers.Metaspace()
        model.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(unk_token="<unk>", **options)
    model.train_from_iterator(texts, trainer)
    names = {role: f"<{role}>" for role in ("unk", *SPECIAL)}
    return wrap(model, bos="<s>", eos="</s>", **names)


def _byte_names() -> dict[str, int]:
    """Characters for bytes in byte-level tokenizers: printable Latin-1 for itself, others from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in sorted(printable)} | {chr(256 + i): byte for i, byte in enumerate(rest)}


def _is_bytes(model: Tokenizer) -> bool:
    if not isinstance(model.model, models.BPE):
        return False
    content = json.loads(model.to_str())["model"]
    return not content["merges"] and content["vocab"] == _byte_names()


def _word_starts(ids: dict[str, int], size: int) -> np.ndarray | None:
    """Mask of ids that begin a word, by the marks of SentencePiece, byte-level BPE or WordPiece; None without marks."""
    for mark, begins in (("▁", True), ("Ġ", True), ("##", False)):
        marked = [token for name, token in ids.items() if name.startswith(mark)]
        if marked:
            starts = np.full(size, not begins)
            starts[marked] = begins
            return starts
    return None
