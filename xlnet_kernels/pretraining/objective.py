"""Training objectives: permutation LM, auto-regressive LM and masked LM on the same model and the same text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from .._checks import as_python, check_matrix, shortened
from ..masks import HIGHEST, RankMask
from .orders import block_order, permutation_ranks, share_targets, span_targets, split_parts
from .tokens import Vocabulary

IGNORED = -100  # label of a row without a target
_HIGHEST = np.int32(HIGHEST)


class Example(NamedTuple):
    """One row of a Batch, made by an objective, in numpy."""

    input_ids: np.ndarray
    query_rank: np.ndarray
    key_rank: np.ndarray
    labels: np.ndarray
    target_positions: np.ndarray | None = None
    output_rows: np.ndarray | None = None


@dataclass(frozen=True)
class PermutationLM:
    """Permutation LM: the query stream predicts span targets in a random order (Yang et al. 2019, section 2).

    Args:
        num_predict: targets per sequence; default a sixth of the length (85 of 512).
        perm_size: the order is random within blocks of this many positions; default, and largest effective value, the
            longest part.
        alpha, beta, max_gram: of the spans, see `orders.sample_spans`.
    """

    num_predict: int | None = None
    perm_size: int | None = None
    alpha: int = 6
    beta: int = 1
    max_gram: int = 5
    uses_memory = True

    def __post_init__(self) -> None:
        _check_counts(self, "num_predict", "perm_size", "alpha", "beta", "max_gram")

    def check(self, parts: Sequence[int], specials: int) -> None:
        """Raise ValueError where sequences of these parts, with that many special tokens, cannot hold the targets."""
        _num_predict(self, parts, specials)

    def example(self, ids: np.ndarray, vocabulary: Vocabulary, parts: Sequence[int], rng, **text) -> Example:
        functional = (ids == vocabulary.sep) | (ids == vocabulary.cls)
        targets = _partial_targets(self, ids, vocabulary, parts, rng, **text)
        perm_size = self.perm_size or max(parts)
        order = np.concatenate([block_order(rng, size, perm_size) for size in parts])
        padding = ids == vocabulary.pad
        query_rank, key_rank = permutation_ranks(order, targets, functional, parts, padding)
        positions, labels = _positions_and_labels(ids, targets, _num_predict(self, parts))
        return Example(ids, query_rank, key_rank, labels, target_positions=positions)

    def joint_inputs(self, input_ids: Tensor, targets: Tensor, vocabulary: Vocabulary) -> dict:
        steps = torch.arange(targets.shape[1], device=targets.device).expand_as(targets)
        order = torch.zeros_like(input_ids).scatter(1, targets, steps)
        predicted = torch.zeros_like(input_ids, dtype=torch.bool).scatter(1, targets, True)
        mask = RankMask.from_order(order, predicted)
        return {"input_ids": input_ids, "mask": mask, "target_positions": targets}


@dataclass(frozen=True)
class AutoregressiveLM:
    """Auto-regressive LM: the content stream predicts every next token from earlier tokens, except special tokens.

    Args:
        backward: predict every token from later tokens instead. Memory is then hidden, because it lies before the text.
    """

    backward: bool = False

    @property
    def uses_memory(self) -> bool:
        return not self.backward

    def check(self, parts: Sequence[int], specials: int) -> None:
        if sum(parts) < 2:
            raise ValueError(f"seq_len must be at least 2 to predict one token from another, got {sum(parts)}")

    def example(
        self, ids: np.ndarray, vocabulary: Vocabulary, parts: Sequence[int], rng, *, next_id: int | None = None, **text
    ) -> Example:
        rank = np.arange(len(ids), dtype=np.int32)
        if self.backward:
            rank, labels = rank[::-1], np.concatenate([[IGNORED], ids[:-1]])
        else:
            labels = np.concatenate([ids[1:], [IGNORED if next_id is None else next_id]])
        special = (labels >= 0) & vocabulary.special[labels.clip(0)]
        key_rank = np.where(ids == vocabulary.pad, _HIGHEST, rank)
        return Example(ids, rank, key_rank, np.where(special, IGNORED, labels))

    def joint_inputs(self, input_ids: Tensor, targets: Tensor, vocabulary: Vocabulary) -> dict:
        batch, length = input_ids.shape
        rows = targets + 1 if self.backward else targets - 1
        if rows.numel() and not (0 <= rows.min() and rows.max() < length):
            side = "after" if self.backward else "before"
            raise ValueError(f"targets must have a token {side} them to be predicted from, got {targets.tolist()}")
        mask = RankMask.causal(batch, length, device=input_ids.device)
        if self.backward:
            mask = RankMask(mask.query_rank.flip(1), mask.key_rank.flip(1))
        return {"input_ids": input_ids, "mask": mask, "output_rows": rows}


@dataclass(frozen=True)
class MaskedLM:
    """Masked LM (BERT): predict the targets of PermutationLM, independently, from an input where they are masked.

    A share `mask_rate` of the targets becomes MASK, `random_rate` a random token of text; the others stay. As with
    PermutationLM, the text that enters the memory does not see later text, because the next sequence would see its own
    targets through the memory.

    Args:
        num_predict, alpha, beta, max_gram: as in PermutationLM; with one seed both have equally many targets of the
            same kind.
    """

    num_predict: int | None = None
    alpha: int = 6
    beta: int = 1
    max_gram: int = 5
    mask_rate: float = 0.8
    random_rate: float = 0.1
    uses_memory = True

    def __post_init__(self) -> None:
        _check_counts(self, "num_predict", "alpha", "beta", "max_gram")
        if not (0 <= self.mask_rate and 0 <= self.random_rate and self.mask_rate + self.random_rate <= 1):
            raise ValueError(
                f"mask_rate and random_rate must be shares of at most 1 together, got {self.mask_rate} and "
                f"{self.random_rate}"
            )

    def check(self, parts: Sequence[int], specials: int) -> None:
        """Raise ValueError where sequences of these parts, with that many special tokens, cannot hold the targets."""
        _num_predict(self, parts, specials)

    def example(self, ids: np.ndarray, vocabulary: Vocabulary, parts: Sequence[int], rng, **text) -> Example:
        targets = _partial_targets(self, ids, vocabulary, parts, rng, **text)
        kind = rng.random(len(ids))
        random = vocabulary.ordinary[rng.integers(len(vocabulary.ordinary), size=len(ids))]
        hidden = np.where(kind < self.mask_rate + self.random_rate, random, ids)
        hidden = np.where(kind < self.mask_rate, vocabulary.mask, hidden)
        part = np.repeat(np.arange(len(parts), dtype=np.int32), parts)
        key_rank = np.where(ids == vocabulary.pad, _HIGHEST, part)
        positions, labels = _positions_and_labels(ids, targets, _num_predict(self, parts))
        return Example(np.where(targets, hidden, ids), part + 1, key_rank, labels, output_rows=positions)

    def joint_inputs(self, input_ids: Tensor, targets: Tensor, vocabulary: Vocabulary) -> dict:
        mask = RankMask.full(input_ids.shape[0], input_ids.shape[1], device=input_ids.device)
        hidden = input_ids.scatter(1, targets, vocabulary.mask)
        return {"input_ids": hidden, "mask": mask, "output_rows": targets}


Objective = PermutationLM | AutoregressiveLM | MaskedLM


def joint_log_prob(
    model: nn.Module,
    objective: Objective,
    vocabulary: Vocabulary,
    input_ids: Tensor,
    targets: Tensor,
    token_type_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of the tokens at `targets` given the others, in the objective's factorisation, in one pass.

    With the targets New, York of "New York is a city" (Yang et al. 2019, section 2.6) it is

    - PermutationLM: log p(New | is a city) + log p(York | New, is a city); the targets' order is the factorisation's;
    - MaskedLM: log p(New | is a city) + log p(York | is a city);
    - AutoregressiveLM: log p(New) + log p(York | New), given only the earlier tokens (later, if backward).

    Args:
        model: an XLNetLMHeadModel, in eval mode for numbers without dropout.
        input_ids: (B, L) integers with the true tokens everywhere.
        targets: (B, N) integers, their positions.
        token_type_ids: (B, L) or None.

    Returns:
        The log-probabilities (B, N), float32 at least, and their sums (B,).

    Raises:
        ValueError: targets lie outside the sequence, are repeated, or have no context (the first position of an
            auto-regressive LM).

    >>> from xlnet_kernels import XLNetConfig, XLNetLMHeadModel
    >>> vocabulary = Vocabulary(size=100, sep=4, cls=3, pad=5, mask=6)
    >>> lm = XLNetLMHeadModel(XLNetConfig(vocab_size=100, d_model=32, n_layer=2, n_head=4, d_inner=64)).eval()
    >>> ids, new_york = torch.tensor([[9, 20, 21, 22, 23, 24]]), torch.tensor([[1, 2]])
    >>> for objective in (PermutationLM(), MaskedLM(), AutoregressiveLM()):
    ...     log_probs, total = joint_log_prob(lm, objective, vocabulary, ids, new_york)
    >>> log_probs.shape, total.shape
    (torch.Size([1, 2]), torch.Size([1]))
    """
    for name, values in (("input_ids", input_ids), ("targets", targets)):
        check_matrix(name, values)
        if values.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} must hold int32 or int64, got {values.dtype}")
    batch, length = input_ids.shape
    if targets.shape[0] != batch or not targets.shape[1]:
        raise ValueError(f"targets must have shape ({batch}, at least 1), got {tuple(targets.shape)}")
    if not (0 <= targets.min() and targets.max() < length):
        raise ValueError(f"targets must lie in [0, {length}), got values from {targets.min()} to {targets.max()}")
    ordered = targets.sort(1).values
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        raise ValueError(f"targets must differ within a sequence, got {targets.tolist()}")
    input_ids, targets = input_ids.long(), targets.long()
    inputs = objective.joint_inputs(input_ids, targets, vocabulary)
    logits = model(**inputs, token_type_ids=token_type_ids).logits
    log_probs = torch.log_softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))
    log_probs = log_probs.gather(2, input_ids.gather(1, targets)[:, :, None]).squeeze(2)
    return log_probs, log_probs.sum(1)


