"""Stand-ins for transformers' XLNet: the base model, models with a head, layers, and their attention."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.xlnet import modeling_xlnet

from .._torch import has_hooks
from ..attention import TwoStreamAttention
from ..call import collect, with_memory
from ..ddp_unused import with_unused
from ..masks import RankMask
from ..model.inputs import find_mask, find_padding, find_targets, stack_rows
from ..prepared import of_rows
from ..segments import Segments
from ..two_streams import RowPositions
from ._own_methods import leads
from .adapter import say_once
from .fully_masked_rows import average_weights, find_fully_masked_rows


@dataclass(eq=False)
class Rows:
    """Inputs that the model prepares once for the attention of all layers, for L content rows and the query rows.

    mask, segment_rows, positions, mapping: as `TwoStreamAttention.attend` takes them.
    fully_masked: fully masked query rows, their indices (B, n) among all rows and a mask of valid indices; or None.
    """

    mask: RankMask | Tensor | None
    segment_rows: tuple[Tensor, Tensor] | None
    positions: RowPositions | None
    mapping: Tensor | None
    fully_masked: tuple[Tensor, Tensor] | None
    query_rows_only: bool = False

    def to(self, device: torch.device | str) -> Rows:
        """Copy on another device, because hooks of HF accelerate move a layer's arguments."""
        return replace(
            self,
            mask=self.mask if self.mask is None else self.mask.to(device),
            segment_rows=_pair_to(self.segment_rows, device),
            positions=self.positions if self.positions is None else self.positions.to(device),
            mapping=self.mapping if self.mapping is None else self.mapping.to(device),
            fully_masked=_pair_to(self.fully_masked, device),
        )

    def of_query_rows(self, length: int) -> Rows:
        """The inputs of a last layer, whose L content rows are only keys and values because their output is unused."""
        assert self.positions is not None and self.mapping is None, "there are query rows, each at a position"
        position = self.positions.position
        batch, total = position.shape
        wanted = torch.arange(length, total, device=position.device).expand(batch, -1)
        mask, segment_rows, positions = of_rows(wanted, self.mask, self.segment_rows, self.positions)
        fully_masked = None if self.fully_masked is None else (self.fully_masked[0] - length, self.fully_masked[1])
        return Rows(mask, segment_rows, positions, None, fully_masked, query_rows_only=True)


def _pair_to(pair: tuple[Tensor, Tensor] | None, device: torch.device | str) -> tuple[Tensor, Tensor] | None:
    return None if pair is None else (pair[0].to(device), pair[1].to(device))


class XLNetPreTrainedModel(modeling_xlnet.XLNetPreTrainedModel):
    """Stand-in for a model with a head."""

    supports_gradient_checkpointing = True


class XLNetLayer(modeling_xlnet.XLNetLayer, GradientCheckpointingLayer):
    """Stand-in for a layer, with gradient checkpointing."""

    made_here = ("gradient_checkpointing", "_gradient_checkpointing_func")


