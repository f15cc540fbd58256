"""Stand-ins for the attention of transformers' speech encoders with Transformer-XL's relative term.

Score, scale and order of rel_key's rows are the operator's with ``max_distance = M + K - 1``. The models:

- Parakeet, Canary, Cohere ASR and Nemotron-H Omni (ParakeetEncoderAttention), and streaming Nemotron ASR, whose cached
  keys come first (NemotronAsrStreamingEncoderAttention);
- FastSpeech2-Conformer;
- Wav2Vec2-Conformer, Wav2Vec2-BERT and SeamlessM4T with position_embeddings_type "relative";
- Wav2Vec2-BERT and SeamlessM4T v2 with "relative_key": no biases u and v, and rel_key is a learned table shared by all
  heads, with one row for each distance up to a limit.

Not supported: these classes with "rotary" positions or none, which have no relative term; Gemma's audio encoders, which
cap their scores; Funnel, which pools its queries. Granite Speech and SpeechT5 are in shaw.py.

For the attention map the original forward is called. Masks are True or 0 where a row may attend, as transformers makes
them. With eager attention, Nemotron and SeamlessM4T v2 read their own masks differently (5.23); here their results are
those with sdpa.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._torch import exports_to_onnx
from ..dropout import in_force
from ._masks import EVERYTHING, LayerMask, layer_mask, padding_mask, visible_pairs
from ._packing import PackedRow, packed_row
from ._padding import PaddingRow, TracedRow, of_keys, of_pairs, padding_row
from ._window import Window
from .adapter import (
    Original,
    attend,
    attend_with_lse,
    check_no_window,
    clipped_rows,
    make_stand_in,
    project_positions,
    say_once,
    shared,
    split,
    window_of,
)

_FOR_LOSSES = {"num_items_in_batch"}  # options that Trainer gives to all layers, for the loss only


class _TransformersAttention(Original):
    """Base class of these stand-ins: project, attend and project back. Subclasses name their parts."""

    backend: str | None = None
    window: Window | None = None
    made_here = ("backend", "window", "kept")
    # query, key, value, output, position
    projections = ("linear_q", "linear_k", "linear_v", "linear_out", "linear_pos")
    biases = ("pos_bias_u", "pos_bias_v")
    zeros_where_fully_masked = False  # as in the operator, not the average of all values

    def check_accelerable(self) -> None:
        if getattr(self, "num_key_value_groups", 1) != 1:
            raise ValueError(
                f"{type(self).__name__} cannot be accelerated where heads share keys, got num_key_value_groups = "
                f"{self.num_key_value_groups}"
            )

    def _heads(self, x: Tensor, part: int) -> Tensor:
        """Heads (..., H, L, D) of (..., L, d_model) by projection number `part`."""
        return split(getattr(self, self.projections[part])(x), self._width())

    def _width(self) -> int:
        return self.head_dim if hasattr(self, "head_dim") else self.head_size

    def _attend(
        self, hidden_states: Tensor, positions: Tensor | None, mask: LayerMask, dropout_p: float, cache: Any = None
    ) -> tuple[Tensor, None]:
        query, key, value = (self._heads(hidden_states, part) for part in range(3))
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        count, keys = query.shape[1], key.shape[2]
        window = window_of(self, query.shape[2], keys)
        content_bias, position_bias = (getattr(self, name, None) for name in self.biases)
        if content_bias is None:
            rel_key = self._table(keys, window, query.device).to(query.dtype).expand(count, -1, -1)
        else:
            assert positions is not None, "such a model always passes its position embeddings"
            if positions.shape[-2] != 2 * keys - 1:  # the operator would read it as a window
                raise ValueError(
                    f"position embeddings of {keys} keys must have {2 * keys - 1} rows, got {positions.shape[-2]}"
                )
            rows = shared(positions if window is None else window.rows(positions, keys))
            rel_key = project_positions(self, rows, getattr(self, self.projections[4]), self._width())
        out, lse = attend_with_lse(
            query,
            key,
            value,
            rel_key,
            content_bias,
            position_bias,
            mask.visible,
            window,
            backend=self.backend,
            dropout_p=dropout_p,
        )
        if window is not None and mask.visible is not None:  # a window may have only hidden keys
            mask = LayerMask(mask.visible, (lse == -torch.inf).all(1))
        out = out.transpose(1, 2).flatten(2)
        out = self._fill_fully_masked_rows(out, mask, query, key, value, content_bias)
        return getattr(self, self.projections[3])(out), None

    def _attend_packed(self, hidden_states: Tensor, positions: Tensor, row: PackedRow, dropout_p: float) -> Tensor:
        """Attention of the packed row (1, T, d_model) of sequences padded to L; positions are for L frames."""
        query, key, value = (self._heads(hidden_states, part) for part in range(3))
        keys = (positions.shape[-2] + 1) // 2
        window = window_of(self, keys, keys)
        distance = keys - 1 if window is None else window.first_distance(keys)
        rows = shared(positions if window is None else window.rows(positions, keys))
        # Bounded, because the operator has no rows for distances without pairs.
        before = min(distance, row.longest - 1)
        after = min(rows.shape[-2] - 1 - distance, row.longest - 1)
        rel_key = project_positions(
            self, rows[distance - before : distance + after + 1], getattr(self, self.projections[4]), self._width()
        )
        out = attend(
            query,
            key,
            value,
            rel_key,
            *(getattr(self, name) for name in self.biases),
            row.visible,
            max_distance=before,
            backend=self.backend,
            dropout_p=dropout_p,
        )
        return getattr(self, self.projections[3])(out)

    def _table(self, keys: int, window: Window | None, device: torch.device) -> Tensor:
        """Table (P, D), row p for distance keys - 1 - p, or the rows of the window."""
        # Not the weight's device, because an offloaded weight is on meta outside its module's call.
        limits = self.left_max_position_embeddings, self.right_max_position_embeddings
        return self.distance_embedding(clipped_rows(keys, window, *limits, device))

    def _fill_fully_masked_rows(
        self, out: Tensor, mask: LayerMask, query: Tensor, key: Tensor, value: Tensor, content_bias: Tensor | None
    ) -> Tensor:
        """The output with the average of all values in fully masked rows, with transformers' gradient.

        The scores of such a row are the lowest number plus q.k, rounded to the lowest number: all are equal, but
        autograd still differentiates q.k. The derivative is the covariance of keys and values.
        """
        if mask.fully_masked is None or self.zeros_where_fully_masked:
            return out
        average = value.mean(2, keepdim=True)
        if torch.is_grad_enabled():
            query = query if content_bias is None else query + content_bias[:, None]
            slope = query @ (key.mT @ (value - average).detach()) * (query.shape[-1] ** -0.5 / key.shape[2])
            average = average + (slope - slope.detach())
        return torch.where(mask.fully_masked[..., None], average.transpose(1, 2).flatten(2), out)

    def _check_no_window(self, hidden_states: Tensor, cache: Any = None) -> None:
        length = hidden_states.shape[1]
        past = 0 if cache is None else cache.get_seq_length(self.layer_idx)
        check_no_window(window_of(self, length, past + length), self)

    def _wants_original(self, options: dict[str, Any]) -> bool:
        """Whether transformers' code must compute: for attention maps, and unknown options other than flags."""
        if options.get("output_attentions") or getattr(self.config, "output_attentions", False):
            return True
        given = {name for name, value in options.items() if value is not None and not isinstance(value, int)}
        unknown = sorted(given - _FOR_LOSSES)
        if unknown:
            say_once(f"{type(self).__name__} was called with {', '.join(unknown)}: transformers' code computes it")
        return bool(unknown)


