"""Workarounds for Triton's compiler: functions that return their argument and hide its origin from the compiler.

| workaround | needed by | without it |
|---|---|---|
| `opaque` | 3.6 to 3.9 | loads move in front of a loop, and their values are spilled |
| `materialise` | 3.6 to 3.9 | an operand of a product stays in shared memory, although registers are faster |
| `computed_once` | 3.9 on sm_90 | a value from branches is computed again for each layout |
| `without_joins` | 3.9 | products with the result of tl.join get a layout for 8-bit operands |
| a loop of one, in backward_rows.py's kernel | 3.9 on sm_80 | ptxas gives some calls 32 registers and spills |

features.py has the features that are on or off by version and GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def opaque(x, step):
    """`x`, for any `step` below 2^30; the compiler cannot see that it is constant in a loop."""
    return x + (step >> 30)


@triton.jit
def materialise(x):
    """Floating-point `x` as a separate value, to keep it in registers."""
    x += 0.0
    return x


@triton.jit
def computed_once(x):
    """16-bit `x` (ROWS, COLUMNS) from an instruction that the compiler cannot repeat."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", (x,), x.dtype, is_pure=False, pack=2)


@triton.jit
def without_joins(x):
    """`x` (A, B, C) as sums of one number each, to hide that it comes from tl.join."""
    return tl.sum(tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2], 1)), 3)
