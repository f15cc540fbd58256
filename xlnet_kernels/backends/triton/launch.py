"""Tensors -> kernel arguments -> launches; the only file here that knows both torch and the kernels."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor

from ...dropout import threshold
from ...masks import HIGHEST, LOWEST
from ...ops import DIFFERENTIABLE, INPUT_NAMES, rows_first
from . import INTERPRETED, tuning
from .backward_keys import keys_kernel
from .backward_rows import rows_kernel
from .forward import forward_kernel
from .tiles import BLOCK

_KEY_PADDING = 128  # at least the largest BN, so that vectors over keys are read without a mask and aligned
_LINEAR = ("query", "content_bias", "position_bias", "segment_bias")  # every score is linear in all of these together
_TINY = torch.finfo(torch.float32).tiny  # instead of a scale of 0, as 0 times minus infinity is NaN
_SLOT_BYTES = 2**30  # what the deterministic gradient of rel_key may take


def forward(*inputs) -> tuple[Tensor, Tensor]:
    """The operator `rel_attention_triton`."""
    query = inputs[0]
    out, lse = rows_first(query), query.new_empty(query.shape[:3], dtype=torch.float32)
    call = Call(inputs)
    if call.is_empty:
        return out.zero_(), lse.fill_(-torch.inf)
    config = call.config("forward")
    programs = _tiles(call.rows, config.BM) * call.batch * call.heads
    call.launch(forward_kernel, programs, config, out=out, lse=lse)
    return out, lse


def backward(
    grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, needs: list[bool], *inputs
) -> list[Tensor]:
    """The operator `rel_attention_triton_backward`."""
    call = Call(inputs)
    tensors, deterministic = call.tensors, inputs[-1]
    query, rel_key, width = tensors["query"], tensors["rel_key"], call.width
    rows_config, keys_config = call.config("rows"), call.config("keys")
    row_tiles, key_tiles = _tiles(call.rows, rows_config.BM), _tiles(call.keys, keys_config.BN)
    groups = call.heads if rel_key.dim() == 3 else call.batch * call.heads
    items = row_tiles * call.batch * call.heads // max(groups, 1)
    programs = _slots(items, rel_key, query.device) if deterministic else items
    slots = programs if deterministic else 1

    grads = {f"grad_{name}": rows_first(tensors[name]) for name in ("query", "key", "value")}
    for name in ("memory_key", "memory_value"):
        grads[f"grad_{name}"] = None if call.arguments[name] is None else rows_first(tensors[name])
    # Blocks reach beyond the last row: with room for that no element is tested.
    rel_rows = call.rel_rows + 4 * max(rows_config.BM, rows_config.BN)
    grad_rel = query.new_zeros(slots, groups, rel_rows, width, dtype=torch.float32)
    sums = query.new_zeros(call.batch, call.heads, row_tiles, 4, width, dtype=torch.float32)
    key_sums = query.new_zeros(call.batch, call.heads, key_tiles, width, dtype=torch.float32)
    if call.is_empty:
        for grad in grads.values():
            if grad is not None:
                grad.zero_()
    else:
        shared = grads | _matrix("grad_out", grad_out) | {"lse": lse.contiguous(), "delta": torch.empty_like(lse)}
        shared["kinds"] = None if call.arguments["key_ids"] is None else lse.new_empty(*lse.shape[:2], 2, call.rows)
        call.launch(
            rows_kernel, programs * groups, rows_config, **shared,
            out=out.transpose(1, 2).contiguous(), grad_lse=None if grad_lse is None else grad_lse.contiguous(),
            grad_rel=grad_rel, grad_rel_rows=rel_rows, sums=sums, tiles=row_tiles, items=items, groups=groups,
            programs=programs, NEEDS_REL=needs[INPUT_NAMES.index("rel_key")], ATOMIC=not deterministic,
        )  # fmt: skip
        call.launch(
            keys_kernel, key_tiles * call.batch * call.heads, keys_config, **shared, key_sums=key_sums,
            **call.row_bounds(),
        )  # fmt: skip

    rows_sum, same, different, segment_term = sums.sum((0, 2)).unbind(1)
    content = key_sums.sum((0, 2))
    grads |= {
        "grad_rel_key": grad_rel[:, :, : call.rel_rows].sum(0).view(rel_key.shape),
        "grad_content_bias": content,
        "grad_position_bias": rows_sum - content,  # dq = dq of the content term + dq of the position term
        "grad_segment_embed": torch.stack([same, different]),
        "grad_segment_bias": segment_term.clone(),  # results may not share storage
    }
    found = []
    for name, needed in zip(INPUT_NAMES[:DIFFERENTIABLE], needs, strict=True):
        original, grad = tensors[name], grads[f"grad_{name}"]
        if not needed or original is None:
            found.append(query.new_empty(0))
        else:  # memory of length zero has no gradient
            grad = torch.zeros_like(original) if grad is None else grad.to(original.dtype)
            found.append(-grad if name in call.negated else grad)
    return found


class Call:
    """One call of the operator as the kernels take it: `tensors` as given, `arguments` by the kernels' names."""

    def __init__(self, inputs: tuple) -> None:
        self.tensors = t = dict(zip(INPUT_NAMES, inputs, strict=False))
        key, memory_key = t["key"], t["memory_key"]
        max_distance, dropout_p, scale = inputs[len(INPUT_NAMES) : -1]
        self.negated = _LINEAR if scale < 0 else ()  # the kernels want a positive scale
        for name in self.negated:
            t[name] = None if t[name] is None else -t[name]
        query = t["query"]
        self.batch, self.heads, self.rows, self.width = query.shape
        self.mem_len = 0 if memory_key is None else memory_key.shape[2]
        self.keys = self.mem_len + key.shape[2]
        self.rel_rows = t["rel_key"].shape[-2]
        self.is_empty = query.numel() == 0 or self.keys == 0

        self.arguments = arguments = {}
        for name in ("query", "key", "value", "memory_key", "memory_value"):
            arguments |= _matrix(name, t[name] if self.mem_len or not name.startswith("memory") else None)
        rel_key = t["rel_key"] if t["rel_key"].dim() == 4 else t["rel_key"].expand(self.batch, -1, -1, -1)
        arguments |= {name.replace("rel_key_l", "rel_key_p"): a for name, a in _matrix("rel_key", rel_key).items()}
        for name in ("content_bias", "position_bias", "segment_embed", "segment_bias", "dropout_state"):
            arguments[name] = None if t[name] is None else t[name].contiguous()
        for name in ("query_ids", "query_rank", "query_floor"):
            arguments[name] = None if t[name] is None else t[name].int().contiguous()
        padded_keys = _tiles(self.keys, _KEY_PADDING) * _KEY_PADDING
        for name, beyond in (("key_ids", 0), ("key_rank", HIGHEST)):
            kind = name.removeprefix("key_").removesuffix("s")
            values = least = largest = None
            if t[name] is not None:
                values = F.pad(t[name].int(), (0, padded_keys - self.keys), value=beyond)
                least, largest = values.view(self.batch, padded_keys // BLOCK.value, BLOCK.value).aminmax(dim=2)
            arguments |= {name: values, f"{kind}_least": least, f"{kind}_largest": largest}
        sees_self, mask, positions = t["sees_self"], t["mask"], t["query_positions"]
        arguments["sees_self"] = None if sees_self is None else sees_self.contiguous().view(torch.uint8)
        arguments["mask"] = None if mask is None else mask.view(torch.uint8)
        strides = (0, 0, 0, 0) if mask is None else mask.stride()
        arguments |= zip(("mask_b", "mask_h", "mask_l", "mask_k"), strides, strict=True)
        arguments["positions"] = arguments["order"] = None
        if positions is not None:
            # Sorted, so that rows of one tile are near each other, a query row beside its content row.
            # Clamped: no one has looked at positions on a GPU, and additions to rel_key's gradient are not tested.
            positions = positions.clamp(0, max(key.shape[2] - 1, 0)).int().contiguous()
            positions, order = positions.sort(dim=1, stable=True)
            arguments |= {"positions": positions, "order": order.int()}
        bits = threshold(dropout_p)
        tf32 = query.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
        arguments |= {
            "heads": self.heads, "rows": self.rows, "mem_len": self.mem_len, "keys": self.keys,
            "padded_keys": padded_keys, "rel_rows": self.rel_rows, "max_distance": max_distance,
            "threshold": bits - 2**32 if bits >= 2**31 else bits,  # kernels take int32
            "scale": abs(scale) or _TINY, "kept_scale": 1 / (1 - dropout_p),
            "D": self.width, "CAUSAL": self.rel_rows == max_distance + 1, "PRECISION": "tf32" if tf32 else "ieee",
        }  # fmt: skip

    def row_bounds(self) -> dict[str, Tensor | None]:
        """The least rank and the largest floor of every BLOCK rows, sorted by position as the kernels take them."""
        found: dict[str, Tensor | None] = {}
        for name, result in (("query_rank", "row_rank_least"), ("query_floor", "row_floor_largest")):
            values, order = self.arguments[name], self.arguments["order"]
            if values is not None:
                values = values if order is None else values.gather(1, order.long())
                values = F.pad(values, (0, -self.rows % BLOCK.value), value=LOWEST).view(self.batch, -1, BLOCK.value)
                values = values.amin(2) if name == "query_rank" else values.amax(2)
            found[result] = values
        return found

    def config(self, kernel: str) -> tuning.Config:
        query = self.tensors["query"]
        capability = None if INTERPRETED else torch.cuda.get_device_capability(query.device)
        return tuning.choose(kernel, query.dtype, self.width, capability)

    def launch(self, kernel, count: int, config: tuning.Config, **arguments) -> None:
        """`count` programs of a kernel."""
        arguments = self.arguments | arguments | {name: getattr(config, name) for name in ("BM", "BN", "BC", "KEEP")}
        device = self.tensors["query"].device
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            kernel[(count,)](
                **{name: arguments[name] for name in kernel.arg_names},
                num_warps=config.num_warps,
                num_stages=config.num_stages,
                enable_fp_fusion=True,  # the default until Triton 3.10
            )


def _tiles(length: int, size: int) -> int:
    return -(-length // size)


def _matrix(name: str, tensor: Tensor | None) -> dict:
    """A (B, H, L, D) tensor whose last dimension is dense, and its other strides, as arguments."""
    names = (f"{name}_b", f"{name}_h", f"{name}_l")
    if tensor is None:
        return {name: None} | dict.fromkeys(names, 0)
    if tensor.stride(3) != 1 or tensor.shape[2] * abs(tensor.stride(2)) >= 2**31:  # offsets inside a head are int32
        tensor = tensor.contiguous()
    return {name: tensor} | dict(zip(names, tensor.stride(), strict=False))


def _slots(items: int, rel_key: Tensor, device: torch.device) -> int:
    """Copies of rel_key's gradient in deterministic mode: programs that can run at once, within _SLOT_BYTES."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
    groups = rel_key.shape[:-2].numel()
    return max(1, min(items, _tiles(2 * processors, max(groups, 1)), _SLOT_BYTES // max(4 * rel_key.numel(), 1)))
