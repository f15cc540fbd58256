"""RelPositionAttention: the relative attention of ESPnet's and NeMo's Conformers by `rel_attention`."""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor, nn

from .._checks import as_python, is_integer, shortened
from ..backends import check_name
from ..dropout import in_force
from ..functional import rel_attention
from ..linear import Linear
from ..masks import RankMask
from ..position_cache import PositionCache
from ..positions import relative_positions


def conformer_positions(
    length: int, d_model: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> Tensor:
    """Sinusoidal table of a Conformer: row p encodes distance ``length - 1 - p``, sines and cosines interleaved.

    Returns:
        (2 length - 1, d_model): pos_emb in ESPnet and NeMo, without its first dimension.

    Raises:
        ValueError: odd d_model, or a length that is negative or not an integer.

    >>> conformer_positions(3, 2)[:, 0].tolist() == torch.sin(torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0])).tolist()
    True
    """
    if not is_integer(length) and not torch.jit.is_tracing():  # sizes are tensors there
        raise ValueError(f"length must be an integer, got {shortened(length)}")
    # XLNet's rows begin one distance further away, and have all sines, then all cosines.
    halves = relative_positions(length, length, d_model, dtype=dtype, device=device)[1:]
    return halves.unflatten(-1, (2, -1)).mT.flatten(-2)


class RelPositionAttention(nn.Module):
    """Multi-head attention with relative positions of Conformers (Gulati et al. 2020; Dai et al. 2019, 3.3).

    Parameters have the names and shapes of ESPnet's RelPositionMultiHeadedAttention and of NeMo's
    RelPositionMultiHeadAttention, so that their checkpoints load: linear_q, linear_k, linear_v, linear_out and
    linear_pos (without bias), pos_bias_u and pos_bias_v (n_head, n_feat / n_head).

    Args:
        n_head: number of heads.
        n_feat: width of the hidden states, a multiple of n_head.
        dropout_rate: probability of dropping an attention probability, in [0, 1).
        use_bias: whether linear_q, linear_k, linear_v and linear_out have biases.
        backend: None for the best available, or "reference", "torch", "cpu", "triton", "cuda".

    Raises:
        ValueError: an argument is invalid; the text names it.

    >>> attn = RelPositionAttention(4, 32)
    >>> attn(torch.randn(2, 10, 32), conformer_positions(10, 32)).shape
    torch.Size([2, 10, 32])
    """

    def __init__(
        self, n_head: int, n_feat: int, dropout_rate: float = 0.0, use_bias: bool = True, backend: str | None = None
    ) -> None:
        super().__init__()
        n_head, n_feat, dropout_rate = map(as_python, (n_head, n_feat, dropout_rate))
        for name, size in (("n_head", n_head), ("n_feat", n_feat)):
            if type(size) is not int or size < 1:
                raise ValueError(f"{name} must be a positive integer, got {shortened(size)}")
        if n_feat % n_head:
            raise ValueError(f"n_feat must be a multiple of n_head ({n_head}), got {n_feat}")
        if not isinstance(dropout_rate, (int, float)) or not 0 <= dropout_rate < 1:
            raise ValueError(f"dropout_rate must be in [0, 1), got {shortened(dropout_rate)}")
        check_name(backend)
        self.n_head, self.backend = n_head, backend
        self.linear_q = Linear(n_feat, n_feat, bias=use_bias)
        self.linear_k = Linear(n_feat, n_feat, bias=use_bias)
        self.linear_v = Linear(n_feat, n_feat, bias=use_bias)
        self.linear_out = Linear(n_feat, n_feat, bias=use_bias)
        self.linear_pos = Linear(n_feat, n_feat, bias=False)
        bound = sqrt(6 / (n_head + n_feat // n_head))
        self.pos_bias_u = nn.Parameter(torch.empty(n_head, n_feat // n_head).uniform_(-bound, bound))
        self.pos_bias_v = nn.Parameter(torch.empty(n_head, n_feat // n_head).uniform_(-bound, bound))
        self.dropout = nn.Dropout(dropout_rate)
        self._kept = PositionCache()

    def forward(
        self,
        x: Tensor,
        pos_emb: Tensor,
        mask: RankMask | Tensor | None = None,
        cache: Tensor | None = None,
    ) -> Tensor:
        """Attend to all frames that the mask allows.

        Args:
            x: (B, L, n_feat).
            pos_emb: (P, n_feat) or (1 or B, P, n_feat), P = 2 (M + L) - 1, row p encodes distance M + L - 1 - p: the
                result of `conformer_positions(M + L, n_feat)`, or a learned table.
            mask: RankMask, or bool (B, L, M + L) or (B, 1, M + L), True = may attend (ESPnet's convention; NeMo's is
                the opposite). A fully masked row gives linear_out's bias, as in both libraries.
            cache: (B, M, n_feat), earlier inputs of this layer (NeMo's streaming cache), or None.

        Returns:
            (B, L, n_feat).

        Raises:
            ValueError: an argument has the wrong shape, dtype, device or value; the text names it.
        """
        width = self.linear_q.in_features
        for name, value in (("x", x), ("cache", x if cache is None else cache)):
            if value.dim() != 3 or value.shape[-1] != width:
                raise ValueError(f"{name} must have shape (B, length, {width}), got {tuple(value.shape)}")
        frames = x if cache is None else torch.cat([cache, x], 1)
        batch, length, keys = x.shape[0], x.shape[1], frames.shape[1]
        if pos_emb.dim() == 3 and pos_emb.shape[0] == 1:
            pos_emb = pos_emb[0]
        if pos_emb.dim() not in (2, 3) or pos_emb.shape[-2:] != (2 * keys - 1, width):
            raise ValueError(
                f"pos_emb must have shape (P, {width}) or (1 or {batch}, P, {width}) with P = 2 (M + L) - 1 = "
                f"{2 * keys - 1}, got {tuple(pos_emb.shape)}"
            )
        if isinstance(mask, Tensor):
            if mask.dim() != 3:
                raise ValueError(f"mask must be (B, L, M + L) or (B, 1, M + L), got shape {tuple(mask.shape)}")
            mask = mask[:, None]
        positions = None
        if cache is not None:
            positions = torch.arange(keys - length, keys, device=x.device).expand(batch, -1)
        out = rel_attention(
            self._heads(self.linear_q(x)),
            self._heads(self.linear_k(frames)),
            self._heads(self.linear_v(frames)),
            self._kept.of_module(pos_emb, self.linear_pos, lambda rows: self._heads(self.linear_pos(rows))),
            content_bias=self.pos_bias_u,
            position_bias=self.pos_bias_v,
            mask=mask,
            query_positions=positions,
            max_distance=keys - 1,
            dropout_p=in_force(self.dropout),
            backend=self.backend,
        )
        return self.linear_out(out.transpose(1, 2).flatten(2))

    def extra_repr(self) -> str:
        return f"n_head={self.n_head}, backend={self.backend!r}"

    def _heads(self, x: Tensor) -> Tensor:
        """(..., L, n_feat) -> (..., H, L, D), a view."""
        return x.unflatten(-1, (self.n_head, -1)).transpose(-3, -2)
