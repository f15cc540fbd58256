"""Launches of the kernels: the only module that uses both torch and the kernels."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ...call import DIFFERENTIABLE, INPUT_NAMES, PLACE
from ...masks import HIGHEST
from ...ops import check_segments_are_whole, rows_first
from . import arguments as args
from . import launch_cache, tuning
from .backward_keys import keys_kernel
from .backward_rows import rows_kernel
from .forward import forward_kernel
from .mask import BOUND
from .postprocess import postprocess_kernel
from .preprocess import preprocess_kernel


def forward(*inputs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Implementation of the operator `rel_attention_triton`."""
    *inputs, needs_backward = inputs
    query = inputs[0]
    call = Call(inputs, (needs_backward,))
    known = call.plan
    out = rows_first(query)
    lse, row_max, row_sum = [query.new_empty(*known.rows, dtype=torch.float32) for _ in range(3)]
    has_residual = needs_backward and query.dtype.itemsize == 2
    out_residual = rows_first(query) if has_residual else query.new_empty(0)
    results = out, lse, row_max, row_sum, out_residual
    if known.is_empty:
        for result in results:
            result.zero_()
        lse.fill_(-torch.inf)
        return results
    call.preprocess(args.Given(), call.copy_unread("value", rel_key=False))
    config = known.config("forward")
    programs = _tiles(known.length, config.BLOCK_M) * known.batch * known.heads
    residual = out_residual if has_residual else None
    call.launch(
        forward_kernel, programs, config, output=args.Output(*results[:4], residual), **known.options("forward"),
    )  # fmt: skip
    return results


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    out_residual: Tensor,
    row_max: Tensor,
    row_sum: Tensor,
    needs: list[bool],
    *inputs,
) -> list[Tensor]:
    """Implementation of the operator `rel_attention_triton_backward`."""
    call = Call(inputs, (grad_out, grad_lse, out, out_residual, row_max, row_sum, *needs))
    known, tensors, deterministic = call.plan, call.tensors, inputs[PLACE["deterministic"]]
    query, groups = tensors["query"], known.groups
    one_pass = known.takes_one_pass and not deterministic
    rows_config, keys_config = known.config("rows"), known.config("keys")
    row_tiles, key_tiles = _tiles(known.length, rows_config.BLOCK_M), _tiles(known.keys, keys_config.BLOCK_N)
    programs = row_tiles * known.batch * known.heads
    run, copies = known.queues if deterministic and not known.is_empty else (1, 1)

    grads = {name: rows_first(tensors[name]) for name in ("query", "key", "value")}
    for name in ("memory_key", "memory_value"):
        grads[name] = rows_first(tensors[name]) if known.mem_len else None
    room = args.ROOM.value * max(rows_config.BLOCK_M, rows_config.BLOCK_N)
    new_sums = functools.partial(query.new_empty, dtype=torch.float32)
    numbers = copies * groups * (known.rel_len + 2 * room) * known.head_dim
    grad_rel = query.new_zeros(numbers + (1 + programs if deterministic else 0), dtype=torch.float32)
    sums = new_sums(known.batch, known.heads, row_tiles, 4, known.head_dim)
    key_sums = new_sums(known.batch, known.heads, key_tiles, known.head_dim)
    for name, needed in zip(INPUT_NAMES[:DIFFERENTIABLE], needs, strict=True):
        if name not in grads:
            wanted = needed and tensors[name] is not None
            grads[name] = torch.empty_like(tensors[name], memory_format=torch.contiguous_format) if wanted else None
    if known.is_empty:
        for grad in grads.values():
            if grad is not None:
                grad.zero_()
    else:
        residual = _of_rows(out_residual) if out_residual.numel() else None
        given = args.Given(
            _of_rows(out), residual, row_max.contiguous(), row_sum.contiguous(), _matrix(grad_out),
            _dense(grad_lse),
        )  # fmt: skip
        preprocessed = call.preprocess(given, call.copy_unread("key", rel_key=True), bounds_rows=not one_pass)
        sums_of_keys = call.room_for_key_sums() if one_pass else args.KeySums()
        call.launch(
            rows_kernel, programs, rows_config, given=given, backward=preprocessed,
            groups=groups, run=run, copies=copies, key_sums=sums_of_keys,
            result=args.RowGradients(grads["query"], grad_rel, sums),
            needs_rel=needs[INPUT_NAMES.index("rel_key")], ordered=deterministic, one_pass=one_pass,
            **known.options("rows"),
        )  # fmt: skip
        result = args.KeyGradients(grads["key"], grads["value"], grads["memory_key"], grads["memory_value"], key_sums)
        call.launch(
            keys_kernel, key_tiles * known.batch * known.heads, keys_config, backward=preprocessed, result=result,
            key_sums=sums_of_keys, one_pass=one_pass,
        )  # fmt: skip
        call.postprocess(
            [grads[name] for name in args.ParameterGradients._fields], sums, key_sums, grad_rel, copies, room
        )

    found = []
    for name, needed in zip(INPUT_NAMES[:DIFFERENTIABLE], needs, strict=True):
        original, grad = tensors[name], grads[name]
        if not needed or original is None:
            found.append(query.new_empty(0))
        else:  # memory of length zero has no gradient
            grad = torch.zeros_like(original) if grad is None else grad
            found.append(-grad if name in known.negated else grad)
    return found