class _Parakeet(_TransformersAttention):
    """Stand-in with positions (B, P, d_model), equal for all samples except for dropout."""

    projections = ("q_proj", "k_proj", "v_proj", "o_proj", "relative_k_proj")
    biases = ("bias_u", "bias_v")

    takes_cache = False

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Tensor | None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,  # the cache in transformers up to 5.23
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        dropout_p = self.attention_dropout if self.training else 0.0
        if isinstance(attention_mask, PackedRow):
            assert position_embeddings is not None, "such a model always passes them"
            return self._attend_packed(hidden_states, position_embeddings, attention_mask, dropout_p), None
        if isinstance(attention_mask, (PaddingRow, TracedRow)):
            mask: LayerMask | None = of_pairs(attention_mask.plain()[:, 0, 0])
        else:
            mask = layer_mask(attention_mask)
        cache = (past_key_values if cache is None else cache) if self.takes_cache else None
        if mask is None or self._wants_original(options):
            self._check_no_window(hidden_states, cache)
            caches = (cache,) if self.takes_cache else ()
            if isinstance(attention_mask, (PaddingRow, TracedRow)):
                attention_mask = attention_mask.pairs()
            return super().forward(hidden_states, position_embeddings, attention_mask, *caches, **options)
        return self._attend(hidden_states, position_embeddings, mask, dropout_p, cache)


class _ParakeetBlock(Original):
    """Layer that computes the frames of a padded batch in one row, under `accelerate(skip_padding=True)`."""

    skip_padding = False
    made_here = ("skip_padding",)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        position_embeddings: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        row = self._packed_row(attention_mask, position_embeddings, options)
        if row is None:
            return super().forward(hidden_states, attention_mask, position_embeddings, **options)
        out = super().forward(row.pack(hidden_states), row, position_embeddings, **options)
        return row.unpack(out, *hidden_states.shape[:2])

    def _packed_row(self, mask: Any, positions: Tensor | None, options: dict[str, Any]) -> PackedRow | None:
        """The packed row, or None where the layer computes padding too."""
        if not (self.skip_padding and isinstance(mask, PaddingRow)) or positions is None:
            return None
        if self.self_attn._wants_original(options) or shared(positions).dim() == 3:  # positions of each sequence
            return None
        return packed_row(mask.plain()[:, 0, 0], self.conv.padding)


class _NemotronStreaming(_Parakeet):
    """Stand-in with hidden keys at -inf, so fully masked rows give zeros, as in the operator."""

    takes_cache = zeros_where_fully_masked = True


