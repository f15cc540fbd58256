"""The machine against torch, on kernels that Triton laid out for sm_80 (mma) and sm_90 (wgmma)."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
import triton  # noqa: E402

if triton.knobs.runtime.interpret:
    pytest.skip("Triton interprets in this process", allow_module_level=True)

from benchmarks.lib import plain_attention  # noqa: E402
from benchmarks.lib.plain_attention import Config  # noqa: E402
from lib.machine.triton_driver import on_machine  # noqa: E402
from tests.machine import proving_kernels as kernels  # noqa: E402

FUSED = {"enable_fp_fusion": True}  # the default until Triton 3.10
PRODUCTS = {80: "mma.sync", 90: "wgmma.mma_async"}


@pytest.fixture(params=[80, 90])
def machine(request):
    with on_machine(request.param, seed=request.param) as record:
        yield record


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest, relative to the largest element."""
    return ((found.double() - exact.double()).abs().max() / exact.double().abs().max()).item()


@pytest.mark.few
@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize(
    "dtype, precision, allowed",
    [
        (torch.float16, None, 1e-3),
        (torch.bfloat16, None, 8e-3),
        (torch.float32, "tf32", 1e-3),
        (torch.float32, "tf32x3", 2e-6),
        (torch.float32, "ieee", 2e-6),
    ],
    ids=["float16", "bfloat16", "tf32", "tf32x3", "float32"],
)
def test_matmul(machine, dtype, precision, allowed, stages):
    m, n, k = 150, 70, 100
    a, b, out = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype), torch.full((m, n), torch.nan, dtype=dtype)
    grid = (triton.cdiv(m, 64), triton.cdiv(n, 64))
    kernels.matmul[grid](a, b, out, m, n, k, precision, 64, 64, 32, num_stages=stages, **FUSED)
    assert error(out, a.double() @ b.double()) <= allowed
    if precision is None:
        assert PRODUCTS[machine.architecture] in machine.launches[0].ptx


@pytest.mark.few
@pytest.mark.parametrize("warps, block_n, block_k", [(4, 128, 64), (8, 64, 128), (8, 256, 16)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_pipelined_matmul(machine, dtype, warps, block_n, block_k):
    m, n, k = 256, 256, 256
    a, b, out = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype), torch.full((m, n), torch.nan)
    grid = (m // 128, n // block_n)
    kernels.matmul_full[grid](a, b, out, k, n, 128, block_n, block_k, num_warps=warps, num_stages=3, **FUSED)
    assert error(out, a.double() @ b.double().T) <= 1e-5


def test_matmul_through_descriptors(machine):
    triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8))
    m, n, k = 100, 72, 96
    a, b, out = torch.randn(m, k).half(), torch.randn(k, n).half(), torch.full((m, n), torch.nan).half()
    grid = (triton.cdiv(m, 64), triton.cdiv(n, 64))
    kernels.descriptor_matmul[grid](a, b, out, m, n, k, 64, 64, 32, num_stages=2, **FUSED)
    assert error(out, a.double() @ b.double()) <= 1e-3
    assert ("tensormap.replace" in machine.launches[0].ptx) == (machine.architecture == 90)


def test_descriptors_of_the_host(machine):
    from triton.tools.tensor_descriptor import TensorDescriptor

    x, out = torch.randn(70, 40).half(), torch.full((70, 40), torch.nan).half()
    descriptors = [TensorDescriptor(t, list(t.shape), list(t.stride()), [32, 32]) for t in (x, out)]
    kernels.host_descriptor_copy[(3, 2)](*descriptors, 32, 32, **FUSED)
    assert torch.equal(out, 2 * x)


@pytest.mark.parametrize("shape", [(16, 32), (64, 128), (8, 512)])
def test_reductions(machine, shape):
    m, n = shape
    x, sums, largest, columns = torch.randn(m, n), torch.empty(m), torch.empty(m), torch.empty(n)
    where, bits = torch.empty(m, dtype=torch.int32), torch.empty(2 * m, dtype=torch.int32)
    kernels.reductions[(1,)](x, sums, largest, where, columns, bits, m, n, **FUSED)
    assert error(sums, x.sum(1)) <= 1e-5 and error(columns, x.sum(0)) <= 1e-5
    assert torch.equal(largest, x.amax(1)) and torch.equal(where.long(), x.argmax(1))
    integers = (x * 100).int()
    wanted = integers[:, 0].clone()
    for column in range(1, n):
        wanted ^= integers[:, column]
    assert torch.equal(bits[:m], wanted) and torch.equal(bits[m:], integers.amin(1))


@pytest.mark.parametrize("shape", [(16, 32), (64, 128)])
def test_scans(machine, shape):
    x, decay = torch.randn(shape), torch.rand(shape) / 2 + 0.6
    sums, states, products = (torch.empty(shape) for _ in range(3))
    kernels.scans[(1,)](x, decay, sums, states, products, *shape, **FUSED)
    state, wanted = torch.zeros(shape[1], dtype=torch.float64), []
    for row, by in zip(x.double(), decay.double(), strict=True):
        state = state * by + row
        wanted.append(state)
    assert error(sums, x.double().cumsum(1)) <= 1e-5 and error(states, torch.stack(wanted)) <= 1e-5
    assert error(products, decay.double().flip(1).cumprod(1).flip(1)) <= 1e-5


@pytest.mark.parametrize("dtype, allowed", [(torch.float32, 1e-5), (torch.bfloat16, 8e-3)])
def test_softmax(machine, dtype, allowed):
    x = torch.randn(5, 300).to(dtype)
    out = torch.full_like(x, torch.nan)
    kernels.softmax[(5,)](x, out, 300, 512, **FUSED)
    assert error(out, x.double().softmax(1)) <= allowed