class XLNetModel(modeling_xlnet.XLNetModel):
    """Stand-in for the base model: layers get a `Rows` in place of masks."""

    supports_gradient_checkpointing = True

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        mems=None,
        perm_mask=None,
        target_mapping=None,
        token_type_ids=None,
        input_mask=None,
        inputs_embeds=None,
        use_mems=None,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
        **kwargs,
    ):
        """Compute as transformers' XLNetModel, with the same arguments."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError(
                f"give either input_ids or inputs_embeds, got {'neither' if input_ids is None else 'both'}"
            )
        batch, length = (inputs_embeds if input_ids is None else input_ids).shape[:2]
        if target_mapping is not None and target_mapping.shape[-1] != length:
            other = "target_mapping has positions that the text has not"
        elif not self.serves_parts():
            other = f"{type(self).__name__} has layers without accelerated attention"
        else:
            other = ""
        if other:
            say_once(f"{other}: transformers' code computes it")
            return super().forward(
                input_ids,
                attention_mask,
                mems,
                perm_mask,
                target_mapping,
                token_type_ids,
                input_mask,
                inputs_embeds,
                use_mems,
                output_attentions,
                output_hidden_states,
                return_dict,
                **kwargs,
            )

        config = self.config
        if use_mems is None:
            use_mems = config.use_mems_train if self.training else config.use_mems_eval
        if output_attentions is None:
            output_attentions = config.output_attentions
        if output_hidden_states is None:
            output_hidden_states = config.output_hidden_states
        if return_dict is None:
            return_dict = config.return_dict

        # length comes first here, as in transformers
        if inputs_embeds is None:
            words = self.word_embedding(input_ids.transpose(0, 1).contiguous())
        else:
            words = inputs_embeds.transpose(0, 1).contiguous()
        if mems is None or mems[0] is None:
            mems = [None] * len(self.layer)
        past = 0 if mems[0] is None else mems[0].shape[0]
        rows = self._find_rows(
            words.transpose(0, 1),
            past,
            attention_mask,
            input_mask,
            perm_mask,
            target_mapping,
            token_type_ids,
            output_attentions,
        )
        h, g = self.dropout(words), None
        if target_mapping is None:
            h = with_unused(h, self.mask_emb)
        else:
            g = self.dropout(self.mask_emb.to(words.dtype).expand(target_mapping.shape[1], batch, -1))
        rel_pos = self.dropout(self._find_positions(words, past))

        new_mems, hidden_states, attentions = [], [], []
        brief = g is not None and rows.mapping is None and not (output_hidden_states or output_attentions)
        for index, (layer, kept) in enumerate(zip(self.layer, mems, strict=True)):
            if brief and index == len(self.layer) - 1 and not any(has_hooks(part) for part in layer.modules()):
                rows = rows.of_query_rows(length)
            if use_mems:
                new_mems.append(self.cache_mem(h, kept))
            if output_hidden_states:
                hidden_states += [h] if g is None else [h, g]
            h, g, *weights = layer(h, g, rows, None, rel_pos, None, kept, None, output_attentions)
            attentions += weights
        if output_hidden_states:
            hidden_states += [h] if g is None else [h, g]
        output = self.dropout(h if g is None else g).transpose(0, 1).contiguous()

        new_mems = tuple(new_mems) if use_mems else None
        hidden_states = tuple(x.transpose(0, 1).contiguous() for x in hidden_states) if output_hidden_states else None
        attentions = tuple(_batch_first(x) for x in attentions) if output_attentions else None
        if not return_dict:
            return tuple(x for x in (output, new_mems, hidden_states, attentions) if x is not None)
        return modeling_xlnet.XLNetModelOutput(output, new_mems, hidden_states, attentions)

    def serves_parts(self) -> bool:
        """Whether the model and all its layers still run accelerated, none replaced or restored."""
        for layer in self.layer:
            attention = [x for x in layer.modules() if isinstance(x, modeling_xlnet.XLNetRelativeAttention)]
            if not attention or not all(isinstance(x, XLNetRelativeAttention) for x in attention):
                return False
            if not all(map(leads, (layer, *attention))):
                return False
        return leads(self)

    def _find_rows(
        self,
        h: Tensor,
        past: int,
        attention_mask: Tensor | None,
        input_mask: Tensor | None,
        perm_mask: Tensor | None,
        target_mapping: Tensor | None,
        token_type_ids: Tensor | None,
        output_attentions: bool,
    ) -> Rows:
        """`Rows` from hidden states (B, L, d_model) and the arguments of the call."""
        unidirectional = self.attn_type == "uni"
        same_length = self.same_length and unidirectional
        padding = find_padding(attention_mask, input_mask, h)
        mask, segment_rows, positions, mapping, empty = stack_rows(
            h,
            past,
            self.config.n_head,
            mask=find_mask(None, perm_mask, padding, same_length, h, past),
            targets=find_targets(target_mapping, None, h, output_attentions),
            token_type_ids=token_type_ids,
        )
        if output_attentions:
            say_once("output_attentions=True: attention maps come from the reference backend, as slow as transformers'")
        elif mapping is not None:
            say_once("target_mapping has rows that are not one-hot: all L query rows are computed, as in transformers")
        fully_masked = None
        # All rows see the memory, except for a window that begins in the segment.
        if mask is not None and positions is not None and (past == 0 or same_length):
            fully_masked = find_fully_masked_rows(mask, positions.position, empty, h.shape[1], past, unidirectional)
        return Rows(mask, segment_rows, positions, mapping, fully_masked)

    def _find_positions(self, words: Tensor, past: int) -> Tensor:
        """Positions (P, 1, d_model), or (P, 2, d_model) for forward and reversed text."""
        length, batch = words.shape[:2]
        if self.bi_data and batch % 2 and batch > 1:
            raise ValueError(
                f"bi_data needs an even batch (half forward, half reversed) or a single forward sequence, got {batch}"
            )
        rel_pos = self.relative_positional_encoding(length, past + length, device=words.device).to(words.dtype)
        return rel_pos[:, :1] if batch == 1 else rel_pos


class XLNetRelativeAttention(modeling_xlnet.XLNetRelativeAttention, TwoStreamAttention):
    """Stand-in computed by TwoStreamAttention, with transformers' parameters and layout (length, batch, d_model)."""

    backend, norm = None, "post"
    no_window = "its memory and its query stream have masks of their own"
    made_here = ("backend",)

    def forward(
        self, h, g, attn_mask_h, attn_mask_g, r, seg_mat, mems=None, target_mapping=None, output_attentions=False
    ):
        """Attend; attn_mask_h is a `Rows`, and transformers' code computes other masks."""
        rows = attn_mask_h
        if not isinstance(rows, Rows):
            say_once(f"{type(self).__name__} was called with masks of its own: transformers' code computes it")
            return super().forward(h, g, attn_mask_h, attn_mask_g, r, seg_mat, mems, target_mapping, output_attentions)
        length, batch = h.shape[:2]
        content = h.transpose(0, 1).contiguous()
        rel_key = self.project_positions(r.transpose(0, 1))
        rel_key = rel_key[0] if len(rel_key) == 1 else rel_key.repeat_interleave(batch // len(rel_key), 0)
        if g is None:
            stacked = content
        elif rows.query_rows_only:
            stacked = g.transpose(0, 1)
        else:
            stacked = torch.cat([content, g.transpose(0, 1)], 1)
        out, weights = self.attend(
            stacked,
            self.project(content),
            rel_key,
            memory=None if mems is None else self.project(mems.transpose(0, 1)),
            mask=rows,
            segment_rows=rows.segment_rows,
            positions=rows.positions,
            mapping=rows.mapping,
            need_weights=output_attentions,
        )
        out = out.transpose(0, 1)
        if rows.query_rows_only:
            return out[:0], out
        outputs = (out, None) if g is None else (out[:length], out[length:])
        if output_attentions:
            weights = weights.permute(2, 3, 0, 1)
            outputs += (weights if g is None else (weights[:length], weights[length:]),)
        return outputs

    def _heads(self, x: Tensor, weight: Tensor) -> Tensor:
        # Cast, because from_pretrained(dtype=torch.bfloat16) leaves these weights in float32.
        return super()._heads(x, weight.to(x.dtype))

    def _attention(self, query, key, value, rel_key, *, mask, need_weights, **options):
        """The operator, with the average of all values added to the zeros of fully masked rows."""
        for name in ("content_bias", "position_bias"):
            options[name] = options[name].to(query.dtype)
        segments = options["segments"]
        if segments is not None:
            embed, bias = segments.embed.to(query.dtype), segments.bias.to(query.dtype)
            options["segments"] = Segments(segments.query_ids, segments.key_ids, embed, bias)
        out, weights = super()._attention(
            query, key, value, rel_key, mask=mask.mask, need_weights=need_weights, **options
        )
        if mask.fully_masked is None:
            return out, weights
        index, counts = mask.fully_masked
        call = collect(query, key, value, rel_key, **options)
        average = average_weights(call, index) * counts[:, None, :, None]
        index = index[:, None, :, None]
        seen = average.to(value.dtype) @ with_memory(call.memory_value, value)
        out = out.scatter_add(2, index.expand_as(seen), seen.to(out.dtype))
        if weights is not None:
            weights = weights.scatter_add(2, index.expand_as(average), average.to(weights.dtype))
        return out, weights


def _batch_first(weights: Tensor | tuple[Tensor, Tensor]) -> Tensor | tuple:
    """Attention maps (L, M + L, B, H) as (B, H, L, M + L)."""
    if isinstance(weights, tuple):
        return tuple(_batch_first(x) for x in weights)
    return weights.permute(2, 3, 0, 1).contiguous()