class _FastSpeech2(_TransformersAttention):
    """Stand-in with a mask (B, 1, L) for all queries; fully masked rows give zeros, as in the operator."""

    zeros_where_fully_masked = True

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        pos_emb: Tensor | None = None,
        output_attentions: bool | None = False,
    ) -> tuple[Tensor, Tensor | None]:
        batch, length = hidden_states.shape[:2]
        if output_attentions or (attention_mask is not None and attention_mask.shape != (batch, 1, length)):
            self._check_no_window(hidden_states)
            return super().forward(hidden_states, attention_mask, pos_emb, output_attentions)
        mask = EVERYTHING if attention_mask is None else padding_mask(attention_mask)
        return self._attend(hidden_states, pos_emb, mask, in_force(self.dropout))


class _Wav2Vec2(_TransformersAttention):
    """Stand-in for position_embeddings_type "relative" and "relative_key"."""

    def check_accelerable(self) -> None:
        kind = self.config.position_embeddings_type
        if kind not in ("relative", "relative_key"):
            raise ValueError(
                f'{type(self).__name__} must have position_embeddings_type "relative" or "relative_key" to be '
                f"accelerated, got {kind!r}: it has no relative term"
            )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        relative_position_embeddings: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if isinstance(attention_mask, PaddingRow):
            attention_mask = attention_mask.plain()
        if attention_mask is not None and attention_mask.shape[2] == 1 < hidden_states.shape[1]:  # for all queries
            mask: LayerMask | None = of_keys(visible_pairs(attention_mask)[:, 0, 0])
        else:
            mask = layer_mask(attention_mask)
        # Adapters have no relative positions, even in a model with them.
        if mask is None or self._wants_original(options) or self.position_embeddings_type is None:
            if self.position_embeddings_type is not None:
                self._check_no_window(hidden_states)
            if relative_position_embeddings is not None:
                options["relative_position_embeddings"] = relative_position_embeddings
            return super().forward(hidden_states, attention_mask, **options)
        dropout_p = self.dropout.p if self.training else 0.0  # as in transformers, regardless of the dropout's mode
        return self._attend(hidden_states, relative_position_embeddings, mask, dropout_p)


class _Encoder(Original):
    """Encoder that keeps padding as one row for all queries where its attention is accelerated."""

    made_here = ()

    def _row(self, flags: Any) -> Any:
        return padding_row(flags) if self._is_ours() else flags

    def _is_ours(self) -> bool:
        return all(isinstance(layer.self_attn, _TransformersAttention) for layer in self.layers)


class _ParakeetEncoder(_Encoder):
    def _get_output_attention_mask(self, *inputs: Any, **options: Any) -> Any:
        flags = super()._get_output_attention_mask(*inputs, **options)  # type: ignore[misc]
        return TracedRow(flags) if exports_to_onnx() and self._is_ours() else self._row(flags)


class _Wav2Vec2Encoder(_Encoder):
    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, *inputs: Any, **options: Any) -> Any:
        return super().forward(hidden_states, self._row(attention_mask), *inputs, **options)


class _SeamlessV2Encoder(_Wav2Vec2Encoder):
    def _apply_chunk_attention(self, attention_mask: Tensor | None, hidden_states: Tensor) -> Tensor | None:
        """Skip transformers' map of all pairs, which it makes even for one chunk."""
        if hidden_states.shape[1] <= self.config.speech_encoder_chunk_size:
            return attention_mask
        flags = attention_mask.plain() if isinstance(attention_mask, PaddingRow) else attention_mask
        return super()._apply_chunk_attention(flags, hidden_states)  # type: ignore[misc]


# Name of transformers' class -> its folder, and the stand-in's methods.
_CLASSES = {
    "ParakeetEncoderAttention": ("parakeet", _Parakeet),
    "NemotronAsrStreamingEncoderAttention": ("nemotron_asr_streaming", _NemotronStreaming),
    "FastSpeech2ConformerAttention": ("fastspeech2_conformer", _FastSpeech2),
    "Wav2Vec2ConformerSelfAttention": ("wav2vec2_conformer", _Wav2Vec2),
    "Wav2Vec2BertSelfAttention": ("wav2vec2_bert", _Wav2Vec2),
    "SeamlessM4TConformerSelfAttention": ("seamless_m4t", _Wav2Vec2),
    "SeamlessM4Tv2ConformerSelfAttention": ("seamless_m4t_v2", _Wav2Vec2),
    "ParakeetEncoder": ("parakeet", _ParakeetEncoder),
    "ParakeetEncoderBlock": ("parakeet", _ParakeetBlock),
    "Wav2Vec2ConformerEncoder": ("wav2vec2_conformer", _Wav2Vec2Encoder),
    "Wav2Vec2BertEncoder": ("wav2vec2_bert", _Wav2Vec2Encoder),
    "SeamlessM4TConformerEncoder": ("seamless_m4t", _Wav2Vec2Encoder),
    "SeamlessM4Tv2ConformerEncoder": ("seamless_m4t_v2", _SeamlessV2Encoder),
}


def __getattr__(name: str) -> type:
    return make_stand_in(name, __name__, _CLASSES)
