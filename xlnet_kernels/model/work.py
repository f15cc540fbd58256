"""Other work of an `XLNetModel` than its forward pass, done inside its call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._torch import register, with_tensors_on
from ..positions import kept_positions
from ..prepared import Prepared, Projected, pick_rows
from .inputs import check_mems
from .memory import ProjectedMemory
from .outputs import XLNetOutput

if TYPE_CHECKING:
    from .encoder import XLNetModel


class Work:
    """Base class of work given to `XLNetModel` as `mems`, done in place of a forward pass.

    Parameters are used inside calls only, because hooks load them there (offloading, sharding, pruning).
    """

    def run(self, model: XLNetModel, input_ids: Tensor | None) -> XLNetOutput:
        raise NotImplementedError

    def to(self, device: torch.device | str | None) -> Any:
        """This work on `device`, for hooks that move a module's arguments."""
        return with_tensors_on(device, self)


@register
@dataclass(eq=False)
class Projection(Work):
    """Work that projects memory: `XLNetModel.project_mems`."""

    mems: list[Tensor] | None
    batch: int

    def run(self, model: XLNetModel, input_ids: Tensor | None) -> XLNetOutput:
        like, layers = model.mask_emb, list(model.layer)
        mems = self.mems
        if mems is None:
            mems = [like.new_empty(0, self.batch, model.config.d_model)] * len(layers)
        check_mems(mems, model.config, None, like, training=False)
        prepared = Prepared(mems[0].shape[0], attends=False)
        projected = [layer(x.transpose(0, 1), prepared)[2] for layer, x in zip(layers, mems, strict=True)]
        keys, values, _ = map(list, zip(*projected, strict=True))
        return XLNetOutput(mems=ProjectedMemory(keys, values))


@register
@dataclass(eq=False)
class Step(Work):
    """Work of a step of cached decoding: content rows with newly known tokens, and query rows.

    prepared: `Prepared` of these rows, without positions to project.
    ahead: whether a row may see keys ahead of it. If False, the table of positions is half as long.
    wanted: (B, n), the rows to return.
    caches: `mems` returned by the previous step, per layer; None in the first step.
    """

    prepared: Prepared
    ahead: bool
    wanted: Tensor
    caches: list[Projected] | None

    def run(self, model: XLNetModel, input_ids: Tensor | None) -> XLNetOutput:
        assert input_ids is not None and self.prepared.positions is not None, "a step is of tokens at positions"
        config, prepared = model.config, self.prepared
        batch, total = self.prepared.positions.position.shape
        targets = model.mask_emb.expand(batch, total - prepared.length, -1)
        rows = torch.cat([model.word_embedding(input_ids), targets], 1)
        attn_type = "bi" if self.ahead and config.attn_type == "bi" else "uni"
        length = prepared.places
        rel_rows = (0, 2 * length if attn_type == "bi" else length + 1)
        rel_pos = None
        if self.caches is None:
            options: dict[str, Any] = dict(attn_type=attn_type, clamp_len=config.clamp_len)
            rel_pos = kept_positions(rows, length, length, config.d_model, **options)
        prepared = replace(prepared, rel_pos=rel_pos, rel_rows=rel_rows)
        caches: list[Any] = []
        for index, layer in enumerate(model.layer):
            rows, _, (key, value, table) = layer(
                rows, prepared, projected=None if self.caches is None else self.caches[index]
            )
            caches.append((key, value, table.contiguous()))
        return XLNetOutput(last_hidden_state=pick_rows(rows, self.wanted), mems=caches)
