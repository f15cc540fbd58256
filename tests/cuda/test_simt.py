"""The harness that runs CUDA kernels on the host: every primitive against a formula, every mistake of a kernel seen."""

from __future__ import annotations

import math
import re
import shutil

import pytest
import torch

from lib.simt import simt_build
from tests.cuda.simt_kernels import (
    NUMBERS,
    SELFTEST,
    Grid,
    Index,
    Kernels,
    Matrices,
    Numbers,
    Product,
    Sums,
    Warp,
    mistake,
    words,
)

pytestmark = pytest.mark.skipif(simt_build.COMPILER is None, reason=simt_build.NO_COMPILER)

SEEDS = range(9)  # every way of ordering threads that schedule.h has


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return Kernels(simt_build.library([SELFTEST], "selftest"))


@pytest.fixture(scope="module")
def checked_kernels() -> Kernels:
    return Kernels(simt_build.library([SELFTEST], "selftest-checked", simt_build.SANITIZE))


# Numbers


def test_conversions_are_exact(kernels):
    every_half = torch.arange(-(2**15), 2**15).short()
    numbers = torch.cat([every_half.view(torch.half).float(), every_half.view(torch.bfloat16).float()])
    between = (numbers[:-1] + numbers[1:]) / 2  # ties
    near = [torch.nextafter(between, torch.tensor(sign * math.inf)) for sign in (1, -1)]
    inputs = torch.cat([numbers, between, *near])
    count = len(inputs)
    half_in = every_half.repeat(math.ceil(count / len(every_half)))
    out = {name: words(count) for name in NUMBERS[:3]} | {name: torch.empty(count) for name in NUMBERS[3:]}
    assert kernels("convert", Numbers, (inputs, half_in, count, *out.values())) is None

    def same(actual, expected):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)

    for dtype, name in ((torch.half, "half"), (torch.bfloat16, "bfloat16")):
        low, high = out[name].view(dtype).view(count, 2).unbind(1)
        same(low, inputs.to(dtype))
        same(high, (-inputs).to(dtype))
        same(out[f"from_{name}"], half_in[:count].view(dtype).float())
    tf32 = out["tf32"].view(torch.float)
    assert (out["tf32"][~inputs.isnan()] & 0x1FFF == 0).all()
    exponent = torch.frexp(inputs)[1].clamp(min=-125)  # subnormal numbers have the smallest normal one's
    step = torch.ldexp(torch.ones_like(inputs), exponent - 11)
    away = torch.sign(inputs) * torch.floor(inputs.abs().double() / step + 0.5) * step
    away = torch.where(inputs.isinf(), inputs.double(), away).float()
    same(tf32, away)
    exact = torch.exp2(inputs.double())
    flushed = torch.where(exact < 2.0**-126, 0.0, exact).float()
    torch.testing.assert_close(out["exp2"], flushed, rtol=3e-7, atol=0, equal_nan=True)


# Warps


@pytest.mark.parametrize("seed", SEEDS)
def test_shuffles_and_ballots(kernels, seed):
    source = torch.randint(0, 32, (32,), dtype=torch.int32)
    lanes = torch.arange(32)
    shuffled, exchanged, ballots = torch.empty(32), torch.empty(32), words(32)
    assert kernels("exchange", Warp, (source, 11, shuffled, exchanged, ballots), seed=seed) is None
    assert torch.equal(shuffled, source.float())
    assert torch.equal(exchanged, (lanes ^ 11).float())
    expected = sum(1 << lane for lane in range(32) if source[lane] % 2 == 0)
    assert (ballots.long() & 0xFFFFFFFF == expected).all()


def test_ldmatrix(kernels):
    matrices = torch.arange(4 * 8 * 8).short().view(4, 8, 8)
    straight, transposed = words(32, 4), words(32, 4)
    assert kernels("load", Matrices, (matrices, straight, transposed)) is None
    for actual, expected in ((straight, matrices), (transposed, matrices.mT)):
        # Lane l has two neighbours of row l // 4: the matrix, read in its own order
        assert torch.equal(actual.view(torch.int16).view(8, 4, 4, 2).permute(2, 0, 1, 3).reshape(4, 8, 8), expected)


# Registers of the fragments, as the PTX ISA gives them for lane = 4 group + thread: (row, column) of element i.
def a_16(group, thread, i):
    return group + 8 * (2 <= i < 4 or i >= 6), thread * 2 + (i & 1) + 8 * (i >= 4)


def b_16(group, thread, i):
    return thread * 2 + (i & 1) + 8 * (i >= 2), group


def a_tf32(group, thread, i):
    return group + 8 * (i in (1, 3)), thread + 4 * (i >= 2)


def b_tf32(group, thread, i):
    return thread + 4 * i, group


def c_f32(group, thread, i):
    return group + 8 * (i >= 2), thread * 2 + (i & 1)