def _partial_targets(
    objective: PermutationLM | MaskedLM,
    ids: np.ndarray,
    vocabulary: Vocabulary,
    parts: Sequence[int],
    rng: np.random.Generator,
    *,
    reverse: bool = False,
    next_id: int | None = None,
) -> np.ndarray:
    """Span targets (L,) bool in each part, `num_predict` in all if there are enough ordinary tokens."""
    ordinary = ~vocabulary.special[ids]
    starts = ordinary if vocabulary.word_starts is None else vocabulary.word_starts[ids]
    flip = slice(None, None, -1 if reverse else 1)  # word boundaries are those of the original text
    shares = share_targets(_num_predict(objective, parts), ordinary, parts)
    found = []
    for share, candidates, begins in zip(shares, split_parts(ordinary, parts), split_parts(starts, parts), strict=True):
        targets = span_targets(
            rng,
            candidates[flip],
            share,
            alpha=objective.alpha,
            beta=objective.beta,
            max_gram=objective.max_gram,
            starts=None if vocabulary.word_starts is None else begins[flip],
        )
        found.append(targets[flip])
    return np.concatenate(found)


def _positions_and_labels(ids: np.ndarray, targets: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions and tokens of targets (L,) bool, padded to `count` with position 0 without a label."""
    positions = np.zeros(count, np.int64)
    labels = np.full_like(positions, IGNORED)
    found = np.flatnonzero(targets)
    positions[: len(found)], labels[: len(found)] = found, ids[found]
    return positions, labels


def _num_predict(objective: PermutationLM | MaskedLM, parts: Sequence[int], specials: int = 0) -> int:
    """Number of targets of sequences with these parts; at least one token of text stays as context."""
    length = sum(parts)
    count = max(1, length // 6) if objective.num_predict is None else objective.num_predict
    if count >= length - specials:
        raise ValueError(
            f"num_predict must leave context: with seq_len {length} and {specials} special tokens it must be below "
            f"{length - specials}, got {count}"
        )
    return count


def _check_counts(objective: object, *names: str) -> None:
    for name in names:
        value = as_python(getattr(objective, name))
        # Because the objectives are frozen.
        object.__setattr__(objective, name, value)
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{name} must be a positive integer, got {shortened(value)}")
