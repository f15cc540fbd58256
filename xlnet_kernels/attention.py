"""TwoStreamAttention: XLNet's attention layer on top of `rel_attention`."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ._attention_map import attention_and_map
from ._checks import as_python, shortened
from ._layer_arguments import check_hidden, check_integers, check_not_projected, find_positions, find_rel_pos
from .backends import check_name
from .ddp_unused import with_unused
from .distributed.tensors import alike, whole
from .dropout import Dropout, in_force
from .functional import rel_attention
from .linear import linear
from .masks import RankMask
from .position_cache import PositionCache
from .prepared import Prepared, Projected, pick_rows
from .segments import Segments
from .two_streams import RowPositions, check_mask, is_one_stream, mask_of_targets, stack_mask, stack_segments

NORMS = ("post", "pre", None)


class TwoStreamAttention(nn.Module):
    """Two-stream relative attention with output projection, dropout, residual and LayerNorm (Yang et al. 2019, eq. 1).

    The content stream h is the hidden states of other models. The query stream g knows a position but not its token,
    and is computed at the predicted positions only. Both attend to the same keys and values in one call of the
    operator, so the query stream costs N / L of the content stream. Parameters have the names and shapes of XLNet
    checkpoints: q k v o r (d_model, n_head, d_head), r_w_bias r_r_bias r_s_bias (n_head, d_head), seg_embed
    (2, n_head, d_head), layer_norm.

    Args:
        d_model: width of the hidden states.
        n_head: number of heads.
        d_head: width of a head; default d_model / n_head.
        dropout: probability of dropping an attention probability and an element of the output, in [0, 1).
        layer_norm_eps: epsilon of the LayerNorm.
        backend: None for the best available, or "reference", "torch", "cpu", "triton", "cuda".
        norm: "post" (XLNet): LayerNorm(x + attention(x)). "pre": x + attention(LayerNorm(x)); memory is then the
            layer's inputs before the norm. None: attention(x) with dropout but without residual and LayerNorm, for
            models that have their own.
        device, dtype: of the parameters.

    Raises:
        ValueError: an argument is invalid; the text names it.

    >>> attn = TwoStreamAttention(32, 4)
    >>> h, g = attn(torch.randn(2, 6, 32))
    >>> h.shape, g
    (torch.Size([2, 6, 32]), None)
    >>> order = torch.stack([torch.randperm(6) for _ in range(2)])
    >>> targets = torch.tensor([[4, 5], [0, 3]])
    >>> mask = RankMask.from_order(steps=order, targets=torch.zeros(2, 6, dtype=torch.bool).scatter(1, targets, True))
    >>> h, g = attn(torch.randn(2, 6, 32), torch.randn(2, 2, 32), mask=mask, target_positions=targets)
    >>> g.shape
    torch.Size([2, 2, 32])
    """

    def __init__(
        self,
        d_model: int,
        n_head: int,
        d_head: int | None = None,
        dropout: float = 0.0,
        layer_norm_eps: float = 1e-12,
        backend: str | None = None,
        *,
        norm: str | None = "post",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        d_model, n_head, d_head, dropout = map(as_python, (d_model, n_head, d_head, dropout))
        for name, size in (("d_model", d_model), ("n_head", n_head), ("d_head", d_head)):
            if not (type(size) is int and size > 0) and not (name == "d_head" and size is None):
                raise ValueError(f"{name} must be a positive integer, got {shortened(size)}")
        if d_head is None:
            if d_model % n_head:
                raise ValueError(f"d_head must be given where d_model ({d_model}) is no multiple of n_head ({n_head})")
            d_head = d_model // n_head
        if not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {shortened(dropout)}")
        if norm not in NORMS:
            raise ValueError(f"norm must be one of {NORMS}, got {shortened(norm)}")
        check_name(backend)
        self.d_model, self.n_head, self.d_head, self.backend, self.norm = d_model, n_head, d_head, backend, norm

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))

        self.q = parameter(d_model, n_head, d_head)
        self.k = parameter(d_model, n_head, d_head)
        self.v = parameter(d_model, n_head, d_head)
        self.o = parameter(d_model, n_head, d_head)
        self.r = parameter(d_model, n_head, d_head)
        self.r_r_bias = parameter(n_head, d_head)
        self.r_s_bias = parameter(n_head, d_head)
        self.r_w_bias = parameter(n_head, d_head)
        self.seg_embed = parameter(2, n_head, d_head)
        if norm is not None:
            self.layer_norm = nn.LayerNorm(d_model, eps=layer_norm_eps, device=device, dtype=dtype)
        self.dropout = Dropout(dropout)
        self._kept = PositionCache()
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02) -> None:
        """XLNet's initialisation: normal(0, std), LayerNorm at one and zero."""
        for parameter in self.parameters(recurse=False):
            nn.init.normal_(parameter, std=std)
        if self.norm is not None:
            self.layer_norm.reset_parameters()

    @classmethod
    def from_transformers(cls, module: nn.Module, backend: str | None = None) -> TwoStreamAttention:
        """A copy of transformers' XLNetRelativeAttention that computes the same function.

        Raises:
            ValueError: `module` lacks a parameter of XLNet's attention.
        """
        state = module.state_dict()
        if "q" not in state or "layer_norm.weight" not in state:
            raise ValueError(
                f"module must be transformers' XLNetRelativeAttention with its parameters, got {type(module).__name__} "
                f"with {sorted(state) or 'none'}"
            )
        q = state["q"]
        given: Any = module
        d_model, n_head, d_head = q.shape
        dropout_p = getattr(given.dropout, "p", 0.0)
        copy = cls(d_model, n_head, d_head, dropout_p, given.layer_norm.eps, backend, device=q.device, dtype=q.dtype)
        missing = copy.state_dict().keys() ^ state.keys()
        if missing:
            raise ValueError(f"module must have the parameters of XLNetRelativeAttention, differs in {sorted(missing)}")
        copy.load_state_dict(state)
        return copy.train(module.training)

    def forward(
        self,
        h: Tensor,
        g: Tensor | None = None,
        mask: RankMask | Tensor | None = None,
        rel_pos: Tensor | None = None,
        segment_ids: Tensor | None = None,
        mems: Tensor | None = None,
        target_positions: Tensor | None = None,
        *,
        prepared: Prepared | None = None,
        projected: Projected | None = None,
    ) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Projected | None]:
        """Attend, project, add the residual and normalise, both streams at once.

        Args:
            h: (B, L, d_model), the content stream; keys and values of both streams come from it.
            g: (B, N, d_model), the query stream, or None.
            mask: mask of the query stream: RankMask with L rows and M + L keys (its `sees_self` is ignored), or bool
                (B, L, M + L), broadcastable, True = may attend; (B, H, L, M + L) where heads differ. The content stream
                also sees itself. None: all keys are visible but the tokens at target_positions, which only their own
                content rows see; where rel_pos ends at distance 0, all earlier keys. Without target_positions g then
                needs a mask, because it would see its own token. A mask of one stream (`RankMask.padding`, `full`,
                `local`, `chunked`, `packed`, or dense with one row for all) likewise hides the tokens at
                target_positions, from content rows too.
            rel_pos: (P, d_model) or (B, P, d_model), row p encodes distance M + L - p; P = M + 2 L, or M + L + 1 where
                keys ahead are invisible. Default: sinusoidal, both directions.
            segment_ids: (B, L) integers, or None for no segment term. Memory is segment 0.
            mems: (B, M, d_model), earlier inputs of this layer, or None.
            target_positions: (B, N) integers, the position of each row of g; default: N = L and row n is at n.
            prepared: `Prepared`, for models that stack both streams and prepare masks, segments and positions once for
                all layers. h is then (B, L + N, d_model); besides it only mems may be given.
            projected: with `prepared`, memory projected by an earlier call, instead of mems.

        Returns:
            h (B, L, d_model) and g (B, N, d_model), or h and None. With `prepared`: the rows; the attention map or
            None; the projected keys, values and positions where `projected` or cached decoding need them, or None.

        Raises:
            ValueError: an argument has the wrong shape, dtype, device or value; the text names it.
        """
        if prepared is not None:
            return self._compute_prepared(h, mems, prepared, projected)
        like = self.q
        check_not_projected(h, g, mask)
        batch, length, mem_len = check_hidden(h, g, mems, self.d_model, like)
        positions = None
        if g is not None:
            positions = find_positions(target_positions, h, g)
        elif target_positions is not None:
            raise ValueError("target_positions needs a query stream, but g is None")
        rel_pos = find_rel_pos(rel_pos, h, mem_len, like)
        if mask is not None:
            mask = check_mask(mask, h, self.n_head, mem_len)
        if positions is not None and (mask is None or is_one_stream(mask, length)):
            ahead = rel_pos.shape[-2] == mem_len + 2 * length
            if target_positions is None and (ahead or mask is not None):
                raise ValueError(
                    "g needs a mask or target_positions: with neither, each of its rows sees the token it is to predict"
                    if mask is None
                    else "mask is of one stream, and shows each row of g the token it is to predict: give "
                    "target_positions, or a mask of two streams such as RankMask.causal or from_order"
                )
            mask = mask_of_targets(positions[:, length:], length, mem_len, ahead, mask)
        mask = stack_mask(mask, positions, h, self.n_head, mem_len)
        segment_rows = None
        if segment_ids is not None:
            check_integers("segment_ids", segment_ids, (batch, length), h)
            segment_rows = stack_segments(segment_ids, positions, mem_len)
        out, _ = self.attend(
            h if g is None else torch.cat([h, g], 1),
            self.project(h),
            self._project_once(rel_pos),
            memory=None if mems is None else self.project(mems),
            mask=mask,
            segment_rows=segment_rows,
            positions=None if positions is None else RowPositions(positions),
        )
        if g is None:
            return out, None
        # "unsafe" allows changing both halves in place, which is right because nothing else refers to `out`.
        content, predicted = torch.unsafe_split_with_sizes(out, [length, g.shape[1]], 1)
        return content, predicted

    def project(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, each (B, H, L, D), of hidden states (B, L, d_model)."""
        weight = self.k
        # Called once for both, because its gradient is then summed over processes once.
        h = alike(self._before(h), weight)
        return self._heads(h, weight), self._heads(h, self.v)

    def project_positions(self, rel_pos: Tensor) -> Tensor:
        """rel_key (H, P, D) or (B, H, P, D) of positions (P, d_model) or (B, P, d_model)."""
        return self._heads(rel_pos, self.r)

    def attend(
        self,
        rows: Tensor,
        key_value: tuple[Tensor, Tensor],
        rel_key: Tensor,
        *,
        memory: tuple[Tensor, Tensor] | None = None,
        mask: RankMask | Tensor | None = None,
        segment_rows: tuple[Tensor, Tensor] | None = None,
        positions: Tensor | RowPositions | None = None,
        mapping: Tensor | None = None,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Apply the layer to inputs prepared once for all layers: stacked rows, projected keys, masks for every row.

        `forward` calls it, as it calls `project` and `project_positions`. Direct calls of these three skip the module's
        hooks, on which pruning, offloading and sharding rely. Models therefore give `forward` a `Prepared`.

        Args:
            rows: (B, L + N, d_model), content rows, then query rows.
            key_value: keys and values of the segment, from `project`; `memory` likewise, of the memory, or None.
            rel_key: from `project_positions`, (H, P, D) or (B, H, P, D).
            mask: of all rows, from `stack_mask`; segment_rows likewise from `stack_segments`.
            positions: (B, L + N) integers, the position of each row, or RowPositions of them; default arange.
            mapping: (B, N, L), for targets that are mixtures of positions: heads of the query rows are mixed into L
                rows, attend, and are mixed back. mask, segment_rows and positions then have 2 L rows.
            need_weights: also return the attention map (after dropout). The reference computes it; fused kernels never
                materialise the map.

        Returns:
            (B, L + N, d_model), and the map (B, H, rows, M + L) or None.
        """
        query = self._heads(self._before(rows), self.q)
        if mapping is not None:
            length = mapping.shape[2]
            mapping = alike(mapping, query)
            query = torch.cat([query[:, :, :length], mapping.mT[:, None] @ query[:, :, length:]], 2)
        content_bias: Tensor = self.r_w_bias
        if segment_rows is None:
            content_bias = with_unused(content_bias, self.seg_embed, self.r_s_bias)
        out, weights = self._attention(
            query,
            *key_value,
            rel_key,
            memory=memory,
            need_weights=need_weights,
            content_bias=content_bias,
            position_bias=self.r_r_bias,
            segments=None if segment_rows is None else Segments(*segment_rows, self.seg_embed, self.r_s_bias),
            mask=mask,
            query_positions=positions,
            dropout_p=in_force(self.dropout),
        )
        if mapping is not None:
            out = torch.cat([out[:, :, :length], mapping[:, None] @ out[:, :, length:]], 2)
        # The cast is for transformers' modules (integrations/xlnet.py), whose bare parameters may have another dtype.
        out = linear(out.transpose(1, 2).flatten(2), self.o.flatten(1).to(out.dtype))
        return self._after(self.dropout(whole(out)), rows), None if weights is None else whole(weights)

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, rel_key: Tensor, *, need_weights: bool, **options
    ) -> tuple[Tensor, Tensor | None]:
        """The operator, or the reference where the map is wanted too."""
        if need_weights:
            return attention_and_map(query, key, value, rel_key, **options)
        return rel_attention(query, key, value, rel_key, backend=self.backend, **options), None

    def _compute_prepared(
        self, rows: Tensor, mems: Tensor | None, prepared: Prepared, projected: Projected | None
    ) -> tuple[Tensor, Tensor | None, Projected | None]:
        """`forward` of prepared inputs."""
        key, value = self.project(rows[:, : prepared.length])
        if not prepared.attends:
            return rows[:, :0], None, (key, value, None)
        table = projected[2] if projected is not None else None
        if prepared.rel_pos is not None:
            table = self._project_once(prepared.rel_pos)
        assert table is not None, "positions are left out only where they were projected before"
        memory = None
        if prepared.entries is not None:
            key, value = prepared.enter(key, value, projected)
        elif projected is not None:
            memory = projected[:2]
        elif mems is not None:
            memory = self.project(mems)
        rel_key = table.narrow(-2, *prepared.rel_rows)
        if rel_key.dim() == 4:  # forward text and reversed text
            rel_key = rel_key.repeat_interleave(rows.shape[0] // 2, 0)
        out, weights = self.attend(
            rows if prepared.wanted is None else pick_rows(rows, prepared.wanted),
            (key, value),
            rel_key,
            memory=memory,
            mask=prepared.mask,
            segment_rows=prepared.segment_rows,
            positions=prepared.positions,
            mapping=prepared.mapping,
            need_weights=prepared.need_weights,
        )
        kept = projected is not None or prepared.entries is not None
        return out, weights, (key, value, table) if kept else None

    def _project_once(self, rel_pos: Tensor) -> Tensor:
        """`project_positions`, kept from call to call at inference."""
        weight = self.r
        return self._kept(rel_pos, [weight], lambda rows: self._heads(rows, weight))

    def extra_repr(self) -> str:
        sizes = f"d_model={self.d_model}, n_head={self.n_head}, d_head={self.d_head}"
        return f"{sizes}, backend={self.backend!r}, norm={self.norm!r}"

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuse torch.jit.script, which calls this for nested modules too."""
        raise RuntimeError(f"{type(self).__name__} cannot be scripted: use torch.compile or torch.export")

    def _before(self, x: Tensor) -> Tensor:
        """The projections' input, from the layer's input."""
        return self.layer_norm(x) if self.norm == "pre" else x

    def _after(self, out: Tensor, rows: Tensor) -> Tensor:
        """Residual and LayerNorm."""
        if self.norm is None:
            return out
        return self.layer_norm(out + rows) if self.norm == "post" else out + rows

    def _heads(self, x: Tensor, weight: Tensor) -> Tensor:
        """(..., L, d_model) -> (..., H, L, D) as one matrix product; the transposition is a view."""
        return (
            linear(alike(x, weight), weight.flatten(1).mT).unflatten(-1, (self.n_head, self.d_head)).transpose(-3, -2)
        )
