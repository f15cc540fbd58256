"""Stand-ins for Shaw's keys in transformers: Granite Speech (all three) and SpeechT5's encoder.

The term is the operator's with u = v = 0 and rel_key a learned table shared by all heads (Shaw et al. 2018, without the
values). Distances beyond SpeechT5's limit share its last rows.

Granite Speech attends within blocks of `context_size` frames, the last one padded. Here too the blocks are the batch of
one call, because they do not see each other. SpeechT5's encoder gives all layers one tensor (T, T, D). Where all its
attention is accelerated, it gives only the different rows of that tensor, (2 T - 1, D).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..masks import RankMask
from ._masks import EVERYTHING, LayerMask, OfLast, known, layer_mask
from .adapter import Original, attend, attend_with_lse, make_stand_in, split, window_of
from .parakeet import _TransformersAttention


def _by_distance(of_pairs: Tensor) -> Tensor:
    """Rows (2 K - 1, ...) for distances K - 1 down to 1 - K, of (K, K, ...) by query and key."""
    return torch.cat([of_pairs[:, 0].flip(0), of_pairs[0, 1:]])


def _by_pair(of_distances: Tensor) -> Tensor:
    """Inverse of `_by_distance`."""
    place = torch.arange((of_distances.shape[0] + 1) // 2, device=of_distances.device)
    return of_distances[len(place) - 1 - place[:, None] + place]


@OfLast
def _block_mask(visible: Tensor) -> LayerMask:
    """LayerMask of keys (blocks, K), True where there is a frame."""
    fully_masked = ~visible.any(-1, keepdim=True).expand_as(visible)
    is_known = known(visible)
    if is_known and visible.all():
        return EVERYTHING
    keeps = not is_known or bool(fully_masked.any())
    return LayerMask(RankMask.padding(attention_mask=visible), fully_masked if keeps else None)


class _InBlocks(_TransformersAttention):
    """Base class: project, attend within blocks and project back."""

    no_window = "it attends within blocks"

    def _project(self, blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (self._heads(blocks, part) for part in range(3))
        return q, k, v

    def _attend_in_blocks(
        self, x: Tensor, distances: Tensor, visible: Tensor | None = None, dropout_p: float = 0.0
    ) -> Tensor:
        """Output (B, L, H * D) of x (B, L, width); `distances`: the table's rows by pair; `visible`: (B, L) bool."""
        size, (batch, length, _) = self.context_size, x.shape
        padding = -length % size
        if padding and visible is None:
            visible = torch.ones(batch, length, dtype=torch.bool, device=x.device)
        query, key, value = self._project(F.pad(x, (0, 0, 0, padding)).unflatten(1, (-1, size)).flatten(0, 1))
        mask = EVERYTHING if visible is None else _block_mask(F.pad(visible, (0, padding)).reshape(-1, size))
        rel_key = self.rel_pos_emb(_by_distance(distances)).to(query.dtype).expand(query.shape[1], -1, -1)
        out = attend(query, key, value, rel_key, None, None, mask.visible, backend=self.backend, dropout_p=dropout_p)
        out = self._fill_fully_masked_rows(out, mask, query, key, value, None)
        return out.unflatten(0, (batch, -1)).flatten(1, 2)[:, :length]


