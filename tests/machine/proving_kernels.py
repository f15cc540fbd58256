"""Small Triton kernels with results that torch has too, to prove the machine."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def matmul(
    a, b, out, M, N, K, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out (M, N) = a (M, K) b (K, N), any sizes."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        x = tl.load(a + rows[:, None] * K + (k + inner)[None, :], (rows < M)[:, None] & (k + inner < K)[None, :], 0.0)
        y = tl.load(
            b + (k + inner)[:, None] * N + columns[None, :], (k + inner < K)[:, None] & (columns < N)[None, :], 0.0
        )
        total = tl.dot(x, y, total, input_precision=PRECISION)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(out + rows[:, None] * N + columns[None, :], total.to(out.dtype.element_ty), inside)


@triton.jit
def matmul_full(a, b, out, K, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """The product of a (M, K) and b stored as (N, K), sizes multiples of the blocks; b's tile is transposed."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        inner = k + tl.arange(0, BLOCK_K)
        x = tl.load(a + rows[:, None] * K + inner[None, :])
        y = tl.load(b + columns[:, None] * K + inner[None, :])
        total = tl.dot(x, y.T, total)
    tl.store(out + rows[:, None] * N + columns[None, :], total.to(out.dtype.element_ty))


@triton.jit
def descriptor_matmul(a, b, out, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """The first through tensor descriptors made in the kernel (TMA from sm_90 on)."""
    of_a = tl.make_tensor_descriptor(a, [M, K], [K, 1], [BLOCK_M, BLOCK_K])
    of_b = tl.make_tensor_descriptor(b, [K, N], [N, 1], [BLOCK_K, BLOCK_N])
    of_out = tl.make_tensor_descriptor(out, [M, N], [N, 1], [BLOCK_M, BLOCK_N])
    row, column = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        total = tl.dot(of_a.load([row, k]), of_b.load([k, column]), total)
    of_out.store([row, column], total.to(out.dtype.element_ty))


@triton.jit
def host_descriptor_copy(source, target, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """A copy through descriptors that the host made."""
    at = [tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N]
    target.store(at, source.load(at) * 2)


@triton.jit
def _add(a, b):
    return a + b


@triton.jit
def _scaled_add(decay, x, next_decay, y):
    return decay * next_decay, x * next_decay + y


@triton.jit
def reductions(x, sums, largest, where, columns_sum, bits, M: tl.constexpr, N: tl.constexpr):
    index = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    values = tl.load(x + index)
    rows, columns = tl.arange(0, M), tl.arange(0, N)
    tl.store(sums + rows, tl.sum(values, 1))
    tl.store(largest + rows, tl.max(values, 1))
    tl.store(where + rows, tl.argmax(values, 1))
    tl.store(columns_sum + columns, tl.reduce(values, 0, _add))
    integers = (values * 100).to(tl.int32)
    tl.store(bits + rows, tl.xor_sum(integers, 1))
    tl.store(bits + M + rows, tl.min(integers, 1))


@triton.jit
def scans(x, decay, sums, states, products, M: tl.constexpr, N: tl.constexpr):
    index = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    values = tl.load(x + index)
    tl.store(sums + index, tl.cumsum(values, 1))
    _, state = tl.associative_scan((tl.load(decay + index), values), 0, _scaled_add)
    tl.store(states + index, state)
    tl.store(products + index, tl.cumprod(tl.load(decay + index), 1, reverse=True))


@triton.jit
def softmax(x, out, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    values = tl.load(x + row * N + columns, columns < N, -float("inf")).to(tl.float32)
    values = tl.exp(values - tl.max(values, 0))
    tl.store(out + row * N + columns, (values / tl.sum(values, 0)).to(out.dtype.element_ty), columns < N)


@triton.jit
def atomics(x, histogram, total, largest, ticket, N, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < N
    values = tl.load(x + index, inside, 0)
    tl.atomic_add(histogram + values % 16, 1, inside)
    tl.atomic_add(total, tl.sum(values.to(tl.float32), 0))
    tl.atomic_max(largest, tl.max(values, 0))
    seen = tl.atomic_cas(ticket, tl.program_id(0), tl.program_id(0) + 1, sem="acq_rel")
    while seen != tl.program_id(0):  # takes its turn
        seen = tl.atomic_cas(ticket, tl.program_id(0), tl.program_id(0) + 1, sem="acq_rel")


@triton.jit
def elementwise(x, y, quotient, functions, integers, halves, N, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < N
    a, b = tl.load(x + index, inside, 1.0), tl.load(y + index, inside, 1.0)
    tl.store(quotient + index, tl.div_rn(a, b), inside)
    tl.store(functions + index, tl.exp(a) + tl.log(tl.abs(b)) + tl.sqrt(tl.abs(a)) + tl.rsqrt(tl.abs(b) + 1), inside)
    n, m = (a * 1000).to(tl.int32), (tl.abs(b) * 50).to(tl.int32) + 1
    tl.store(
        integers + index,
        n // m + (n % m) * 7 + ((n << 3) ^ (m >> 1)) + tl.umulhi(n.to(tl.uint32), m.to(tl.uint32)).to(tl.int32),
        inside,
    )
    tl.store(halves + index, tl.floor(a * 3).to(halves.dtype.element_ty) + b.to(halves.dtype.element_ty), inside)


@triton.jit
def collatz(x, steps, BLOCK: tl.constexpr):
    """A loop that every program leaves at a time of its own, scalars only."""
    n, count = tl.load(x + tl.program_id(0)), 0
    while n != 1:
        if n % 2 == 0:
            n = n // 2
        else:
            n = 3 * n + 1
        count += 1
    tl.store(steps + tl.program_id(0), count)


@triton.jit
def rearranged(x, index, transposed, gathered, sorted_, flipped, M: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    values = tl.load(x + at)
    tl.store(transposed + tl.arange(0, N)[:, None] * M + tl.arange(0, M)[None, :], values.T)
    tl.store(gathered + at, tl.gather(values, tl.load(index + at), 1))
    tl.store(sorted_ + at, tl.sort(values))
    tl.store(flipped + at, tl.flip(values, 1))


@triton.jit
def random_numbers(out, seed, BLOCK: tl.constexpr):
    tl.store(out + tl.arange(0, BLOCK), tl.randint(seed, tl.arange(0, BLOCK)))
