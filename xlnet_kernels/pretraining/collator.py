"""Collator for transformers' Trainer or any DataLoader: turns rows of tokens into a language model's arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._checks import shortened
from ..masks import HIGHEST, RankMask
from .objective import IGNORED, AutoregressiveLM, Example, Objective, PermutationLM
from .tokens import Vocabulary


@dataclass(frozen=True)
class DataCollatorForPermutationLM:
    """Collator of token rows for the permutation LM (or another objective), with new targets and orders in each call.

    Random choices use torch's generator, so `TrainingArguments(seed=...)` controls them. Rows are padded on the left,
    with token type 3; padding is hidden from all rows and never a target. The number of targets depends on a row's own
    length; missing targets have labels of -100 at the end, and with `dense` zeros in `target_mapping`.

    transformers' DataCollatorForPermutationLanguageModeling does not train a permutation LM:

    - MASK replaces the targets in the input, so no target sees another target's token and the order has no effect;
    - SEP and CLS are visible to all rows although they see targets;
    - there is no attention_mask, so padding is visible as text;
    - spans have uniform lengths and arbitrary beginnings, and their number varies;
    - both halves of a sequence have the same order, and lengths must be even;
    - the query stream has one row for each token, not for each target.

    Args:
        vocabulary: its Vocabulary.
        objective: PermutationLM, AutoregressiveLM or MaskedLM.
        dense: False: `mask` (RankMask) and `target_positions`, for this package's models. True: `perm_mask` (B, L, L),
            `target_mapping` (B, N, L) and `attention_mask` (B, L), for transformers' and accelerated models.

    Calling it with rows (lists or 1-dimensional integer tensors), or dictionaries with `input_ids` and, if need be,
    `token_type_ids`, gives keyword arguments of a model: input_ids and token_type_ids (B, L), the masks of `dense`, and
    labels (B, N), or (B, L) with AutoregressiveLM; -100 is ignored. MaskedLM adds output_rows (B, N).

    Raises:
        ValueError: there is no row; a row is empty, too short for a target and context, or has other values than ids of
            the vocabulary; or `dense` is given with another objective than PermutationLM.

    >>> vocabulary = Vocabulary(size=100, sep=4, cls=3, pad=5, mask=6)
    >>> batch = DataCollatorForPermutationLM(vocabulary)([list(range(10, 34)), list(range(40, 52))])
    >>> batch["input_ids"].shape, batch["target_positions"].shape, batch["labels"].shape
    (torch.Size([2, 24]), torch.Size([2, 4]), torch.Size([2, 4]))
    """

    vocabulary: Vocabulary
    objective: Objective = PermutationLM()
    dense: bool = False

    def __post_init__(self) -> None:
        if self.dense and not isinstance(self.objective, PermutationLM):
            raise ValueError(f"dense is for PermutationLM, got {type(self.objective).__name__}")

    def __call__(self, features: Sequence[Any]) -> dict[str, Any]:
        rows = [self._row(index, feature) for index, feature in enumerate(features)]
        if not rows:
            raise ValueError("features must hold at least one row, got none")
        length = max(len(ids) for ids, _ in rows)
        types = np.stack([np.pad(x, (length - len(x), 0), constant_values=3) for _, x in rows])
        partial = not isinstance(self.objective, AutoregressiveLM)
        for index, (ids, _) in enumerate(rows):
            if len(ids) < 2 and (partial or length < 2):
                raise ValueError(
                    f"features[{index}] has one token: {type(self.objective).__name__} predicts a token from others, "
                    f"which needs a row of at least 2"
                )
        self.objective.check((length,), 0)
        rng = np.random.default_rng(int(torch.randint(2**62, (), device="cpu")))
        found = [self._objective_of(len(row)).example(row, self.vocabulary, (len(row),), rng) for row, _ in rows]
        count = max(len(example.labels) for example in found) if partial else length
        examples = [self._padded(example, length, count) for example in found]

        def stacked(name: str) -> Tensor:
            return torch.from_numpy(np.stack([getattr(example, name) for example in examples]))

        mask = RankMask(stacked("query_rank"), stacked("key_rank"))
        batch = {
            "input_ids": stacked("input_ids"),
            "token_type_ids": torch.from_numpy(types),
            "labels": stacked("labels"),
        }
        if examples[0].target_positions is None:
            if examples[0].output_rows is not None:
                batch["output_rows"] = stacked("output_rows")
            return batch | {"mask": mask}
        positions = stacked("target_positions")
        if not self.dense:
            return batch | {"mask": mask, "target_positions": positions}
        mapping = torch.nn.functional.one_hot(positions, length).float()
        mapping[batch["labels"] == IGNORED] = 0
        visible = (batch["input_ids"] != self.vocabulary.pad).long()
        perm_mask = (~mask.to_bool(stream="query")).float()
        return batch | {"perm_mask": perm_mask, "target_mapping": mapping, "attention_mask": visible}

    def _objective_of(self, length: int) -> Objective:
        """The objective for a row of `length` tokens, at least one of them as context."""
        asked = getattr(self.objective, "num_predict", None)
        if asked is None or asked < length:
            return self.objective
        return dataclasses.replace(self.objective, num_predict=max(1, length - 1))  # type: ignore[arg-type]

    def _padded(self, example: Example, length: int, count: int) -> Example:
        """The example padded on the left to `length` tokens, and at the end to `count` targets."""
        before = length - len(example.input_ids)

        def left(values: np.ndarray, fill: int) -> np.ndarray:
            return np.pad(values, (before, 0), constant_values=fill)

        places = example.target_positions if example.target_positions is not None else example.output_rows
        if places is None:
            labels = left(example.labels, IGNORED)
        else:
            after = (0, count - len(example.labels))
            labels = np.pad(example.labels, after, constant_values=IGNORED)
            places = np.where(labels == IGNORED, 0, np.pad(places, after) + before)
        return Example(
            left(example.input_ids, self.vocabulary.pad),
            left(example.query_rank, 0),
            left(example.key_rank, HIGHEST),
            labels,
            target_positions=None if example.target_positions is None else places,
            output_rows=None if example.output_rows is None else places,
        )

    def _row(self, index: int, feature: Any) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and token types of one feature."""
        types = None
        if isinstance(feature, Mapping):
            feature, types = feature["input_ids"], feature.get("token_type_ids")
        ids = np.asarray(feature)
        size = self.vocabulary.size
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or not ids.size or not (0 <= ids.min() and ids.max() < size):
            raise ValueError(f"features[{index}] must be at least one integer in [0, {size}), got {shortened(feature)}")
        types = np.zeros_like(ids) if types is None else np.asarray(types)
        if types.shape != ids.shape:
            raise ValueError(f"features[{index}] must have a token type for each of {len(ids)} ids, got {types.shape}")
        return ids.astype(np.int64), types.astype(np.int64)