class _Granite(_InBlocks):
    """Stand-in for attention that includes its norm and dropout; keys and values have one projection."""

    def _project(self, blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts = (self.to_q(blocks), *self.to_kv(blocks).chunk(2, -1))
        q, k, v = (split(part, self.dim_head) for part in parts)
        return q, k, v

    def forward(self, hidden_states: Tensor, attention_dists: Tensor) -> Tensor:
        out = self._attend_in_blocks(self.pre_norm(hidden_states), attention_dists)
        return self.dropout(self.to_out(out))


class _Granite5(_InBlocks):
    """Stand-in with a mask (B, L), True at frames; padded blocks give their average, as in transformers."""

    projections = ("q_proj", "k_proj", "v_proj", "o_proj", "")

    def forward(
        self, hidden_states: Tensor, position_embeddings: Tensor, attention_mask: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, None]:
        if self._wants_original(options):
            return super().forward(hidden_states, position_embeddings, attention_mask, **options)
        dropout_p = self.attention_dropout if self.training else 0.0
        out = self._attend_in_blocks(hidden_states, position_embeddings, attention_mask, dropout_p)
        return self.o_proj(out), None


class _SpeechT5(_TransformersAttention):
    """Stand-in with positions (T, T, D) or (2 T - 1, D); without them (in the decoder) transformers' code computes."""

    projections = ("q_proj", "k_proj", "v_proj", "out_proj", "")

    def serves_parts(self) -> bool:
        return not self.is_decoder

    def forward(
        self,
        hidden_states: Tensor,
        *inputs: Any,
        attention_mask: Tensor | None = None,
        position_bias: Tensor | None = None,
        output_attentions: bool = False,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        mask = layer_mask(attention_mask)
        others = bool(inputs) or output_attentions or any(option is not None for option in options.values())
        if others or position_bias is None or mask is None or mask.fully_masked is not None:
            if position_bias is not None:
                self._check_no_window(hidden_states)
            options |= dict(attention_mask=attention_mask, output_attentions=output_attentions)
            if position_bias is not None:
                options["position_bias"] = position_bias if position_bias.dim() == 3 else _by_pair(position_bias)
            return super().forward(hidden_states, *inputs, **options)
        query, key, value = (self._heads(hidden_states, part) for part in range(3))
        rows = position_bias if position_bias.dim() == 2 else _by_distance(position_bias)
        keys = key.shape[2]
        window = window_of(self, keys, keys)
        rows = rows if window is None else window.rows(rows, keys)
        out, lse = attend_with_lse(
            query,
            key,
            value,
            rows.to(query.dtype).expand(query.shape[1], -1, -1),
            None,
            None,
            mask.visible,
            window,
            backend=self.backend,
            dropout_p=self.dropout if self.training else 0.0,
        )
        if window is not None and mask.visible is not None:  # rows of padding may have only padding in their window
            out = torch.where((lse == -torch.inf)[..., None], value.mean(2, keepdim=True), out)
        return self.out_proj(out.transpose(1, 2).flatten(2)), None


class _SpeechT5Positions(Original):
    """Stand-in that gives (2 T - 1, D) in place of (T, T, D) where all layers of the encoder support it."""

    made_here = ("gives_rows",)

    def forward(self, hidden_states: Tensor) -> Tensor:
        if not vars(self).get("gives_rows"):
            return super().forward(hidden_states)
        length = hidden_states.shape[1]
        distance = torch.arange(length - 1, -length, -1, device=hidden_states.device)
        return self.pe_k(distance.clamp(-self.max_length, self.max_length - 1) + self.max_length)


class _SpeechT5Encoder(Original):
    made_here = ()

    def forward(self, *inputs: Any, **options: Any) -> Any:
        if isinstance(self.embed_positions, _SpeechT5Positions):
            ours = all(isinstance(layer.attention, _SpeechT5) for layer in self.layers)
            vars(self.embed_positions)["gives_rows"] = ours
        return super().forward(*inputs, **options)


# Name of transformers' class -> its folder, and the stand-in's methods.
_CLASSES: dict[str, tuple[str, type]] = {
    "GraniteSpeechConformerAttention": ("granite_speech", _Granite),
    "GraniteSpeechPlusConformerAttention": ("granite_speech_plus", _Granite),
    "GraniteSpeech5EncoderAttention": ("granite_speech5", _Granite5),
    "SpeechT5Attention": ("speecht5", _SpeechT5),
    "SpeechT5RelativePositionalEncoding": ("speecht5", _SpeechT5Positions),
    "SpeechT5Encoder": ("speecht5", _SpeechT5Encoder),
}


def __getattr__(name: str) -> type:
    return make_stand_in(name, __name__, _CLASSES)