def fragments(matrix: torch.Tensor, place, count: int) -> torch.Tensor:
    """(32, count): what each lane holds of the matrix."""
    index = [[place(*divmod(lane, 4), i) for i in range(count)] for lane in range(32)]
    rows, columns = torch.tensor(index).unbind(2)
    return matrix[rows, columns].contiguous()


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16, torch.float])
@pytest.mark.parametrize("seed", [0, 4])
def test_mma(kernels, dtype, seed):
    depth = 8 if dtype == torch.float else 16
    a, b = torch.randn(16, depth).to(dtype), torch.randn(depth, 8).to(dtype)
    places = (a_tf32, b_tf32) if dtype == torch.float else (a_16, b_16)
    packed = [fragments(x, place, n) for x, place, n in zip((a, b), places, (depth // 2, depth // 4), strict=True)]
    start = torch.randn(16, 8)
    sums = fragments(start, c_f32, 4)
    type_number = [torch.half, torch.bfloat16, torch.float].index(dtype)
    assert kernels("multiply", Product, (*packed, sums, 1), type_number, seed=seed) is None
    if dtype == torch.float:  # the hardware leaves out the lower 13 bits
        a, b = ((x.view(torch.int32) & ~0x1FFF).view(torch.float) for x in (a, b))
    expected = fragments(start.double() + a.double() @ b.double(), c_f32, 4)
    torch.testing.assert_close(sums.double(), expected, rtol=1e-6, atol=2e-6)
    nearest = expected.float()
    cut = torch.where(nearest.double().abs() > expected.abs(), torch.nextafter(nearest, torch.zeros(())), nearest)
    assert torch.equal(sums, cut)  # as tensor cores do: towards zero


# Blocks: right for every seed, and seen to be wrong without what makes them right


def sums(kernels, name: str, error: str, seed: int) -> bool | str:
    """Whether the kernel's sums are right; the text if it failed."""
    inputs = torch.randint(0, 16, (8, 512), generator=torch.Generator().manual_seed(seed)).float()
    out = torch.zeros(8)
    text = kernels(name, Sums, (inputs, out, 8, mistake(error), 0), seed=seed)
    if text:
        return text
    if name == "reduce":
        return torch.equal(out, inputs.flatten()[:1024].view(8, 128).sum(1))
    return out[0].item() == (inputs.flatten()[:1024] if name == "neighbours" else inputs).sum().item()


@pytest.mark.parametrize("seed", range(18))
@pytest.mark.parametrize("name", ["reduce", "neighbours", "pipeline"])
def test_right_for_every_seed(kernels, name, seed):
    assert sums(kernels, name, "NONE", seed) is True


@pytest.mark.parametrize(
    "name, error",
    [
        ("reduce", "NO_BARRIER"),
        ("reduce", "NO_BARRIER_AFTER"),
        ("neighbours", "NO_SYNC_WARP"),
        ("pipeline", "NO_BARRIER"),
        ("pipeline", "NO_BARRIER_AFTER"),
    ],
)
def test_missing_barrier_is_seen(kernels, name, error):
    assert False in [sums(kernels, name, error, seed) for seed in SEEDS]


@pytest.mark.parametrize("seed", SEEDS)
def test_early_read_of_a_copy_gives_nan(kernels, seed):
    inputs, out = torch.ones(512), torch.zeros(1)
    kernels("pipeline", Sums, (inputs, out, 1, mistake("NO_WAIT"), 0), seed=seed)
    assert out.isnan()
    out.zero_()
    kernels("pipeline", Sums, (inputs, out, 1, mistake("LATE_WAIT"), 0), seed=seed)
    assert out.isnan()


@pytest.mark.parametrize("error", ["NO_WAIT", "LATE_WAIT"])
def test_copy_over_one_under_way_is_refused(kernels, error):
    assert "has not been waited for" in sums(kernels, "pipeline", error, 0)


def test_copies_must_be_waited_for(kernels):
    text = sums(kernels, "pipeline", "NEVER_WAITS", 0)
    assert re.search(r"thread \d+ has ended without wait_for_copies for 1 ", text), text


SENTENCES = {
    "TWO_COPIES": r"copy_async at selftest.cu:\d+: the copy of thread \d+ to byte 0 of shared memory has not been",
    "MISALIGNED_TO": r"thread \d+, copy_async at .*: byte \d+ of shared memory is not aligned to 16|not all in shared",
    "MISALIGNED_FROM": r"thread \d+, copy_async at .*: the address in global memory is not aligned to 16",
    "TO_GLOBAL": r"copy_async at .*: 16 bytes that are not all in shared memory: they start somewhere else",
    "FROM_SHARED": r"copy_async at .*: an address in shared memory where one in global memory is needed",
    "LOAD_UNDER_WAY": r"ldmatrix at .*: the copy of thread (\d+) to byte \d+ of shared memory has not been waited",
    "WORD_UNDER_WAY": r"ldmatrix at .*: the copy of thread (\d+) to byte \d+ of shared memory has not been waited",
    "WORD_MISALIGNED": r"copy_async at .*: byte \d+ of shared memory is not aligned to 4",
    "LOAD_MISALIGNED": r"ldmatrix at .*: byte \d+ of shared memory is not aligned to 16",
    "LOAD_OUTSIDE": r"ldmatrix_transposed at .*not all in shared memory.* beyond its end of 2048|at byte 2040",
    "LANE_ELSEWHERE": r"lanes of warp (\d) have come to different places; .*lane.*: waiting in \w+ \(selftest.cu:\d+\)",
    "LANE_ENDS": r"lane.* ended",
    "LANE_AT_BARRIER": r"no thread can go on; warps 0-3, lanes 0-15: waiting in sync_warp .*31: waiting in sync_block",
    "WARP_ENDS": r"has ended",
    "OTHER_BARRIER": r"different places with sync_block; .*waiting in sync_block",
    "PAIR_MISALIGNED": r"add_atomically at .*: the address in global memory is not aligned to 8",
    "ATOMIC_ON_SHARED": r"add_atomically at .*: an address in shared memory",
    "DIVISION": r"thread \d+ divides an integer by zero",
    "NULL_POINTER": r"thread 9 (reads or )?writes memory that is neither shared nor allocated",
}


@pytest.mark.parametrize("seed", [0, 1, 5])
@pytest.mark.parametrize("error", SENTENCES)
def test_mistake_has_a_sentence(kernels, error, seed):
    inputs, out = torch.zeros(512), torch.zeros(4)
    text = kernels("mistake", Sums, (inputs, out, 1, mistake(error), 0), seed=seed)
    assert re.match(r"kernel xlnet_kernels::cuda::mistake, block \(0, [01], 0\): ", text)
    assert re.search(SENTENCES[error], text), text
    # Nothing is left of it
    assert kernels("mistake", Sums, (inputs, out, 1, mistake("NONE"), 0), seed=seed) is None


@pytest.mark.parametrize(
    "error, sentence",
    [
        ("NONE", None),
        ("VECTOR_MISALIGNED", r"thread \d+, selftest.cu:\d+: address not aligned to 8"),
        ("ARRAY_INDEX", r"thread \d+, selftest.cu:\d+: index outside of the array"),
    ],
)
def test_undefined_behaviour_has_a_sentence(checked_kernels, error, sentence):
    text = checked_kernels("mistake", Sums, (torch.zeros(512), torch.zeros(4), 1, mistake(error), 0))
    assert (text is None) if sentence is None else re.search(sentence, text), text


def test_stack_overflow_has_a_sentence(kernels):
    text = kernels("deep", Sums, (torch.zeros(1), torch.zeros(1), 1, 0, 0))
    assert re.search(r"deep, .* more than its stack of \d+ bytes", text), text


# Launches


@pytest.mark.parametrize("seed", [0, 1])
def test_grid(kernels, seed):
    out, counter = words(2, 3, 5, 7), words(1).zero_()
    assert kernels("visit", Grid, (out, counter), Index(5, 3, 2), 32, 0, seed=seed) is None
    z, y, x = torch.meshgrid(*(torch.arange(n) for n in (2, 3, 5)), indexing="ij")
    assert torch.equal(out[..., :3], torch.stack([x, y, z], -1).int())
    assert (out[..., 3:6] == torch.tensor([5, 3, 2])).all()
    order = out[..., 6].flatten()
    assert torch.equal(order.sort().values, torch.arange(30).int())
    assert not torch.equal(order, torch.arange(30).int())
    again = words(2, 3, 5, 7)
    assert kernels("visit", Grid, (again, counter.zero_()), Index(5, 3, 2), 32, 0, seed=seed) is None
    assert torch.equal(again, out)  # the same seed, the same order
    kernels("visit", Grid, (again, counter.zero_()), Index(5, 3, 2), 32, 0, seed=seed + 1)
    assert not torch.equal(again, out)


def test_seed_from_the_environment(kernels, monkeypatch, tmp_path):
    monkeypatch.setenv("SIMT_SEED", "5")
    path = shutil.copy(kernels.library._name, tmp_path)  # read when a library is loaded
    orders = []
    for library, seed in ((Kernels(path), None), (kernels, 5), (kernels, 0)):
        out = words(60, 7)
        assert library("visit", Grid, (out, words(1)), Index(60, 1, 1), 32, 0, seed=seed) is None
        orders.append(out[:, 6].tolist())
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize(
    "grid, threads, shared, sentence",
    [
        ((1, 1, 1), 1056, 0, "a block has 1056 threads"),
        ((1, 1, 1), 0, 0, "a block has 0 threads"),
        ((1, 1, 1), 48, 0, "a block has 48 threads, not a multiple of 32"),
        ((1, 1, 1), 32, 232449, "wants 232449 bytes of shared memory and can have 232448"),
        ((0, 1, 1), 32, 0, r"size \(0, 1, 1\)"),
        ((1, 65536, 1), 32, 0, r"size \(1, 65536, 1\)"),
    ],
)
def test_impossible_launch(kernels, grid, threads, shared, sentence):
    text = kernels("visit", Grid, (words(7), words(1)), Index(*grid), threads, shared)
    assert re.search(f"kernel xlnet_kernels::cuda::visit: .*{sentence}", text)


def test_largest_block(kernels):
    assert kernels("visit", Grid, (words(7), words(1)), Index(1, 1, 1), 1024, 232448) is None
