"""Batches for pre-training: batch k depends only on the text, the seed and k, so that resuming is exact."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import DataLoader, Dataset

from .._checks import as_python, shortened
from ..masks import HIGHEST, LOWEST, RankMask
from .objective import Example, Objective
from .tokens import TokenFile, Vocabulary


@dataclass(frozen=True, eq=False)
class Batch:
    """Training batch.

    Attributes:
        input_ids, token_type_ids: (B, L) int64.
        mask: RankMask of the segment itself, (B, L) ranks of queries and keys.
        labels: (B, N) int64, one per target, or (B, L), one per token; -100 where nothing is predicted.
        target_positions: (B, N) int64, or None for predictions by the content stream.
        is_next: (B,) int64, 1 where the second segment continues the first, 0 where it comes from elsewhere; -100
            where there is no second segment.
        context_len: (B,) int64, the number of tokens just before this segment that belong to the same context (the same
            document, in the same pass over the text). Memory beyond it must be hidden.
        reuse_len: number of first tokens of the segment kept as memory; the next segment continues after them.
        output_rows: (B, N) int64, rows where the content stream predicts; None for all rows or none.
    """

    input_ids: Tensor
    token_type_ids: Tensor
    mask: RankMask
    labels: Tensor
    target_positions: Tensor | None
    is_next: Tensor
    context_len: Tensor
    reuse_len: int
    output_rows: Tensor | None = None

    @property
    def new_context(self) -> Tensor:
        """(B,) bool, True where a new context begins, so that all memory is hidden."""
        return self.context_len == 0

    def inputs(self, mems: Sequence[Tensor] | None = None) -> dict:
        """Keyword arguments for an XLNetLMHeadModel; its output then has the loss, the mean over valid targets.

        Args:
            mems: memory from the previous batch's output, one (M, B, d_model) per layer, or None. Every row sees the
                part that belongs to its context.

        Raises:
            ValueError: `mems` have another batch size.
        """
        mask = self.mask
        if mems:
            if mems[0].dim() != 3 or mems[0].shape[1] != len(self.input_ids):
                raise ValueError(
                    f"mems must be (M, B = {len(self.input_ids)}, d_model) each, got shape {tuple(mems[0].shape)}"
                )
            mask = with_memory(mask, mems[0].shape[0], self.context_len)
        return {
            "input_ids": self.input_ids,
            "token_type_ids": self.token_type_ids,
            "mask": mask,
            "target_positions": self.target_positions,
            "output_rows": self.output_rows,
            "labels": self.labels,
            "mems": mems,
            "reuse_len": self.reuse_len,
        }

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """This batch on `device`."""
        return self._map(lambda values: values.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """This batch in page-locked memory, for a DataLoader with pin_memory=True."""
        return self._map(lambda values: values.pin_memory())

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        def mapped(value):
            if isinstance(value, RankMask):
                return RankMask(change(value.query_rank), change(value.key_rank))
            return change(value) if isinstance(value, Tensor) else value

        return Batch(*(mapped(getattr(self, field.name)) for field in fields(self)))


def with_memory(mask: RankMask, mem_len: int, context_len: Tensor) -> RankMask:
    """`mask` (L keys) with `mem_len` keys of memory in front; each row sees the last `context_len` (B,) of these.

    Raises:
        ValueError: the mask has a query_floor, because ranks of memory would have to fit it.

    >>> mask = with_memory(RankMask.full(2, 1), 3, torch.tensor([0, 2]))
    >>> mask.to_bool().int().tolist()
    [[[0, 0, 0, 1]], [[0, 1, 1, 1]]]
    """
    if mask.query_floor is not None:
        raise ValueError("mask has a query_floor: it must be made with memory, see RankMask.causal")
    mask = mask.expand(context_len.shape[0])
    age = torch.arange(mem_len, 0, -1, device=context_len.device)
    hidden = pad(age > context_len[:, None], (0, mask.key_rank.shape[1]))
    key_rank = pad(mask.key_rank, (mem_len, 0), value=LOWEST).masked_fill(hidden, HIGHEST)
    return RankMask(mask.query_rank, key_rank, sees_self=mask.sees_self)


class PretrainingBatches(Dataset):
    """Endless dataset of a text's batches k = 0, 1, 2, ..., for one of several processes.

    The text is cut into one stream for each row of all processes. Batch k + 1 continues the streams of batch k, so the
    memory of a batch is the context of the next. Exceptions are the end of a document and a new pass over the text (an
    epoch, which starts a little further on).

    With `pairs`, a sequence is `reuse_len` tokens of the stream, then [A, SEP, B, SEP, CLS]. A continues the stream; B
    continues A or, half of the time, comes from elsewhere in the text. A and B have random lengths and boundaries, also
    inside sentences. Streams advance by `reuse_len`, and only those tokens enter the memory. Without `pairs`, a
    sequence is `seq_len` tokens of the stream.

    Args:
        text: a TokenFile.
        vocabulary: its Vocabulary.
        objective: PermutationLM, AutoregressiveLM or MaskedLM.
        batch_size: B, rows of this process.
        seq_len: L.
        reuse_len: default half of seq_len; with `pairs` only.
        bi_data: the second half of the batch reads the streams of the first half backwards, from end to begin.
        seed: of all random choices.
        rank, world_size: index and number of processes; all have the same batch_size, seed and text.

    Attributes:
        steps_per_epoch: batches in one pass over the text.

    Raises:
        ValueError: the text is too short, the lengths do not fit together, or the objective does not fit them.

    >>> import tempfile
    >>> from xlnet_kernels.pretraining import PermutationLM, TokenFile, Vocabulary, write_tokens
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_tokens(f"{folder}/tokens", [np.arange(10, 90).repeat(5)], vocab_size=100)
    ...     vocabulary = Vocabulary(size=100, sep=4, cls=3, pad=5, mask=6)
    ...     batches = PretrainingBatches(TokenFile(f"{folder}/tokens"), vocabulary, PermutationLM(), 2, 24)
    ...     batch = batches[0]
    >>> batch.input_ids.shape, batch.target_positions.shape
    (torch.Size([2, 24]), torch.Size([2, 4]))
    """

    def __init__(
        self,
        text: TokenFile,
        vocabulary: Vocabulary,
        objective: Objective,
        batch_size: int,
        seq_len: int,
        reuse_len: int | None = None,
        *,
        pairs: bool = True,
        bi_data: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        batch_size, seq_len, seed = map(as_python, (batch_size, seq_len, seed))
        for name, value, least in (("batch_size", batch_size, 1), ("seq_len", seq_len, 1), ("seed", seed, 0)):
            if type(value) is not int or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {shortened(value)}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must lie in [0, world_size = {world_size}), got {rank}")
        if bi_data and batch_size % 2:
            raise ValueError(f"batch_size must be even with bi_data (half forward, half reversed), got {batch_size}")
        if text.vocab_size > vocabulary.size:
            raise ValueError(
                f"text has a vocabulary of {text.vocab_size} ids, more than the {vocabulary.size} of `vocabulary`"
            )
        self._parts: tuple[int, ...]
        if pairs:
            reuse_len = seq_len // 2 if reuse_len is None else reuse_len
            # SEP, SEP, CLS and at least one token each of A and B follow; an epoch advances by reuse_len.
            if not 1 <= reuse_len <= seq_len - 5:
                raise ValueError(
                    f"reuse_len must be in [1, seq_len - 5], so that [A, SEP, B, SEP, CLS] fits after it: seq_len is "
                    f"{seq_len}, reuse_len {reuse_len}"
                )
            self._parts, self._advance, self._need = (reuse_len, seq_len - reuse_len), reuse_len, seq_len - 3
        elif reuse_len is not None:
            raise ValueError(f"reuse_len is for pairs; without them streams advance by seq_len, got {reuse_len}")
        else:
            self._parts, self._advance, self._need = (seq_len,), seq_len, seq_len + 1  # with the token after the last
        objective.check(self._parts, 3 if pairs else 0)
        self.text, self.vocabulary, self.objective = text, vocabulary, objective
        self.batch_size, self.seq_len, self.seed = batch_size, seq_len, seed
        self._pairs, self._rows = pairs, batch_size // 2 if bi_data else batch_size
        self._first = rank * self._rows
        streams = world_size * self._rows
        self._stream_len = len(text) // streams
        # 3 * seq_len, because a B from elsewhere must fit beside an example.
        least = max(streams * self._need, 3 * seq_len if pairs else 0)
        if len(text) < least:
            raise ValueError(
                f"text is too short: {streams} streams of sequences of {seq_len} tokens need at least {least}, it has "
                f"{len(text)}"
            )
        self._spare = (self._stream_len - self._need) % self._advance
        self.steps_per_epoch = (self._stream_len - self._need) // self._advance + 1

    def __getitem__(self, index: int) -> Batch:
        if index < 0:
            raise IndexError(f"batches are numbered from 0, got {index}")
        epoch, step = divmod(int(index), self.steps_per_epoch)
        rows = [self._row(epoch, step, row) for row in range(self.batch_size)]
        examples, types, is_next, context_len = zip(*rows, strict=True)

        def stacked(name: str) -> Tensor:
            return torch.from_numpy(np.stack([getattr(example, name) for example in examples]))

        def stacked_or_none(name: str) -> Tensor | None:
            return None if getattr(examples[0], name) is None else stacked(name)

        return Batch(
            stacked("input_ids"),
            torch.from_numpy(np.stack(types)),
            RankMask(stacked("query_rank"), stacked("key_rank")),
            stacked("labels"),
            stacked_or_none("target_positions"),
            torch.tensor(is_next, device="cpu"),
            torch.tensor(context_len, device="cpu"),
            self._advance,
            stacked_or_none("output_rows"),
        )

    def _row(self, epoch: int, step: int, row: int) -> tuple[Example, np.ndarray, int, int]:
        """The example, its token types, is_next and the length of its earlier context."""
        reverse, stream = row >= self._rows, self._first + row % self._rows
        rng = np.random.default_rng([self.seed, epoch, step, stream, int(reverse)])
        start = step * self._advance
        if epoch:
            start += int(np.random.default_rng([self.seed, epoch]).integers(self._spare + 1))
        begin = stream * self._stream_len + start
        if reverse:
            begin = (stream + 1) * self._stream_len - start - self._need
        tokens = self._read(begin, self._need, reverse)
        context = 0
        if self.objective.uses_memory:
            context = min(self._document_before(begin, reverse), step * self._advance)
        next_id = None
        if self._pairs:
            ids, types, is_next = self._pair(tokens, begin, reverse, rng)
        else:
            ids, next_id = tokens[:-1], int(tokens[-1])
            types, is_next = np.zeros(len(ids), np.int64), -100
        example = self.objective.example(ids, self.vocabulary, self._parts, rng, next_id=next_id, reverse=reverse)
        return example, types, is_next, context

    def _pair(self, tokens: np.ndarray, begin: int, reverse: bool, rng) -> tuple[np.ndarray, np.ndarray, int]:
        """Tokens (reuse_len tokens, A, SEP, B, SEP, CLS), their token types, and whether B continues A."""
        reuse = self._parts[0]
        cut = int(rng.integers(reuse + 1, self._need))
        second, is_next = tokens[cut:], int(rng.random() < 0.5)
        if not is_next:
            # Any place without overlap with this example's own text.
            size, end = len(second), begin + self._need
            before, after = max(0, begin - size + 1), max(0, len(self.text) - end - size + 1)
            place = int(rng.integers(before + after))
            second = self._read(place if place < before else end + place - before, size, reverse)
        sep, cls = [self.vocabulary.sep], [self.vocabulary.cls]
        ids = np.concatenate([tokens[:cut], sep, second, sep, cls])
        types = np.repeat(np.arange(3), (cut + 1, len(second) + 1, 1))
        return ids, types, is_next

    def _read(self, begin: int, size: int, reverse: bool) -> np.ndarray:
        tokens = self.text.read(begin, begin + size)
        return tokens[::-1] if reverse else tokens

    def _document_before(self, begin: int, reverse: bool) -> int:
        """Number of tokens of the first token's document before it, in reading order."""
        bounds = self.text.bounds
        if reverse:
            last = begin + self._need - 1
            return int(bounds[np.searchsorted(bounds, last, side="right")]) - 1 - last
        return begin - int(bounds[np.searchsorted(bounds, begin, side="right") - 1])


def batch_loader(
    batches: PretrainingBatches, start: int = 0, stop: int | None = None, *, num_workers: int = 0, **options
) -> DataLoader:
    """DataLoader of batches start, start + 1, ... (stop - 1), the same for any number of workers.

    Training resumes exactly with `start` = the number of finished batches, given the memory of the last batch. Torch's
    global random numbers are not used. `options` go to the DataLoader (pin_memory, prefetch_factor, ...).
    """
    steps = range(start, sys.maxsize if stop is None else stop)
    options = {"generator": torch.Generator("cpu")} | options
    return DataLoader(batches, batch_size=None, sampler=steps, num_workers=num_workers, **options)
