"""Tensors -> kernel arguments -> launches; the only file here that knows both torch and the kernels."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ..._checks import allows_tf32
from ...dropout import threshold
from ...masks import HIGHEST, LOWEST
from ...ops import DIFFERENTIABLE, INPUT_NAMES, rows_first
from . import INTERPRETED, tuning
from . import arguments as args
from .backward_keys import keys_kernel
from .backward_rows import rows_kernel
from .finish import finish_kernel
from .forward import forward_kernel
from .mask import BOUND
from .prepare import prepare_kernel

_LINEAR = ("query", "content_bias", "position_bias", "segment_bias")  # every score is linear in all of these together
_TINY = torch.finfo(torch.float32).tiny  # instead of a scale of 0, as 0 times minus infinity is NaN
_VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
# Before 3.8 Triton leaves out half of a TF32 product over 16 rows one factor of which dropout has made: see
# docs/validation.md. Without TF32 there are no tensor cores.
_LOSES_TF32 = _VERSION < (3, 8)
_KEEPS_FRAGMENTS = _VERSION >= (3, 9)  # where shift.py's `rotate` takes them apart; what older ones do was not tried
_SLOT_BYTES = 2**30  # what the deterministic gradient of rel_key may take


def forward(*inputs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The operator `rel_attention_triton`."""
    *inputs, needs_backward = inputs
    query = inputs[0]
    out = rows_first(query)
    lse, row_max, row_sum = (query.new_empty(query.shape[:3], dtype=torch.float32) for _ in range(3))
    has_residual = needs_backward and query.dtype.itemsize == 2
    out_residual = rows_first(query) if has_residual else query.new_empty(0)
    results = out, lse, row_max, row_sum, out_residual
    call = Call(inputs)
    if call.is_empty:
        for result in results:
            result.zero_()
        lse.fill_(-torch.inf)
        return results
    call.prepare()
    config = call.config("forward")
    programs = _tiles(call.length, config.BLOCK_M) * call.batch * call.heads
    residual = out_residual if has_residual else None
    call.launch(
        forward_kernel, programs, config, in_registers=tuning.in_registers(call.capability),
        output=args.Output(*results[:4], residual),
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
    """The operator `rel_attention_triton_backward`."""
    call = Call(inputs)
    tensors, deterministic = call.tensors, inputs[-1]
    query, rel_key = tensors["query"], tensors["rel_key"]
    rows_config, keys_config = call.config("rows"), call.config("keys")
    row_tiles, key_tiles = _tiles(call.length, rows_config.BLOCK_M), _tiles(call.keys, keys_config.BLOCK_N)
    groups = call.heads if rel_key.dim() == 3 else call.batch * call.heads
    items = row_tiles * call.batch * call.heads // max(groups, 1)
    programs = _slots(items, rel_key, query.device) if deterministic else items

    grads = {name: rows_first(tensors[name]) for name in ("query", "key", "value")}
    for name in ("memory_key", "memory_value"):
        grads[name] = rows_first(tensors[name]) if call.mem_len else None
    room = args.ROOM.value * max(rows_config.BLOCK_M, rows_config.BLOCK_N)
    new_sums = functools.partial(query.new_empty, dtype=torch.float32)
    slots = programs if deterministic else 1
    grad_rel = query.new_zeros(slots, groups, call.rel_len + 2 * room, call.head_dim, dtype=torch.float32)
    sums = new_sums(call.batch, call.heads, row_tiles, 4, call.head_dim)
    key_sums = new_sums(call.batch, call.heads, key_tiles, call.head_dim)
    for name, needed in zip(INPUT_NAMES[:DIFFERENTIABLE], needs, strict=True):
        if name not in grads:
            wanted = needed and tensors[name] is not None
            grads[name] = torch.empty_like(tensors[name], memory_format=torch.contiguous_format) if wanted else None
    if call.is_empty:
        for grad in grads.values():
            if grad is not None:
                grad.zero_()
    else:
        residual = out_residual.transpose(1, 2).contiguous() if out_residual.numel() else None
        given = args.Given(
            out.transpose(1, 2).contiguous(), residual, row_max.contiguous(), row_sum.contiguous(), _matrix(grad_out),
            _dense(grad_lse),
        )  # fmt: skip
        prepared = call.prepare(given)
        call.launch(
            rows_kernel, programs * groups, rows_config, given=given, backward=prepared, items=items, programs=programs,
            result=args.RowGradients(grads["query"], grad_rel, sums),
            needs_rel=needs[INPUT_NAMES.index("rel_key")], atomic=not deterministic,
        )  # fmt: skip
        result = args.KeyGradients(grads["key"], grads["value"], grads["memory_key"], grads["memory_value"], key_sums)
        call.launch(keys_kernel, key_tiles * call.batch * call.heads, keys_config, backward=prepared, result=result)
        call.finish([grads[name] for name in args.ParameterGradients._fields], sums, key_sums, grad_rel, room)

    found = []
    for name, needed in zip(INPUT_NAMES[:DIFFERENTIABLE], needs, strict=True):
        original, grad = tensors[name], grads[name]
        if not needed or original is None:
            found.append(query.new_empty(0))
        else:  # memory of length zero has no gradient
            grad = torch.zeros_like(original) if grad is None else grad
            found.append(-grad if name in call.negated else grad)
    return found


class Call:
    """One call of the operator: its `tensors` as given, its `arguments` as every kernel takes them."""

    def __init__(self, inputs: Sequence) -> None:
        self.tensors = t = dict(zip(INPUT_NAMES, inputs, strict=False))
        max_distance, dropout_p, scale = inputs[len(INPUT_NAMES) : -1]
        self.negated = _LINEAR if scale < 0 else ()  # the kernels want a positive scale
        for name in self.negated:
            t[name] = None if t[name] is None else -t[name]
        self.scale = abs(scale) or _TINY
        query, key, rel_key, memory_key = t["query"], t["key"], t["rel_key"], t["memory_key"]
        self.batch, self.heads, self.length, self.head_dim = query.shape
        self.mem_len = 0 if memory_key is None else memory_key.shape[2]
        self.keys = self.mem_len + key.shape[2]
        self.rel_len = rel_key.shape[-2]
        self.is_empty = query.numel() == 0 or self.keys == 0
        self.bounded = (max_distance < self.keys - 1, self.rel_len < max_distance + key.shape[2])  # behind, ahead
        tf32 = query.dtype == torch.float32 and allows_tf32() and not (dropout_p and _LOSES_TF32)
        self.precision = "tf32" if tf32 else "ieee"

        biases = (_dense(t["content_bias"]), _dense(t["position_bias"]))
        rel_key = _addressable(rel_key)  # copied, if it must be, before it is repeated for every batch
        rel_key = rel_key if rel_key.dim() == 4 else rel_key.expand(self.batch, -1, -1, -1)
        memory = args.Keys(_matrix(memory_key), _matrix(t["memory_value"])) if self.mem_len else args.Keys()
        bits = threshold(dropout_p)
        self.arguments: dict[str, Any] = {
            "rows": args.Rows(_matrix(query), *biases, self.scale, *self._room_for_rows()),
            "keys": args.Keys(_matrix(key), _matrix(t["value"])),
            "memory": memory,
            "rel_key": _matrix(rel_key),
            "segments": self._segments(),
            "rank_mask": self._rank_mask(),
            "dense_mask": self._dense_mask(),
            "positions": self._positions(key.shape[2]),
            "dropout": args.Dropout(_dense(t["dropout_state"]), 1 / (1 - dropout_p)),
            "heads": self.heads, "length": self.length, "mem_len": self.mem_len, "key_len": key.shape[2],
            "rel_len": self.rel_len, "max_distance": max_distance,
            "threshold": bits - 2**32 if bits >= 2**31 else bits,  # kernels take int32
        }  # fmt: skip

    def _new_rows(self, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Of prepared rows, which are padded."""
        rows = _tiles(self.length, args.PADDING.value) * args.PADDING.value
        return self.tensors["query"].new_empty(self.batch, self.heads, rows, *size, dtype=dtype)

    def _room_for_rows(self) -> tuple[Tensor | None, ...]:
        """What prepare.py makes of query rows."""
        content, position = (self._new_rows(self.head_dim, dtype=self.tensors["query"].dtype) for _ in range(2))
        has_segments = self.tensors["key_ids"] is not None
        return content, position, *(self._new_rows() if has_segments else None for _ in range(2))

    def _segments(self) -> args.Segments:
        t = self.tensors
        for name in ("key_ids", "segment_embed"):
            if (t["query_ids"] is None) != (t[name] is None):
                raise ValueError(f"query_ids and {name} must come together")
        if t["segment_embed"] is None:
            if t["segment_bias"] is not None:
                raise ValueError("segment_bias must come with segment_embed")
            return args.Segments()
        key_ids, least, largest = self._padded_keys(t["key_ids"], 0)
        query_ids = t["query_ids"].int().contiguous()
        return args.Segments(_dense(t["segment_embed"]), _dense(t["segment_bias"]), query_ids, key_ids, least, largest)

    def _rank_mask(self) -> args.RankMask:
        rank, floor, own = (self.tensors[name] for name in ("query_rank", "query_floor", "sees_self"))
        if rank is None:
            return args.RankMask()
        key_rank, least, largest = self._padded_keys(self.tensors["key_rank"], HIGHEST)
        floor = None if floor is None else floor.int().contiguous()
        own = None if own is None else own.contiguous().view(torch.uint8)
        return args.RankMask(rank.int().contiguous(), key_rank, least, largest, floor, own)

    def _dense_mask(self) -> args.DenseMask:
        mask = self.tensors["mask"]
        return args.DenseMask() if mask is None else args.DenseMask(mask.view(torch.uint8), *mask.stride())

    def _positions(self, key_len: int) -> args.Positions:
        positions = self.tensors["query_positions"]
        if positions is None:
            return args.Positions()
        # Sorted, so that rows of one tile are near each other, a query row beside its content row.
        # Clamped: no one has looked at positions on a GPU, and additions to rel_key's gradient are not tested.
        positions = positions.clamp(0, max(key_len - 1, 0)).int().contiguous()
        positions, row = positions.sort(dim=1, stable=True)
        return args.Positions(row.int(), positions)

    def _padded_keys(self, values: Tensor, beyond: int) -> tuple[Tensor, Tensor, Tensor]:
        """One number per key, padded with `beyond`, and the least and the largest of every BOUND of them."""
        values = _padded(values.int(), beyond)
        return values, *_by_bound(values).aminmax(dim=2)

    def prepare(self, given: args.Given | None = None) -> args.Backward:
        """Launches what comes before the main kernels; `given` to backward, and then what it makes of that."""
        prepared = args.Backward()
        if given is not None:
            grad_out = self._new_rows(self.head_dim, dtype=given.grad_out.data.dtype)
            prepared = args.Backward(grad_out, *(self._new_rows() for _ in range(3)), *self._row_bounds())
        config = tuning.PREPARE._replace(BLOCK_D=self.config("forward").BLOCK_D)
        tiles = _tiles(self.length, args.PADDING.value) * (args.PADDING.value // config.BLOCK_M)
        programs = tiles * self.batch * self.heads
        self.launch(prepare_kernel, programs, config, given=given or args.Given(), backward=prepared)
        return prepared

    def finish(
        self, gradients: Sequence[Tensor | None], sums: Tensor, key_sums: Tensor, grad_rel: Tensor, room: int
    ) -> None:
        """Launches what makes `gradients` of parameters from sums over tiles, and of those over slots."""
        result = args.ParameterGradients(*gradients)
        config = tuning.PREPARE._replace(BLOCK_D=self.config("forward").BLOCK_D)
        slots, groups = grad_rel.shape[:2]
        parts = 4 if result.segment_embed is not None or result.segment_bias is not None else 1
        rel_programs = 0 if result.rel_key is None else groups * _tiles(self.rel_len, config.BLOCK_M)
        self.launch(
            finish_kernel, parts * self.heads + rel_programs, config, result=result, sums=sums, key_sums=key_sums,
            grad_rel=grad_rel, scale=self.scale, batch=self.batch, row_tiles=sums.shape[2],
            key_tiles=key_sums.shape[2], slots=slots, groups=groups, room=room, parts=parts,
        )  # fmt: skip

    def _row_bounds(self) -> tuple[Tensor | None, ...]:
        """The least and the largest rank and floor of every BOUND rows, in the order of their positions."""
        bounds: list[Tensor | None] = []
        mask, row = self.arguments["rank_mask"], self.arguments["positions"].row
        for values in (mask.query_rank, mask.query_floor):
            if values is None:
                bounds += [None, None]
            else:
                values = values if row is None else values.gather(1, row.long())
                bounds += _by_bound(_padded(values, LOWEST)).aminmax(dim=2)
        return tuple(bounds)

    @property
    def capability(self) -> tuple[int, int] | None:
        return None if INTERPRETED else torch.cuda.get_device_capability(self.tensors["query"].device)

    def config(self, kernel: str) -> tuning.Config:
        return tuning.choose(kernel, self.tensors["query"].dtype, self.head_dim, self.capability)

    def launch(
        self,
        kernel,
        count: int,
        config: tuning.Config,
        in_registers: bool = False,
        needs_rel: bool = False,
        atomic: bool = False,
        **arguments,
    ) -> None:
        """`count` programs of a kernel."""
        device = self.tensors["query"].device
        given = self.arguments | arguments
        quads = _KEEPS_FRAGMENTS and tuning.in_quads(config, self.tensors["query"].dtype, self.capability)
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            kernel[(count,)](
                **{name: given[name] for name in kernel.arg_names if name != "META"},
                META=_meta(
                    config, self.head_dim, *self.bounded, self.precision, quads, in_registers, needs_rel, atomic
                ),
                num_warps=config.num_warps,
                num_stages=config.num_stages,
                enable_fp_fusion=True,  # the default until Triton 3.10
                sanitize_overflow=False,  # with TRITON_DEBUG=1: shift.py and Philox count modulo 2^32
            )


@functools.cache
def _meta(config: tuning.Config, head_dim: int, *rest) -> args.Meta:
    return args.Meta(*map(tl.constexpr, (*config[:4], head_dim, *rest)))


def _tiles(length: int, size: int) -> int:
    return -(-length // size)


def _dense(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _padded(values: Tensor, beyond: int) -> Tensor:
    """(B, length) values to whole PADDINGs, so that vectors of them are read without a mask and aligned."""
    return F.pad(values, (0, -values.shape[1] % args.PADDING.value), value=beyond)


def _by_bound(values: Tensor) -> Tensor:
    """Padded values (B, length) as (B, length / BOUND, BOUND)."""
    return values.view(values.shape[0], values.shape[1] // BOUND.value, BOUND.value)


def _addressable(tensor: Tensor) -> Tensor:
    """Rows (..., D) as the kernels read them: dense in D, offsets inside a head in int32."""
    fits = tensor.stride(-1) == 1 and tensor.shape[-2] * abs(tensor.stride(-2)) < 2**31
    return tensor if fits else tensor.contiguous()


def _matrix(tensor: Tensor) -> args.Matrix:
    tensor = _addressable(tensor)
    return args.Matrix(tensor, *tensor.stride()[:3])


def _slots(items: int, rel_key: Tensor, device: torch.device) -> int:
    """Copies of rel_key's gradient in deterministic mode: programs that can run at once, within _SLOT_BYTES."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
    groups = rel_key.shape[:-2].numel()
    return max(1, min(items, _tiles(2 * processors, max(groups, 1)), _SLOT_BYTES // max(4 * rel_key.numel(), 1)))
