"""Cached decoding: keys and values of every position are computed only once, when its token becomes known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..masks import RankMask
from ..prepared import Prepared
from ..two_streams import RowPositions, stack_segments
from .outputs import HeadOutput
from .work import Step


class Decoder:
    """Incremental pass over B sequences of K positions, a few rows at a time.

    Positions may become known in any order: each row has its position, and `mask` applies as in a single call of the
    model with all rows. The cost of a call depends on its own rows; memory is linear in K.

    Args:
        model: an XLNetLMHeadModel, called once for each step.
        mask: RankMask of K rows and K keys (B, K), with the query stream's ranks. Ranks may be changed between calls.
        token_type_ids: (B, K) integers, or None.
        ahead: whether a row may see keys ahead of it. If False, the table of positions is half as long.
    """

    def __init__(
        self,
        model: Callable[..., HeadOutput],
        mask: RankMask,
        token_type_ids: Tensor | None = None,
        ahead: bool = True,
    ) -> None:
        self.model, self.mask, self.ahead = model, mask, ahead
        self.key_ids = None if token_type_ids is None else stack_segments(token_type_ids, None, 0)[1]
        self.caches: Any = None

    def __call__(self, ids: Tensor, positions: Tensor, known: Tensor, targets: Tensor, wanted: Tensor) -> Tensor:
        """Enter newly known tokens, and compute the query stream at the positions to predict.

        Args:
            ids, positions: (B, R) integers, the tokens and their positions.
            known: (B, R) bool, False where there is no token: such a row has no effect.
            targets: (B, N) integers, positions.
            wanted: (B, n) integers, rows among the R content rows and the N query rows after them.

        Returns:
            Logits (B, n, vocabulary) of these rows.
        """
        count = ids.shape[1]
        places = torch.cat([positions, targets], 1)
        content = torch.arange(places.shape[1], device=places.device) < count
        sequence, row = known.nonzero(as_tuple=True)
        prepared = Prepared(
            count,
            mask=self.mask.rows(places).seeing_self(content.expand(ids.shape[0], -1)).contiguous(),
            segment_rows=None if self.key_ids is None else (self.key_ids.gather(1, places), self.key_ids),
            positions=RowPositions(places),
            entries=(sequence, row, positions[sequence, row]),
            places=self.mask.key_rank.shape[1],
        )
        step = Step(prepared, self.ahead, wanted, self.caches)
        output = self.model(ids, mems=step, return_dict=True)
        self.caches = output.mems
        return output.logits.to(ids.device)  # hooks may have moved it to the parameters' device


def flagged_positions(flags: Tensor) -> tuple[Tensor, Tensor]:
    """Ascending positions (B, N) of True in flags (B, K), N being the largest number in a row, and their validity."""
    counts = flags.sum(1)
    width = int(counts.max()) if counts.numel() else 0
    valid = torch.arange(width, device=flags.device) < counts[:, None]
    first = (~flags).byte().sort(dim=1, stable=True).indices[:, :width]
    return first.masked_fill(~valid, 0), valid


def right_pad(rows: list[Tensor], width: int, value: int) -> Tensor:
    """Pad rows of several lengths to (B, width)."""
    return torch.stack([F.pad(row, (0, width - row.shape[0]), value=value) for row in rows])