def test_atomics(machine):
    x = torch.randint(1000, (1000,), dtype=torch.int32)
    histogram, total, ticket = torch.zeros(16, dtype=torch.int32), torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    largest = torch.full((1,), -1, dtype=torch.int32)
    kernels.atomics[(8,)](x, histogram, total, largest, ticket, 1000, 128, **FUSED)
    assert torch.equal(histogram, torch.bincount(x % 16, minlength=16).int())
    assert error(total, x.sum()) <= 1e-6 and largest.item() == x.max() and ticket.item() == 8


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_elementwise(machine, dtype):
    x, y = torch.randn(500), torch.randn(500)
    quotient, functions, integers = torch.empty(500), torch.empty(500), torch.empty(500, dtype=torch.int32)
    halves = torch.empty(500, dtype=dtype)
    kernels.elementwise[(2,)](x, y, quotient, functions, integers, halves, 500, 256, **FUSED)
    assert torch.equal(quotient, x / y)
    a, b = x.double(), y.double()
    assert error(functions, a.exp() + b.abs().log() + a.abs().sqrt() + (b.abs() + 1).rsqrt()) <= 1e-5
    n, m = (x * 1000).int(), (y.abs() * 50).int() + 1
    high = ((n.long() & 0xFFFFFFFF) * m.long()) >> 32
    wanted = torch.div(n, m, rounding_mode="trunc") + torch.fmod(n, m) * 7 + ((n << 3) ^ (m >> 1)) + high.int()
    assert torch.equal(integers, wanted)
    assert torch.equal(halves, (x * 3).floor().to(dtype) + y.to(dtype))


def test_loops_that_end_at_times_of_their_own(machine):
    x = torch.arange(1, 28, dtype=torch.int32)
    steps = torch.empty(27, dtype=torch.int32)
    kernels.collatz[(27,)](x, steps, 1, **FUSED)
    assert steps[-1] == 111 and steps[0] == 0 and steps[6] == 16


def test_elements_change_places(machine):
    m, n = 32, 64
    x, index = torch.randn(m, n), torch.randint(n, (m, n), dtype=torch.int32)
    transposed, (gathered, ordered, flipped) = torch.empty(n, m), (torch.empty(m, n) for _ in range(3))
    kernels.rearranged[(1,)](x, index, transposed, gathered, ordered, flipped, m, n, **FUSED)
    assert torch.equal(transposed, x.T) and torch.equal(gathered, x.gather(1, index.long()))
    assert torch.equal(ordered, x.sort(1).values) and torch.equal(flipped, x.flip(1))


def test_random_numbers_are_philox(machine):
    out = torch.empty(128, dtype=torch.int32)
    kernels.random_numbers[(1,)](out, 2**40 + 5, 128, **FUSED)
    assert torch.equal(out, _philox(2**40 + 5, torch.arange(128)))


def _philox(seed: int, counter: torch.Tensor) -> torch.Tensor:
    """The first word of Philox 4x32-10 of (counter, 0, 0, 0)."""
    words, mask = [counter.long(), *[torch.zeros_like(counter) for _ in range(3)]], 0xFFFFFFFF
    keys = [seed & mask, seed >> 32]
    for _ in range(10):
        high, low = zip(*(_product(words[i], by) for i, by in ((2, 0xCD9E8D57), (0, 0xD2511F53))), strict=True)
        words = [high[0] ^ words[1] ^ keys[0], low[0], high[1] ^ words[3] ^ keys[1], low[1]]
        keys = [(key + by) & mask for key, by in zip(keys, (0x9E3779B9, 0xBB67AE85), strict=True)]
    return (words[0] - (words[0] >> 31 << 32)).int()


def _product(word: torch.Tensor, by: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Upper and lower half of 32 x 32 bits."""
    low = (word & 0xFFFF) * by
    high = (word >> 16) * by + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


@pytest.mark.few
@pytest.mark.parametrize(
    "width, config", [(64, Config(128, 64, 4, 3)), (64, Config(128, 128, 8, 2)), (128, Config(128, 64, 8, 2))]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_plain_attention(machine, dtype, width, config):
    query, key, value, grad = (torch.randn(1, 256, width).to(dtype) for _ in range(4))
    out, lse = plain_attention.forward(query, key, value, config)
    keys_config, rows_config = config._replace(BLOCK_M=64, num_stages=2), config._replace(num_stages=2)
    found = [out, *plain_attention.backward(grad, out, lse, query, key, value, keys_config, rows_config)]
    exact = _attention(query, key, value, grad, torch.float64)
    usual = _attention(query, key, value, grad, dtype)
    for ours, theirs, wanted in zip(found, usual, exact, strict=True):
        assert error(ours, wanted) <= 2 * error(theirs, wanted)


def _attention(query, key, value, grad, dtype) -> list[torch.Tensor]:
    """Output and gradients by torch, computed in `dtype`."""
    inputs = [x.to(dtype).requires_grad_() for x in (query, key, value)]
    p = (inputs[0] @ inputs[1].mT * query.shape[-1] ** -0.5).softmax(-1)
    out = p @ inputs[2]
    return [out.detach(), *torch.autograd.grad(out, inputs, grad.to(dtype))]


def test_what_kernels_count_as_does_not_depend_on_the_schedule():
    counts = []
    for seed in (1, 2):
        with on_machine(80, seed=seed) as record:
            x = torch.ones(5, 300)
            kernels.softmax[(5,)](x, torch.empty_like(x), 300, 512, **FUSED)
        counts.append(record.launches[0].counts)
    assert counts[0] == counts[1]
