"""RelativeAttention: base class of stand-ins for users' attention modules."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from .._checks import shortened
from ..dropout import in_force
from ..masks import RankMask
from ._masks import known, layer_mask, visible_ranks
from ._window import Window
from .adapter import Original, attend, project_positions, shared, split, window_of

_CONVENTIONS = ("visible", "hidden", "added")
_ORDERS = ("descending", "ascending")
_PARTS = ("queries", "keys", "values", "outputs", "positions")


class RelativeAttention(Original):
    """Base class of a stand-in: names the parts of a module, and calls the operator with them.

    A subclass has a `forward` with the arguments of the replaced class; ``super().forward`` is that class's own, for
    unsupported calls (attention maps). `register` makes `accelerate` use it.

    Attributes:
        projection_names: the modules that project queries, keys, values, outputs and positions; None for a missing
            module, or for one that `forward` calls itself.
        bias_names: the parameters u and v, each (H, D); None where there are none, or `forward` passes them.
        head_dim_name: the attribute with the width D of a head; None takes it from u.
        mask_convention: "visible" (default) where nonzero shows (ESPnet), "hidden" where nonzero hides (NeMo), "added"
            where zeros show and the lowest number, added to the scores, hides.
        table_order: "descending" (default) where the first row of the positions is for the furthest key before the
            query, "ascending" where it is for the furthest key after it. A wrong order or convention raises no error.
        backend: of the attention; `accelerate` sets it.
        window: of the attention; `accelerate` sets it.
    """

    backend: str | None = None
    window: Window | None = None
    made_here: tuple[str, ...] = ("backend", "window", "kept")
    projection_names: tuple[str | None, ...] = ("linear_q", "linear_k", "linear_v", "linear_out", "linear_pos")
    bias_names: tuple[str, str] | None = ("pos_bias_u", "pos_bias_v")
    head_dim_name: str | None = None
    mask_convention = "visible"
    table_order = "descending"

    def check_accelerable(self) -> None:
        """Raise ValueError where the instance lacks a part that the stand-in names, or a setting is unknown."""
        name = type(self).__name__
        for setting, values in (("mask_convention", _CONVENTIONS), ("table_order", _ORDERS)):
            given = getattr(self, setting)
            if given not in values:
                raise ValueError(f"{setting} of {name}'s stand-in must be one of {values}, got {shortened(given)}")
        parts = dict(zip(_PARTS, self.projection_names, strict=True))
        parts |= dict(zip(("content bias u", "position bias v"), self.bias_names or (None, None), strict=True))
        parts |= {"width of a head": self.head_dim_name}
        for part, called in parts.items():
            if called is not None and not hasattr(self, called):
                without = ", and without it no relative positions" if part == "positions" else ""
                raise ValueError(
                    f"{name} cannot be accelerated: its stand-in names {called} for {part}, which it has not{without}"
                )

    def split_heads(self, x: Tensor) -> Tensor:
        """(B, L, H * D) -> (B, H, L, D), a view."""
        if self.head_dim_name is not None:
            return split(x, getattr(self, self.head_dim_name))
        if self.bias_names is None:
            raise ValueError(f"head_dim_name of {type(self).__name__}'s stand-in must be given where it names no u")
        return split(x, getattr(self, self.bias_names[0]).shape[-1])

    def project_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, L, width), keys and values (B, K, width), projected, each (B, H, L or K, D)."""
        inputs = (query, key, value)
        q, k, v = (self.split_heads(self._project(x, part)) for part, x in enumerate(inputs))
        return q, k, v

    def relative_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        mask: RankMask | Tensor | None = None,
        *,
        content_bias: Tensor | None = None,
        position_bias: Tensor | None = None,
        max_distance: int | None = None,
        dropout: nn.Module | float = 0.0,
        scale: float | None = None,
    ) -> Tensor:
        """Attention of all heads, projected to the output.

        Fully masked rows give zeros before the projection.

        Args:
            query: (B, H, L, D), the last L of the K frames.
            key, value: (B, H, K, D), cached first, then current.
            positions: (P, width) or (1 or B, P, width), projected here; (H, P, D) or (B, H, P, D) where
                projection_names has None for them. P = 2 K - 1, or K where the distances end at 0 and keys ahead of a
                query are invisible; any P with `max_distance`.
            mask: RankMask, or a tensor ((B,) 1 or L, K) or (B, 1 or H, 1 or L, K) by `mask_convention`; None shows all.
            content_bias, position_bias: u and v (H, D), where `bias_names` is None.
            max_distance: the distance of the first row of a descending table, default K - 1.
            dropout: a module, whose probability counts in its training mode, or a probability for this module's
                training mode.
            scale: of the scores, default D ** -0.5; 1.0 if `query` is already scaled.

        Returns:
            (B, L, width).

        Raises:
            ValueError: positions have another number of rows, an added mask has other values, or `max_distance` is
                given under a window of `accelerate`.
        """
        keys = key.shape[2]
        window = window_of(self, query.shape[2], keys)
        if window is not None and max_distance is not None:
            raise ValueError(f"max_distance must be None under a window of accelerate, got {shortened(max_distance)}")
        if self.bias_names is not None:
            content_bias, position_bias = (getattr(self, name) for name in self.bias_names)
        rel_key = self._rel_key(positions, keys, query.shape[3], max_distance)
        if window is not None and rel_key.shape[-2] == keys:
            # To keep keys ahead invisible, because for free lengths `rows` pads the table by `right` rows
            window = replace(window, right=0)
        out = attend(
            query,
            key,
            value,
            rel_key if window is None else window.rows(rel_key, keys),
            content_bias,
            position_bias,
            self._visible(mask),
            window=window,
            backend=self.backend,
            max_distance=max_distance,
            dropout_p=in_force(dropout) if isinstance(dropout, nn.Module) else dropout * self.training,
            scale=scale,
        )
        return self._project(out, 3)

    def _project(self, x: Tensor, part: int) -> Tensor:
        name = self.projection_names[part]
        return x if name is None else getattr(self, name)(x)

    def _rel_key(self, positions: Tensor, keys: int, width: int, max_distance: int | None) -> Tensor:
        """rel_key (H, P, D) or (B, H, P, D), from the furthest key before a query on."""
        name = self.projection_names[4]
        if name is not None:
            rows = shared(positions) if positions.dim() == 3 else positions
            positions = project_positions(self, rows, getattr(self, name), width)
        count = positions.shape[-2]
        if max_distance is None and count not in (keys, 2 * keys - 1):  # the operator would read it as a window
            raise ValueError(
                f"positions of {keys} keys must have {2 * keys - 1} rows, or {keys} that end at distance 0, got {count}"
            )
        return positions.flip(-2) if self.table_order == "ascending" else positions

    def _visible(self, mask: RankMask | Tensor | None) -> RankMask | Tensor | None:
        if mask is None or isinstance(mask, RankMask):
            return mask
        if self.mask_convention == "added":
            if mask.dim() < 4:
                mask = mask[:, None] if mask.dim() == 3 else mask[None, None]
            found = layer_mask(mask)
            if found is None and not known(mask):  # unknown in a trace
                return mask == 0
            if found is None:
                raise ValueError(f"mask must be 0 or the lowest number of its dtype everywhere, got {shortened(mask)}")
            return found.visible
        hides = self.mask_convention == "hidden"
        if mask.dim() == 4 and mask.shape[1] == 1:
            mask = mask[:, 0]
        if mask.dim() == 4:
            return (mask == 0) if hides else (mask != 0)
        return visible_ranks(mask, hidden=hides)
