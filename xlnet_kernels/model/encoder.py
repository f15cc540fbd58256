"""XLNetModel: embeddings, layers of two-stream attention and memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..attention import TwoStreamAttention
from ..ddp_unused import with_unused
from ..dropout import Dropout
from ..linear import Linear
from ..masks import RankMask
from ..positions import kept_positions
from ..prepared import Prepared, Projected, pick_rows
from ..two_streams import mask_of_targets
from .calls import model_call
from .checkpoint import PretrainedModel
from .config import ACTIVATIONS, XLNetConfig
from .inputs import (
    check_length,
    check_mems,
    check_words,
    find_mask,
    find_output_rows,
    find_padding,
    find_targets,
    stack_rows,
)
from .memory import Extension, ProjectedMemory, keep
from .outputs import XLNetOutput
from .work import Projection, Work


class XLNetFeedForward(nn.Module):
    """Feed-forward part of a layer."""

    def __init__(self, config: XLNetConfig) -> None:
        super().__init__()
        self.layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.layer_1 = Linear(config.d_model, config.d_inner)
        self.layer_2 = Linear(config.d_inner, config.d_model)
        self.dropout = Dropout(config.dropout)
        self.activation = ACTIVATIONS[config.ff_activation]

    def forward(self, x: Tensor) -> Tensor:
        inner = self.dropout(self.activation(self.layer_1(x)))
        return self.layer_norm(self.dropout(self.layer_2(inner)) + x)


class XLNetLayer(nn.Module):
    """Layer of attention and feed-forward, on stacked content and query rows."""

    def __init__(self, config: XLNetConfig, backend: str | None) -> None:
        super().__init__()
        self.rel_attn = TwoStreamAttention(
            config.d_model, config.n_head, config.d_head, config.dropout, config.layer_norm_eps, backend
        )
        self.ff = XLNetFeedForward(config)

    def forward(
        self, rows: Tensor, prepared: Prepared, mems: Tensor | None = None, projected: Projected | None = None
    ) -> tuple[Tensor, Tensor | None, Projected | None]:
        """Apply the layer to rows (B, R, d_model).

        Memory is layer inputs (M, B, d_model), or projected: key, value and rel_key table.

        Returns:
            The rows, the attention map or None, and, where memory is projected, the segment's key, value and table.
        """
        if mems is not None:
            mems = mems.transpose(0, 1)
        rows, weights, made = self.rel_attn(rows, mems=mems, prepared=prepared, projected=projected)
        return self.ff(rows) if prepared.attends else rows, weights, made


class XLNetModel(PretrainedModel):
    """XLNet without a head (Yang et al. 2019); with ``attn_type="uni"`` Transformer-XL (Dai et al. 2019).

    Parameter names are those of public checkpoints. Without targets and masks it is a plain encoder with relative
    positions; a `RankMask` makes it a language model in forward, backward or any other order.

    Args:
        config: the hyperparameters. Settings such as `config.mem_len` may be changed later, because each call reads
            them.
        backend: of the attention, None for the best available, or "reference", "torch", "cpu", "triton", "cuda".

    >>> config = XLNetConfig(vocab_size=100, d_model=32, n_layer=2, n_head=4, d_inner=64)
    >>> model = XLNetModel(config).eval()
    >>> ids = torch.randint(100, (2, 7))
    >>> model(ids).last_hidden_state.shape
    torch.Size([2, 7, 32])
    >>> targets = torch.tensor([[3, 5], [0, 6]])
    >>> model(ids, mask=RankMask.causal(2, 7), target_positions=targets).last_hidden_state.shape
    torch.Size([2, 2, 32])
    """

    def __init__(self, config: XLNetConfig, backend: str | None = None) -> None:
        super().__init__(config)
        config = self.config
        self.word_embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.mask_emb = nn.Parameter(torch.empty(1, 1, config.d_model))
        self.layer = nn.ModuleList([XLNetLayer(config, backend) for _ in range(config.n_layer)])
        self.dropout = Dropout(config.dropout)
        self.gradient_checkpointing = False
        self.apply(self.init_weights)
        nn.init.normal_(self.mask_emb, std=config.initializer_range)

    @model_call()
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        mems: list[Tensor] | ProjectedMemory | Work | None = None,
        perm_mask: Tensor | None = None,
        target_mapping: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        input_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        *,
        use_mems: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        mask: RankMask | None = None,
        target_positions: Tensor | None = None,
        mem_len: int | None = None,
        reuse_len: int | None = None,
        output_rows: Tensor | None = None,
    ) -> XLNetOutput:
        """Compute both streams, or the content stream only where there are no targets.

        Args:
            input_ids: (B, L) integers; or inputs_embeds: (B, L, d_model).
            attention_mask: (B, L), 1 or True = token; or input_mask: (B, L), 1 or True = padding.
            mems: memory returned by an earlier call: per layer (M, B, d_model), or `ProjectedMemory`. Every row sees
                all of it unless `mask` hides it. Used for any `use_mems`.
            perm_mask: (B, L, L), 1 or True = row i may not see j; content rows always see themselves. Or mask:
                RankMask of L rows and M + L keys (or L keys: all memory visible), linear in memory.
            target_mapping: (B, N, L), targets of the query stream, usually one-hot rows, which cost N rows. Any other
                mapping, and every mapping inside torch.compile, costs L rows. Or target_positions: (B, N) integers,
                which always cost N rows. Without mask and perm_mask, target_positions hide their tokens from every row
                but their own content rows (with attn_type "uni" the mask is causal). target_mapping hides nothing, as
                in transformers, so a query row sees its own target. A mask of one stream (`RankMask.padding`, `full`,
                `local`, `chunked`, `packed`) hides the targets' tokens in both cases.
            token_type_ids: (B, L) integers, segments; memory is segment 0. None: no segment term.
            use_mems: return memory; default config.use_mems_train or config.use_mems_eval.
            output_attentions: return the attention maps, computed by the dense reference backend (with L query rows for
                any target_mapping). output_hidden_states: return every layer's input and the output.
            mem_len, reuse_len: values for this call, in place of the configuration's.
            output_rows: (B, n) or (1, n) integers, the rows of last_hidden_state to return, from the end where
                negative; default all. The last layer computes only these.

        A fully masked query row (the first in its order, without memory) gives zeros; transformers averages over all
        keys, including hidden ones.

        Returns:
            `XLNetOutput`.

        Raises:
            ValueError: an argument has the wrong shape, dtype, device or value; the text names it.
        """
        if isinstance(mems, Work):
            return mems.run(self, input_ids)
        config = self.config
        check_words(input_ids, inputs_embeds, config, self.mask_emb)
        h = inputs_embeds if input_ids is None else self.word_embedding(input_ids.long())
        assert h is not None, "check_words asks for one of them"
        batch, length = h.shape[:2]
        past = check_mems(mems, config, batch, self.mask_emb, self.training)
        if use_mems is None:
            use_mems = config.use_mems_train if self.training else config.use_mems_eval
        if output_attentions is None:
            output_attentions = config.output_attentions
        if output_hidden_states is None:
            output_hidden_states = config.output_hidden_states
        mem_len = check_length("mem_len", mem_len, config.mem_len)
        reuse_len = check_length("reuse_len", reuse_len, config.reuse_len)

        padding = find_padding(attention_mask, input_mask, h)
        same_length = config.same_length and config.attn_type == "uni"
        targets = find_targets(target_mapping, target_positions, h, output_attentions)
        if mask is None and perm_mask is None and target_positions is not None:
            assert targets[0] is not None, "find_targets returns positions for positions"
            made = mask_of_targets(targets[0][:, length:], length, past, ahead=config.attn_type == "bi")
            assert isinstance(made, RankMask), "a mask that is made of targets alone is one of ranks"
            mask = made
        mask, segment_rows, positions, mapping, _ = stack_rows(
            h,
            past,
            config.n_head,
            mask=find_mask(mask, perm_mask, padding, same_length, h, past, targets),
            targets=targets,
            token_type_ids=token_type_ids,
        )
        g = None
        if positions is not None:
            count = positions.position.shape[1] - length if mapping is None else mapping.shape[1]
            g = self.mask_emb.expand(batch, count, -1)
        else:
            h = with_unused(h, self.mask_emb)
        rel_pos, reach, behind = self._find_positions(h, past, mems, mem_len)
        rel_rows = (reach - past - length, past + length + (length if config.attn_type == "bi" else 1))
        prepared = Prepared(length, rel_pos, rel_rows, mask, segment_rows, positions, mapping, output_attentions)
        rows = self.dropout(h if g is None else torch.cat([h, g], 1))
        recompute = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        # The last layer computes only the returned rows.
        wanted = find_output_rows(output_rows, rows, 0 if g is None else length)
        brief = wanted is not None and mapping is None and not (output_hidden_states or output_attentions)
        hidden_states, attentions = [rows], []
        layer_inputs: list[Tensor] = []
        layer_keys: list[tuple[Tensor, ...]] = []  # keys, values and tables
        extension = None
        if use_mems and isinstance(mems, ProjectedMemory):
            extension = Extension(mems, length, mem_len, reuse_len)
        for index, layer in enumerate(self.layer):
            if brief and wanted is not None and index == len(self.layer) - 1:
                prepared = prepared.of_rows(wanted)
            plain = projected = None
            if isinstance(mems, ProjectedMemory):
                projected = mems.of_layer(index)
            elif mems is not None:
                plain = mems[index]
            if use_mems and projected is None:
                layer_inputs.append(keep(plain, rows[:, :length].transpose(0, 1), mem_len, reuse_len, 0))
            if recompute:
                rows, weights, made = checkpoint(layer, rows, prepared, plain, projected, use_reentrant=False)
            else:
                rows, weights, made = layer(rows, prepared, plain, projected)
            if extension is not None and projected is not None:
                key, value = (extension.extend(*pair) for pair in zip(projected[:2], made[:2], strict=True))
                # Contiguous by head, because steps read the table head by head and `project_positions` interleaves
                # heads.
                layer_keys.append((key, value, made[2].detach().contiguous()))
            if output_hidden_states:
                hidden_states.append(rows)
            if output_attentions:
                attentions.append(weights)

        new_mems: list[Tensor] | ProjectedMemory | None = layer_inputs if use_mems else None
        if extension is not None:
            keys, values, tables = map(list, zip(*layer_keys, strict=True))
            new_mems = ProjectedMemory(keys, values, tables, reach, behind, extension.written)
        if g is not None:
            hidden_states = [stream for both in hidden_states for stream in (both[:, :length], both[:, length:])]
            attentions = [(both[:, :, :length], both[:, :, length:]) for both in attentions]
        return XLNetOutput(
            last_hidden_state=self.dropout(rows if brief or wanted is None else pick_rows(rows, wanted)),
            mems=new_mems,
            hidden_states=tuple(hidden_states) if output_hidden_states else None,
            attentions=tuple(attentions) if output_attentions else None,
        )

    @torch.no_grad()
    def project_mems(self, mems: list[Tensor] | None = None, batch: int = 1) -> ProjectedMemory:
        """Project memory to keys and values once, for stepping through a text at inference.

        Args:
            mems: memory returned by a call, or None for no memory yet.
            batch: number of sequences, where mems is None.

        >>> config = XLNetConfig(vocab_size=100, d_model=32, n_layer=2, n_head=4, d_inner=64, attn_type="uni")
        >>> model = XLNetModel(config).eval()
        >>> memory = model.project_mems(batch=3)
        >>> for ids in torch.randint(100, (3, 8)).split(1, dim=1):
        ...     memory = model(ids, mems=memory).mems
        >>> memory.length
        8
        """
        return self(mems=Projection(mems, batch), return_dict=True).mems

    def _find_positions(
        self, h: Tensor, past: int, mems: list[Tensor] | ProjectedMemory | None, mem_len: int | None
    ) -> tuple[Tensor | None, int, int]:
        """Positions to project, or None where the memory's tables suffice, and their `reach` and `behind`."""
        config, (batch, length) = self.config, h.shape[:2]
        if config.bi_data and batch % 2 and batch > 1:
            raise ValueError(
                f"bi_data needs an even batch (half forward, half reversed) or a single forward sequence, got {batch}"
            )
        reach, behind = past + length, length
        if isinstance(mems, ProjectedMemory):
            if mems.reach >= reach and mems.behind >= behind:
                return None, mems.reach, mems.behind
            # Extra room for later steps, to avoid new tables at every step.
            room = max(64, 2 * reach)
            reach, behind = max(reach, min(room, mem_len + length) if mem_len else room), max(behind, mems.behind)
        rel_pos = kept_positions(
            h,
            reach,
            behind,
            config.d_model,
            attn_type=config.attn_type,
            clamp_len=config.clamp_len,
            bi_data_batch=2 if config.bi_data and batch > 1 else None,
        )
        return self.dropout(rel_pos), reach, behind
