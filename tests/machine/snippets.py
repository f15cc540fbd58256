"""Kernels of a few lines of PTX, run on numpy arrays."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from lib.machine import machine

KINDS = {2: ("%h", "b16"), 4: ("%r", "b32"), 8: ("%d", "b64")}


def kernel(body: str, parameters: int, shared: int = 0, directives: str = "", declarations: str = "") -> str:
    """PTX of one kernel `k`: %r0 is the thread's index, %d0 ... the pointers given."""
    names = ", ".join(f".param .u64 p{i}" for i in range(parameters))
    loads = "\n".join(f"ld.param.u64 %d{i}, [p{i}];" for i in range(parameters))
    tile = f".shared .align 128 .b8 tile[{shared}];" if shared else ""
    return f"""
.version 8.0
.target sm_90a
.address_size 64
{declarations}
.visible .entry k({names})
{directives}
{{
.reg .pred %p<64>;
.reg .b16 %h<128>;
.reg .b32 %r<512>;
.reg .b64 %d<128>;
{tile}
mov.u32 %r0, %tid.x;
{loads}
{body}
ret;
}}
"""


def run(
    body: str, *arrays: np.ndarray, block: int = 32, grid: int = 1, architecture: int = 80, shared: int = 0,
    dynamic: int = 0, directives: str = "", declarations: str = "", read_only: tuple[int, ...] = (), **options: object,
) -> machine.Counts:  # fmt: skip
    """Launches a kernel of that body whose parameters are the arrays."""
    text = kernel(body, len(arrays), shared, directives, declarations)
    regions = [(array.ctypes.data, array.nbytes, i not in read_only, f"p{i}") for i, array in enumerate(arrays)]
    params = b"".join(struct.pack("<Q", array.ctypes.data) for array in arrays)
    return machine.Module(text, architecture).launch("k", (grid,), (block,), params, dynamic, regions, **options)


def fault(body: str, *arrays: np.ndarray, kind: str, **options: object) -> machine.Fault:
    """The error of `run`, which has one of the kinds in "one or another"."""
    with pytest.raises(machine.Fault) as error:
        run(body, *arrays, **options)
    assert error.value.kind in kind.split(" or "), error.value
    return error.value


def zeros(count: int = 64, dtype: type = np.uint32) -> np.ndarray:
    return np.zeros(count, dtype)


def at(array: int, element_bytes: int, into: str = "%d100") -> str:
    """The address of this thread's element of an array."""
    return f"mul.wide.u32 {into}, %r0, {element_bytes};\nadd.u64 {into}, {into}, %d{array};\n"


def lanewise(op: str, result: np.dtype, *inputs: np.ndarray, constants: str = "", **options: object) -> np.ndarray:
    """op applied to the inputs, one thread for each element. Predicates are given and returned as uint32 0 or 1."""
    body, names = "", []
    for i, array in enumerate(inputs):
        prefix, kind = KINDS[array.itemsize]
        name = f"{prefix}{10 + i}"
        body += at(i, array.itemsize) + f"ld.global.{kind} {name}, [%d100];\n"
        names.append(name)
    out = np.zeros(inputs[0].shape, result)
    prefix, kind = KINDS[out.itemsize]
    if op.startswith("setp"):
        body += f"{op} %p1, {', '.join(names)}{constants};\nselp.b32 %r99, 1, 0, %p1;\n"
        prefix = "%r"
    else:
        body += f"{op} {prefix}99, {', '.join(names)}{constants};\n"
    body += at(len(inputs), out.itemsize) + f"st.global.{kind} [%d100], {prefix}99;\n"
    run(body, *inputs, out, block=inputs[0].size, **options)
    return out