class Call:
    """One call of the operator: its `tensors` as given, and the `arguments` common to all kernels."""

    def __init__(self, inputs: Sequence, others: Sequence = ()) -> None:
        """Collect the inputs; `others`: the operator's other arguments."""
        self.given = (*inputs[: len(INPUT_NAMES)], *others)
        self.plan = known = launch_cache.find(inputs, others)
        self.tensors = t = dict(zip(INPUT_NAMES, inputs, strict=False))
        for name in known.negated:
            t[name] = None if t[name] is None else -t[name]
        biases = (_dense(t["content_bias"]), _dense(t["position_bias"]))
        matrix = self._matrix
        memory = args.Keys(matrix("memory_key"), matrix("memory_value")) if known.mem_len else args.Keys()
        self.arguments: dict[str, Any] = {
            "rows": args.Rows(matrix("query"), *biases, known.scale, *self._room_for_rows()),
            "keys": args.Keys(matrix("key"), matrix("value")),
            "memory": memory,
            "rel_key": matrix("rel_key"),
            "segments": self._segments(),
            "rank_mask": self._rank_mask(),
            "dense_mask": self._dense_mask(),
            "positions": self._positions(),
            "dropout": args.Dropout(_dense(t["dropout_state"]), known.kept_scale),
            **known.numbers,
        }

    def _matrix(self, name: str) -> args.Matrix:
        strides, tensor = self.plan.strides[name], self.tensors[name]
        return _matrix(tensor) if strides is None else args.Matrix(tensor, *strides)

    def _new_rows(self, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """New tensor over padded rows."""
        return self.tensors["query"].new_empty(*self.plan.padded_rows, *size, dtype=dtype)

    def _room_for_rows(self) -> tuple[Tensor | None, ...]:
        """New tensors for the query rows of preprocess.py."""
        content, position = (self._new_rows(self.plan.head_dim, dtype=self.tensors["query"].dtype) for _ in range(2))
        has_segments = self.tensors["key_ids"] is not None
        return content, position, *(self._new_rows() if has_segments else None for _ in range(2))

    def _segments(self) -> args.Segments:
        t = self.tensors
        check_segments_are_whole(t)
        if t["segment_embed"] is None:
            return args.Segments()
        vectors = (_int32(t["query_ids"]), *self._room_for_keys())
        return args.Segments(_dense(t["segment_embed"]), _dense(t["segment_bias"]), *vectors)

    def _rank_mask(self) -> args.RankMask:
        rank, floor, own = (self.tensors[name] for name in ("query_rank", "query_floor", "sees_self"))
        if rank is None:
            return args.RankMask()
        floor = None if floor is None else _int32(floor)
        own = None if own is None else own.contiguous().view(torch.uint8)
        return args.RankMask(_int32(rank), *self._room_for_keys(), floor, own)

    def _key_vectors(self) -> args.KeyVectors:
        ids, rank = self.tensors["key_ids"], self.tensors["key_rank"]
        return args.KeyVectors(None if ids is None else _int32(ids), None if rank is None else _int32(rank))

    def _dense_mask(self) -> args.DenseMask:
        mask = self.tensors["mask"]
        return args.DenseMask() if mask is None else args.DenseMask(mask.view(torch.uint8), *mask.stride())

    def _positions(self) -> args.Positions:
        """Sorted positions, so that rows of one tile are close, a query row beside its content row."""
        positions, row = self.tensors["query_positions"], self.tensors["query_order"]
        if positions is None:
            return args.Positions()
        if row is None:
            positions, row = positions.clamp(0, HIGHEST).sort(dim=1, stable=True)
        return args.Positions(_int32(row), _int32(positions))

    def _room_for_keys(self) -> tuple[Tensor, Tensor, Tensor]:
        """New tensors for one number per key, padded, and the least and the largest of every BOUND of them."""
        new, batch, count = self.tensors["query"].new_empty, self.plan.batch, self.plan.padded_keys
        least, largest = (new(batch, count // BOUND.value, dtype=torch.int32) for _ in range(2))
        return new(batch, count, dtype=torch.int32), least, largest

    def copy_unread(self, field: str, rel_key: bool) -> args.Copies:
        """Copies of a `field` of Keys and of rel_key, filled by preprocess.py for later kernels."""
        found = {}
        for name in ("keys", "memory") if self.plan.has_unread_keys else ():
            given = self.arguments[name]
            found[name] = _room_for_copy(getattr(given, field))
            self.arguments[name] = given._replace(**{field: found[name].copy})
        if rel_key and self.plan.has_unread_rel_rows:
            found["rel_key"] = _room_for_copy(self.arguments["rel_key"])
            self.arguments["rel_key"] = found["rel_key"].copy
        return args.Copies(**found)

    def preprocess(self, given: args.Given, copies: args.Copies, bounds_rows: bool = False) -> args.Backward:
        """Launch the preprocessing kernel; returns the rows made from `given`, the inputs of backward."""
        preprocessed = args.Backward()
        if given.row_sum is not None:
            grad_out = self._new_rows(self.plan.head_dim, dtype=given.grad_out.data.dtype)
            bounds = self._room_for_row_bounds() if bounds_rows else ()
            preprocessed = args.Backward(grad_out, *(self._new_rows() for _ in range(3)), *bounds)
        known, config, vectors = self.plan, self.plan.config("preprocess"), self._key_vectors()
        length, heads = known.padded_rows[2], known.batch * known.heads
        rows, shared, keys, rel_rows = length // config.BLOCK_M * heads, 0, 0, 0
        if vectors.ids is not None or vectors.rank is not None:
            shared = known.batch * (max(known.padded_keys, length) // args.PADDING.value)
        if copies.keys.given.data is not None:
            keys = heads * _tiles(known.keys, config.BLOCK_N)
        if copies.rel_key.given.data is not None:
            rel_rows = known.groups * _tiles(known.rel_len, config.BLOCK_N)
        self.launch(
            preprocess_kernel, rows + shared + keys + rel_rows, config, vectors=vectors, given=given,
            backward=preprocessed, copies=copies, batch=known.batch, groups=known.groups,
            row_programs=rows, vector_programs=shared, key_programs=keys,
        )  # fmt: skip
        return preprocessed

    def postprocess(
        self, gradients: Sequence[Tensor | None], sums: Tensor, key_sums: Tensor, grad_rel: Tensor, copies: int,
        room: int,
    ) -> None:  # fmt: skip
        """Launch the kernel that sums `gradients` of parameters over tiles and copies."""
        result = args.ParameterGradients(*gradients)
        config = self.plan.config("preprocess")
        parts = 4 if result.segment_embed is not None or result.segment_bias is not None else 1
        rel_programs = 0 if result.rel_key is None else self.plan.groups * _tiles(self.plan.rel_len, config.BLOCK_M)
        self.launch(
            postprocess_kernel, parts * self.plan.heads + rel_programs, config, result=result, sums=sums,
            key_sums=key_sums, grad_rel=grad_rel, scale=self.plan.scale, batch=self.plan.batch, row_tiles=sums.shape[2],
            key_tiles=key_sums.shape[2], copies=copies, groups=self.plan.groups, room=room, parts=parts,
        )  # fmt: skip

    def room_for_key_sums(self) -> args.KeySums:
        known = self.plan
        count = known.batch * known.heads * known.padded_keys
        sums = self.tensors["query"].new_zeros(count * (2 * known.head_dim + 1), dtype=torch.float32)
        return args.KeySums(*sums.split([count * known.head_dim, count * known.head_dim, count]))

    def _room_for_row_bounds(self) -> tuple[Tensor | None, ...]:
        """New tensors for the least and the largest rank and floor of every BOUND rows, by position."""
        query, rank, floor = (self.tensors[name] for name in ("query", "query_rank", "query_floor"))
        size = (self.plan.batch, self.plan.padded_rows[2] // BOUND.value)
        return tuple(
            None if values is None else query.new_empty(size, dtype=torch.int32)
            for values in (rank, rank, floor, floor)
        )

    def launch(
        self,
        kernel,
        count: int,
        config: tuning.Config,
        in_registers: bool = False,
        shift_ptx: bool = False,
        folded: bool = False,
        lazy: bool = False,
        needs_rel: bool = False,
        ordered: bool = False,
        one_pass: bool = False,
        **arguments,
    ) -> None:
        """Launch `count` programs of a kernel."""
        known, given = self.plan, self.arguments | arguments

        def describe() -> dict[str, Any]:
            quads = known.rotates_quads(config)
            meta = _meta(
                config, known.head_dim, *known.bounded, known.precision, quads, shift_ptx, folded, lazy, in_registers,
                needs_rel, ordered, one_pass,
            )  # fmt: skip
            options = {} if config.max_registers is None else {"maxnreg": config.max_registers}
            return options | {
                "META": meta,
                "num_warps": config.num_warps,
                "num_stages": config.num_stages,
                "enable_fp_fusion": True,  # the default until Triton 3.10
                # Also with TRITON_DEBUG=1, because shift.py and Philox count modulo 2^32.
                "sanitize_overflow": False,
            }

        elsewhere = known.device.type == "cuda" and known.device.index != torch.cuda.current_device()
        with torch.cuda.device(known.device) if elsewhere else contextlib.nullcontext():
            launch_cache.run(known, kernel, self.alignment, count, given, describe)

    @functools.cached_property
    def alignment(self) -> int:
        return launch_cache.alignment(self.given)


@functools.cache
def _meta(config: tuning.Config, head_dim: int, *rest) -> args.Meta:
    return args.Meta(*map(tl.constexpr, (*config[:4], head_dim, *rest)))


def _tiles(length: int, size: int) -> int:
    return -(-length // size)


def _int32(tensor: Tensor) -> Tensor:
    return tensor.int().contiguous()


def _dense(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _matrix(tensor: Tensor) -> args.Matrix:
    """Matrix (B, H, rows, D), or (H, rows, D) for every batch, copied where kernels could not read it."""
    tensor = tensor if launch_cache.is_addressable(tensor) else tensor.contiguous()
    return args.Matrix(tensor, *launch_cache.matrix_strides(tensor))


def _room_for_copy(matrix: args.Matrix) -> args.Copy:
    if matrix.data is None:
        return args.Copy()
    return args.Copy(matrix, _matrix(torch.empty_like(matrix.data, memory_format=torch.contiguous_format)))


def _of_rows(tensor: Tensor) -> Tensor:
    """(B, H, L, D), dense as (B, L, H, D): results of `rows_first` are not copied."""
    _, heads, length, width = tensor.shape
    is_dense = tensor.stride() == (length * heads * width, width, heads * width, 1)
    return tensor if is_dense else tensor.transpose(1, 2).contiguous()
