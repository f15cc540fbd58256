"""Cached decoding: keys and values of every position, computed when its token becomes known and never again."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..masks import RankMask
from ..positions import kept_positions
from ..streams import RowPositions, stack_segments
from .encoder import XLNetModel


class Decoder:
    """One pass over B sequences of K positions, a few rows at a time.

    Positions may become known in any order: each row has its position, and `mask` says what it sees, as it would in a
    single call of the model with all rows. A call costs its own rows, whatever is cached; memory is linear in K.

    Args:
        model: an XLNetModel.
        mask: RankMask of K rows and K keys (B, K), with the query stream's ranks. Ranks may be changed between calls.
        token_type_ids: (B, K) integers, or None.
        ahead: whether a row may see keys ahead of it. Without, the table of positions is half as long.
    """

    def __init__(
        self, model: XLNetModel, mask: RankMask, token_type_ids: Tensor | None = None, ahead: bool = True
    ) -> None:
        self.model, self.mask, config = model, mask, model.config
        self.key_ids = None if token_type_ids is None else stack_segments(token_type_ids, None, 0)[1]
        length = mask.key_rank.shape[1]
        rel_pos = kept_positions(
            model.mask_emb,
            length,
            length,
            config.d_model,
            attn_type="bi" if ahead and config.attn_type == "bi" else "uni",
            clamp_len=config.clamp_len,
        )
        layers: Any = model.layer
        self.layers = layers
        self.rel_keys = [layer.rel_attn.project_positions(rel_pos).contiguous() for layer in layers]
        # Zeros: what is not yet known has the weight 0, which must not meet a NaN.
        shape = (mask.key_rank.shape[0], config.n_head, length, config.d_head)
        self.cache = [[self.rel_keys[0].new_zeros(shape) for _ in range(2)] for _ in model.layer]

    def __call__(self, ids: Tensor, positions: Tensor, known: Tensor, targets: Tensor) -> Tensor:
        """Enter tokens that are known now, and compute the query stream where tokens are to be predicted.

        Args:
            ids, positions: (B, R) integers, the tokens and where they stand.
            known: (B, R) bool, False where there is none: such a row leaves no trace.
            targets: (B, N) integers, positions.

        Returns:
            (B, R + N, d_model), of the content rows and then of the query rows.
        """
        model, count = self.model, ids.shape[1]
        batch = self.mask.key_rank.shape[0]
        rows = torch.cat([model.word_embedding(ids), model.mask_emb.expand(batch, targets.shape[1], -1)], 1)
        places = torch.cat([positions, targets], 1)
        content = torch.arange(places.shape[1], device=places.device) < count
        mask = self.mask.rows(places).seeing_self(content.expand(batch, -1)).contiguous()
        segment_rows = None
        if self.key_ids is not None:
            segment_rows = self.key_ids.gather(1, places), self.key_ids
        sequence, row = known.nonzero(as_tuple=True)
        place = positions[sequence, row]
        row_positions = RowPositions(places)
        for layer, cached, rel_key in zip(self.layers, self.cache, self.rel_keys, strict=True):
            for kept, new in zip(cached, layer.rel_attn.project(rows[:, :count]), strict=True):
                kept[sequence, :, place] = new[sequence, :, row]
            rows, _ = layer.rel_attn.attend(
                rows, tuple(cached), rel_key, mask=mask, segment_rows=segment_rows, positions=row_positions
            )
            rows = layer.ff(rows)
        return rows


def flagged_positions(flags: Tensor) -> tuple[Tensor, Tensor]:
    """Where flags (B, K) are True, in ascending order: positions (B, N) for the largest N, and which of them count."""
    counts = flags.sum(1)
    width = int(counts.max()) if counts.numel() else 0
    valid = torch.arange(width, device=flags.device) < counts[:, None]
    first = (~flags).byte().sort(dim=1, stable=True).indices[:, :width]
    return first.masked_fill(~valid, 0), valid


def right_pad(rows: list[Tensor], width: int, value: int) -> Tensor:
    """(B, width) of rows of several lengths."""
    return torch.stack([F.pad(row, (0, width - row.shape[0]), value=value) for row in rows])
