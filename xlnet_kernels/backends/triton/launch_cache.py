"""Cache of launch plans: all values that follow from a call's signature, made once for each signature.

A signature is the shapes, strides and dtypes of all given tensors, and every number. It determines the compiled
kernels, except for the alignment of pointers. No plan depends on the values of a tensor. To change the table of tiles
or Triton's compile knobs (debug, instrumentation, stages) at run time, clear `plans`.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from ..._environment import INTERPRETED
from ..._first_use import compiling
from ..._precision import allows_tf32
from ...call import INPUT_NAMES
from ...dropout import threshold
from . import tuning
from .arguments import PADDING
from .features import is_on

_LINEAR = ("query", "content_bias", "position_bias", "segment_bias")  # every score is linear in all of these together
_MATRICES = ("query", "key", "value", "rel_key", "memory_key", "memory_value")
# Replaces a scale of 0, because 0 times minus infinity is NaN.
_TINY = torch.finfo(torch.float32).tiny
_MOST = 8192  # plans kept, a few KB each: two (forward, backward) for each of 4096 lengths

plans: dict[tuple, Plan] = {}
# A lock, because backward runs in autograd's threads.
_inserting = threading.Lock()


class Plan:
    """Values shared by all calls with one signature."""

    def __init__(self, tensors: dict[str, Tensor], max_distance: int, dropout_p: float, scale: float) -> None:
        query, key, rel_key, memory_key = (tensors[name] for name in ("query", "key", "rel_key", "memory_key"))
        self.device, self.dtype = query.device, query.dtype
        # Because the kernels need a positive scale.
        self.negated = _LINEAR if scale < 0 else ()
        self.scale = abs(scale) or _TINY
        self.batch, self.heads, self.length, self.head_dim = query.shape
        self.mem_len = 0 if memory_key is None else memory_key.shape[2]
        self.keys = self.mem_len + key.shape[2]
        self.rel_len = rel_key.shape[-2]
        self.groups = self.heads if rel_key.dim() == 3 else self.batch * self.heads
        self.is_empty = query.numel() == 0 or self.keys == 0
        self.has_tests = any(tensors[name] is not None for name in ("mask", "key_rank", "key_ids"))
        self.in_order = tensors["query_positions"] is None
        self.bounded = (max_distance < self.keys - 1, self.rel_len < max_distance + key.shape[2])  # behind, ahead
        self.has_unread_keys, self.has_unread_rel_rows = self._may_leave_unread(tensors, max_distance)
        self.precision = precision_of(query.dtype, dropout_p)
        self.kind = tuning.kind_of(query.dtype, self.precision)
        self.kept_scale = 1 / (1 - dropout_p)
        bits = threshold(dropout_p)
        self.numbers = {
            "heads": self.heads, "length": self.length, "mem_len": self.mem_len, "key_len": key.shape[2],
            "rel_len": self.rel_len, "max_distance": max_distance,
            # As int32, because kernels take int32.
            "threshold": bits - 2**32 if bits >= 2**31 else bits,
        }  # fmt: skip
        self.rows = (self.batch, self.heads, self.length)
        self.padded_keys, length = (-(-count // PADDING.value) * PADDING.value for count in (self.keys, self.length))
        self.padded_rows = (self.batch, self.heads, length)
        self.strides = {  # of matrices read without a copy
            name: matrix_strides(tensors[name]) if name not in self.negated and is_addressable(tensors[name]) else None
            for name in _MATRICES
            if tensors[name] is not None
        }
        self._configs: dict[str, tuning.Config] = {}
        self._options: dict[str, dict[str, bool]] = {}
        self.kernels: dict[tuple[str, int], tuple[Any, Any]] = {}  # (name, alignment) -> compiled, META

    def _may_leave_unread(self, tensors: dict[str, Tensor], max_distance: int) -> tuple[bool, bool]:
        """Whether some key, and some row of rel_key, may be unread."""
        if tensors["mask"] is not None or tensors["key_rank"] is not None:
            return True, True
        if tensors["query_positions"] is not None:
            return any(self.bounded), True
        first_key = self.mem_len - max_distance  # the first key for which row 0 has a row of rel_key
        last_key = first_key + self.length - 1 + self.rel_len - 1  # the last key for which the last row has one
        first_rel_row = 1 - self.length - first_key  # for the last row's first key
        last_rel_row = self.keys - 1 - first_key  # for the first row's last key
        return first_key > 0 or last_key < self.keys - 1, first_rel_row > 0 or last_rel_row < self.rel_len - 1

    @functools.cached_property
    def capability(self) -> tuple[int, int] | None:
        return None if INTERPRETED else torch.cuda.get_device_capability(self.device)

    def config(self, kernel: str) -> tuning.Config:
        """Tile configuration of `kernel`: one of tuning.KERNELS, or "preprocess", also for postprocess.py."""
        if kernel not in self._configs:
            name = "forward" if kernel == "preprocess" else kernel
            config = tuning.choose(name, self.kind, self.head_dim, self.capability)
            if kernel == "preprocess":
                config = tuning.PREPROCESS._replace(BLOCK_D=config.BLOCK_D)
            self._configs[kernel] = config
        return self._configs[kernel]

    def options(self, kernel: str) -> dict[str, bool]:
        """Options of launch.py's `Call.launch` for "forward" or "rows", the kernels that walk over keys.

        For the shift see shift_ptx.py and operands.py's `rows_of_tile`.
        """
        if kernel not in self._options:
            config = self.config(kernel)
            in_ptx = tuning.shifts_in_ptx(config, self.kind, self.capability)
            folded = in_ptx and config.BLOCK_M > config.BLOCK_N and self.in_order
            options = {"shift_ptx": in_ptx, "folded": folded}
            if kernel == "forward":
                options["in_registers"] = tuning.in_registers(self.head_dim, self.has_tests, self.capability)
                options["lazy"] = tuning.raises_late(config, self.capability)
            self._options[kernel] = options
        return self._options[kernel]

    def rotates_quads(self, config: tuning.Config) -> bool:
        """Whether shift.py's `rotate` takes QUADS."""
        return is_on("rotation in quads", self.capability) and tuning.in_quads(config, self.kind, self.capability)

    def title(self, kernel: str) -> str:
        """Name of a kernel of this plan, for log lines."""
        number = "".join(map(str, self.capability or ()))
        dtype = str(self.dtype).removeprefix("torch.")
        return f"the Triton kernel {kernel} for sm_{number} ({dtype}, head_dim {self.head_dim})"

    @functools.cached_property
    def takes_one_pass(self) -> bool:
        return tuning.takes_one_pass(self.config("rows"), self.kind, self.capability)

    @functools.cached_property
    def queues(self) -> tuple[int, int]:
        """Number of tiles in a run and of copies for each group, for ordered_accumulation.py.

        There are enough copies for two programs on each processor. A queue keeps as many tiles busy as a tile visits
        blocks of rel_key. So all copies but the first have about one block for each of these programs.
        """
        config = self.config("rows")
        tiles, blocks = -(-self.length // config.BLOCK_M), -(-min(self.keys, self.rel_len) // config.BLOCK_N)
        cuda = self.device.type == "cuda"
        processors = torch.cuda.get_device_properties(self.device).multi_processor_count if cuda else 2
        # 1 in a window, because neighbours visit the same blocks.
        run = 1 if self.rel_len < self.keys else tiles
        runs = tiles * self.batch * self.heads // (self.groups * run)
        return run, min(runs, -(-2 * processors // (self.groups * blocks)))


def precision_of(dtype: torch.dtype, dropout_p: float) -> str:
    """Precision of float32 products: one TF32 product where torch allows it, else three, as exact as float32."""
    if dtype != torch.float32 or (dropout_p and not is_on("TF32 with dropout")):
        return "ieee"
    return "tf32" if allows_tf32() else "tf32x3"


def is_addressable(tensor: Tensor) -> bool:
    """Whether kernels can read rows (..., D) without a copy: dense in D, offsets inside a head in int32."""
    return tensor.stride(-1) == 1 and tensor.shape[-2] * abs(tensor.stride(-2)) < 2**31


def matrix_strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides of batches, heads and rows; the batch stride of (H, rows, D) is 0."""
    return tensor.stride()[:3] if tensor.dim() == 4 else (0, *tensor.stride()[:2])


def find(inputs: Sequence, others: Sequence = ()) -> Plan:
    """The plan of a call with the operator's `inputs`; `others`: the operator's further arguments."""
    signature = _signature(inputs, others)
    plan = plans.get(signature)
    if plan is None:
        max_distance, dropout_p, scale = inputs[len(INPUT_NAMES) : len(INPUT_NAMES) + 3]
        plan = Plan(dict(zip(INPUT_NAMES, inputs, strict=False)), max_distance, dropout_p, scale)
        with _inserting:
            while len(plans) >= _MOST:
                plans.pop(next(iter(plans)))
            plans[signature] = plan
    return plan


def _signature(inputs: Sequence, others: Sequence) -> tuple:
    query = inputs[0]
    signature: list = [query.device, query.dtype == torch.float32 and allows_tf32(), len(others)]
    for values in (inputs, others):
        for value in values:
            if value is not None and isinstance(value, Tensor):
                signature += (value.dtype, value.shape, value.stride())
            else:
                signature.append(value)
    return tuple(signature)


def alignment(given: Sequence) -> int:
    """Bit mask of the tensors among `given` that begin at a multiple of 16 bytes."""
    bits = 1
    for value in given:
        if isinstance(value, Tensor):
            bits = 2 * bits + (value.data_ptr() % 16 == 0)
    return bits


def run(plan: Plan, kernel, aligned: int, count: int, given: dict[str, Any], describe: Callable[[], dict]) -> None:
    """Launch `count` programs of a kernel; `describe` makes META and Triton's options.

    The second launch of a plan and alignment skips Triton's binder, because the binder examines every argument again.


    Memory allocated by a call must be aligned to 16 bytes; torch's allocators align to 64 or more.
    """
    key = kernel.__name__, aligned
    kept = plan.kernels.get(key)
    if kept is None or kernel.pre_run_hooks:
        named = {name: given[name] for name in kernel.arg_names if name != "META"} | describe()
        with contextlib.nullcontext() if INTERPRETED else compiling(plan.title(kernel.__name__)):
            compiled = kernel[(count,)](**named)
        if _can_be_launched(compiled):
            plan.kernels[key] = compiled, named["META"]
    else:
        compiled, given["META"] = kept
        compiled[count, 1, 1](*[given[name] for name in kernel.arg_names])


def _can_be_launched(compiled) -> bool:
    """Whether this is Triton's CompiledKernel in a tested version; the interpreter has none."""
    return (
        is_on("launch past the binder")
        and isinstance(compiled, triton.compiler.CompiledKernel)
        and hasattr(compiled, "__getitem__")
    )
