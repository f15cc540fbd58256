"""Claim: two-stream predictions know the position and not the token (Yang et al. 2019, section 2.3).

A single stream predicts the next token of the order from the hidden state of the previous token. That state does not
depend on the next position, so two positions get the same prediction. The paper's remedy is a representation that knows
the target's position, and the two streams compute it without its token. Three identities, on held-out text:

- own_token: the largest change of a prediction when the target's token is replaced: 0;
- earlier_token: the largest change when an earlier token of the order is replaced: not 0;
- other_position: two targets trade places at the end of the order, so that both are predicted from the same tokens. The
  total variation between both predictions is 0 for the single stream and not 0 for two.

The cost of ambiguity is the held-out loss of a model trained with a single stream, on the same targets and orders.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from parts.run import Run
from xlnet_kernels import RankMask
from xlnet_kernels.pretraining import Batch, PermutationLM, Vocabulary
from xlnet_kernels.pretraining.objective import IGNORED, Example

from .workshop import Workshop, train

SINGLE, TWO = "single stream", "two streams"


class SingleStreamLM(PermutationLM):
    """PermutationLM with a single stream: the previous content row of the order predicts each target.

    The last token of the context predicts the first target.
    """

    def example(self, ids: np.ndarray, vocabulary: Vocabulary, parts: Sequence[int], rng, **text) -> Example:
        two = super().example(ids, vocabulary, parts, rng, **text)
        assert two.target_positions is not None
        targets = two.target_positions[two.labels != IGNORED]
        order = targets[np.argsort(two.query_rank[targets])]
        rows, labels = np.zeros_like(two.labels), np.full_like(two.labels, IGNORED)
        context = np.setdiff1d(np.arange(len(ids)), targets)
        rows[: len(order)] = [context[-1], *order[:-1]]
        labels[: len(order)] = ids[order]
        return Example(ids, two.query_rank, two.key_rank, labels, output_rows=rows)


def measure(workshop: Workshop) -> Iterator[dict]:
    """A row for each kind and seed."""
    for seed in workshop.options.seeds:
        for name in (TWO, SINGLE):
            run = workshop.new_run("permutation", seed)
            if name == SINGLE:
                for batches in (run.training, run.validation):
                    batches.objective = SingleStreamLM(workshop.options.num_predict)
                run.model.transformer.mask_emb.requires_grad_(False)
                facts = train(run) | {"held_out": round(run.evaluate(), 4)}
            else:
                facts = workshop.pretrained("permutation", seed)[1]
                run.model = workshop.reader("permutation", seed).model
            yield {"section": "streams", "implementation": name, "seed": seed} | facts | identities(run)


@torch.no_grad()
def identities(run: Run) -> dict[str, float]:
    """The three identities for the first held-out batch; only the last for a single stream."""
    model, batch = run.model.eval(), run.validation[0]
    final, last, before = _end_of_order(batch.mask)
    traded = replace(batch, mask=_traded(batch, last, final))
    if batch.target_positions is None:
        one, other = (_predict(model, x, output_rows=before) for x in (batch, traded))
        return {"other_position": _variation(one, other)}
    as_it_is = _predict(model, batch, target_positions=final)
    one, other = _predict(model, batch, target_positions=last), _predict(model, traded, target_positions=final)
    return {
        "own_token": _change(as_it_is, _predict(model, _replaced(batch, final), target_positions=final)),
        "earlier_token": _change(as_it_is, _predict(model, _replaced(batch, last), target_positions=final)),
        "other_position": _variation(one, other),
    }


def _end_of_order(mask: RankMask) -> tuple[Tensor, ...]:
    """The last three targets of the order, (B, 1) each, last first."""
    steps = torch.where(mask.key_rank == mask.query_rank, mask.key_rank, -1)  # context has lower key ranks
    return steps.topk(3, 1).indices.split(1, 1)


def _traded(batch: Batch, one: Tensor, other: Tensor) -> RankMask:
    """The order with the steps of two positions (B, 1) exchanged."""

    def exchanged(ranks: Tensor) -> Tensor:
        return ranks.scatter(1, one, ranks.gather(1, other)).scatter(1, other, ranks.gather(1, one))

    return RankMask(exchanged(batch.mask.query_rank), exchanged(batch.mask.key_rank))


def _replaced(batch: Batch, positions: Tensor) -> Batch:
    """The batch with another token at these positions (B, 1)."""
    tokens = batch.input_ids.gather(1, positions)
    return replace(batch, input_ids=batch.input_ids.scatter(1, positions, torch.where(tokens > 0, tokens - 1, 1)))


def _predict(model: nn.Module, batch: Batch, **rows: Tensor) -> Tensor:
    """Logits (B, vocabulary) of one row in each sequence."""
    inputs = {"target_positions": None, "output_rows": None} | rows
    return model(batch.input_ids, token_type_ids=batch.token_type_ids, mask=batch.mask, **inputs).logits[:, 0]


def _change(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().max().item()


def _variation(one: Tensor, other: Tensor) -> float:
    """Total variation: half the sum of the differences of probabilities, mean over the batch."""
    return ((one.softmax(-1) - other.softmax(-1)).abs().sum(-1) / 2).mean().item()
