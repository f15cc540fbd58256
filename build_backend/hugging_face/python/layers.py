"""Layers for `kernels.kernelize`: the `forward` of other libraries' modules, with those modules' parameters."""

import torch
from torch import Tensor, nn

from .functional import rel_attention


class ParakeetEncoderAttention(nn.Module):
    """Layer for transformers' ParakeetEncoderAttention: self-attention with relative positions, without a stored map.

    Fully masked rows give o_proj of zeros; in transformers, of the average of all values. The second output, the
    attention map, is None.
    """

    can_torch_compile = True

    head_dim: int
    scaling: float
    attention_dropout: float
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear
    relative_k_proj: nn.Linear
    bias_u: Tensor
    bias_v: Tensor

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Tensor | None,
        attention_mask: Tensor | None = None,
        **kwargs,
    ) -> tuple[Tensor, None]:
        """Attend to hidden_states (B, L, d_model), with position_embeddings (1 or B, 2 L - 1, d_model).

        attention_mask (B, 1, L, L) is True, or 0 in a float mask, where a row may attend.
        """
        length, width = hidden_states.shape[1], self.head_dim
        query, key, value = (
            projection(hidden_states).unflatten(-1, (-1, width)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if position_embeddings.stride(0) == 0:
            position_embeddings = position_embeddings[:1]  # equal for the whole batch
        rel_key = self.relative_k_proj(position_embeddings).unflatten(-1, (-1, width)).transpose(-3, -2)
        mask = attention_mask
        if mask is not None and mask.dtype != torch.bool:
            mask = mask == 0
        out = rel_attention(
            query,
            key,
            value,
            rel_key[0] if len(rel_key) == 1 else rel_key,
            content_bias=self.bias_u,
            position_bias=self.bias_v,
            mask=mask,
            max_distance=length - 1,
            dropout_p=self.attention_dropout if self.training else 0.0,
            scale=self.scaling,
        )
        return self.o_proj(out.transpose(1, 2).flatten(2)), None
