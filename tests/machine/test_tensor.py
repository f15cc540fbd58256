"""Tensor cores and asynchronous copies of the machine against numpy."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from lib.machine import machine
from lib.simt import simt_build
from tests.machine.snippets import at, kernel, run

pytestmark = pytest.mark.skipif(simt_build.COMPILER is None, reason=simt_build.NO_COMPILER)

RANDOM = np.random.default_rng(1)


def halves(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float16)


def brain(x: np.ndarray) -> np.ndarray:
    """The bits of bfloat16 numbers, cut off."""
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def registers(first: int, count: int) -> str:
    return "{" + ", ".join(f"%r{first + i}" for i in range(count)) + "}"


def words(array: int, first: int, count: int) -> str:
    """Loads the lane's registers of a fragment, kept one register after another."""
    loads = "".join(f"ld.global.b32 %r{first + i}, [%d100+{128 * i}];\n" for i in range(count))
    return at(array, 4) + loads


def fragment(matrix: np.ndarray, rows: int, count: int, by_column: bool = False) -> np.ndarray:
    """uint32 [register, lane] of a matrix as mma.sync takes it: PTX ISA, "Matrix fragments for mma"."""
    per = 4 // matrix.itemsize
    made = np.zeros((count, 32, per), matrix.dtype)
    for register in range(count):
        for lane in range(32):
            for j in range(per):
                group, k = lane // 4, lane % 4 * per + j
                if by_column:
                    made[register, lane, j] = matrix[register * 4 * per + k, group]
                else:
                    made[register, lane, j] = matrix[group + register % 2 * 8, register // 2 * 4 * per + k]
    return made.reshape(count, 32 * per).view(np.uint32)


def sums(registers_: np.ndarray) -> np.ndarray:
    """float32 [16, 8] of a fragment of sums."""
    out = np.zeros((16, 8), np.float32)
    for register in range(4):
        for lane in range(32):
            out[lane // 4 + register // 2 * 8, lane % 4 * 2 + register % 2] = registers_[register, lane]
    return out


SHAPES = [("f16", 8), ("f16", 16), ("bf16", 8), ("bf16", 16), ("tf32", 4), ("tf32", 8)]


def product(kind: str, depth: int, a: np.ndarray, b: np.ndarray, **options: object) -> np.ndarray:
    count = {"tf32": depth // 2}.get(kind, depth // 4)
    fa, fb = fragment(a, 16, count), fragment(b, 8, count // 2, by_column=True)
    out = np.zeros((4, 32), np.float32)
    zero = "".join(f"mov.b32 %r{30 + i}, 0;\n" for i in range(4))
    stores = "".join(f"st.global.b32 [%d100+{128 * i}], %r{30 + i};\n" for i in range(4))
    run(
        words(0, 10, count) + words(1, 20, count // 2) + zero + f"""
        mma.sync.aligned.m16n8k{depth}.row.col.f32.{kind}.{kind}.f32 {registers(30, 4)}, {registers(10, count)},
            {registers(20, count // 2)}, {registers(30, 4)};
        """ + at(2, 4) + stores, fa, fb, out, **options,
    )  # fmt: skip
    return sums(out)


@pytest.mark.parametrize(("kind", "depth"), SHAPES)
@pytest.mark.parametrize("architecture", [80, 90])
def test_mma(kind, depth, architecture):
    a, b = RANDOM.standard_normal((16, depth)), RANDOM.standard_normal((depth, 8))
    if kind == "f16":
        a, b = a.astype(np.float16), b.astype(np.float16)
        values = a, b
    elif kind == "bf16":
        a, b = brain(a), brain(b)
        values = [(x.astype(np.uint32) << 16).view(np.float32) for x in (a, b)]
    else:
        a, b = a.astype(np.float32), b.astype(np.float32)
        values = [(x.view(np.uint32) & ~np.uint32(0x1FFF)).view(np.float32) for x in (a, b)]
    exact = values[0].astype(np.float64) @ values[1].astype(np.float64)
    for nearest in (False, True):
        result = product(kind, depth, a, b, architecture=architecture, round_to_nearest=nearest)
        np.testing.assert_allclose(result, exact, atol=4e-6)


def test_sums_are_truncated():
    """1 + 7 terms of just under half a unit in the last place: rounding keeps their sum, alignment to 1 loses it."""
    a, b = np.zeros((16, 16), np.float16), np.zeros((16, 8), np.float16)
    a[:, :8], b[0], b[1:8] = 1, 1, np.float16(2**-24)
    a[:, 1:8] = np.float16(0.24)
    assert (product("f16", 16, a, b) == 1).all()
    a[:, 1:8] = np.float16(-0.24)
    assert (product("f16", 16, a, b) == 1).all()  # toward zero would be less than 1 if the terms were summed first
    a[:, 0], a[:, 1:8], b[1:8] = 2**11, 1, np.float16(2**-13 * 1.5)  # a unit in the last place of 2048 is 2^-12
    assert (product("f16", 16, a, b) < 2**11 + 7 * 2**-13 * 1.5).all()


@pytest.mark.parametrize("transposed", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrices_in_shared_memory(count, transposed):
    """stmatrix undoes ldmatrix, and both agree with the layout of fragments."""
    a = RANDOM.integers(0, 2**16, (count * 8, 8)).astype(np.uint16)
    out, back = np.zeros((count, 32), np.uint32), np.zeros_like(a)
    stores = "".join(f"st.global.b32 [%d101+{128 * i}], %r{10 + i};\n" for i in range(count))
    run(
        at(0, 16) + f"""
        shl.b32 %r1, %r0, 4;
        setp.lt.u32 %p1, %r0, {8 * count};
        @%p1 ld.global.v4.b32 {registers(20, 4)}, [%d100];
        @%p1 st.shared.v4.b32 [%r1], {registers(20, 4)};
        ldmatrix.sync.aligned.m8n8.x{count}{transposed}.shared.b16 {registers(10, count)}, [%r1];
        stmatrix.sync.aligned.m8n8.x{count}{transposed}.shared.b16 [%r1+512], {registers(10, count)};
        """ + at(1, 4, "%d101") + stores + at(2, 16, "%d101") + f"""
        @%p1 ld.shared.v4.b32 {registers(20, 4)}, [%r1+512];
        @%p1 st.global.v4.b32 [%d101], {registers(20, 4)};
        """, a, out, back, shared=1024, architecture=90,
    )  # fmt: skip
    assert (back == a).all()
    matrices = a.reshape(count, 8, 8)
    matrices = matrices.swapaxes(1, 2) if transposed else matrices
    assert (out == np.ascontiguousarray(matrices).reshape(count, 64).view(np.uint32)).all()


def test_counts_of_bank_conflicts():
    def conflicts(shift: int, suffix: str = "b32", value: str = "%r0") -> tuple[int, int]:
        counts = run(f"shl.b32 %r1, %r0, {shift};\nst.shared.{suffix} [%r1], {value};", shared=4096)
        return counts.shared_wavefronts, counts.shared_conflicts

    assert conflicts(2) == (1, 0)
    assert conflicts(3) == (2, 1)
    assert conflicts(7) == (32, 31)
    assert conflicts(4, "v4.b32", "{%r0, %r0, %r0, %r0}") == (4, 0)
    assert conflicts(5, "v4.b32", "{%r0, %r0, %r0, %r0}") == (8, 4)


def test_counts_of_sectors_and_products():
    a = np.zeros(1040, np.float32)
    a = a[-a.ctypes.data % 64 // 4 :]
    load = "mul.wide.u32 %d100, %r0, {};\nadd.u64 %d100, %d100, %d0;\nld.global.f32 %r1, [%d100];\n"
    assert run(load.format(4), a).global_sectors_read == 4
    assert run(load.format(64), a).global_sectors_read == 32
    counts = run(
        load.format(4) + "ex2.approx.ftz.f32 %r2, %r1;\nred.global.add.f32 [%d100], %r2;\nbar.sync 0;", a, block=64
    )
    assert (counts.special_operations, counts.atomic_sectors, counts.barriers) == (64, 8, 2)
    assert counts.instructions["special"] == 2 and counts.issued == sum(counts.lines.values())


@pytest.mark.parametrize("seed", range(4))
def test_bulk_copies(seed):
    a, out = RANDOM.standard_normal(256).astype(np.float32), np.zeros(256, np.float32)
    body = """
    setp.ne.u32 %p1, %r0, 0;
    mov.u32 %r1, tile;
    add.u32 %r2, %r1, 1024;
    @%p1 bra READY;
    mbarrier.init.shared::cta.b64 [%r2], 1;
    fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 1024;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%d0], 1024, [%r2];
    READY:
    bar.sync 0;
    {}
    shl.b32 %r3, %r0, 2;
    ld.shared.b32 %r4, [%r3];
    st.shared.b32 [%r3], %r4;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @%p1 bra DONE;
    cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r1], 1024;
    cp.async.bulk.commit_group;
    {}
    DONE:
    """
    wait = "WAIT:\nmbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0;\n@!%p2 bra WAIT;\n"
    options = {"block": 256, "shared": 1040, "architecture": 90, "seed": seed}
    run(body.format(wait, "cp.async.bulk.wait_group 0;"), a, out, **options)
    assert (out == a).all()
    with pytest.raises(machine.Fault) as error:
        run(body.format("", "cp.async.bulk.wait_group 0;"), a, out, **options)
    assert error.value.kind == "asynchronous"


def tiles_in_shared(width: int, transposed: bool, rows: int) -> tuple[int, int]:
    """Boxes that hold rows x depth numbers of 16 bits, and the depth of one: `width` bytes of the contiguous side."""
    return (rows // (width // 2), 16) if transposed else (1, width // 2)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("width", [32, 64, 128])
@pytest.mark.parametrize("seed", [0, 2])
def test_tensor_maps_feed_wgmma(width, transposed, seed):
    """Tiles in every swizzle, brought by cp.async.bulk.tensor, as both operands, along K and along M and N."""
    rows, columns = 64, 64
    boxes, depth = tiles_in_shared(width, transposed, rows)
    a, b = halves(rows, depth), halves(columns, depth)
    stored = [np.ascontiguousarray(x.T if transposed else x) for x in (a, b)]
    inner = width // 2
    box = [inner, depth if transposed else rows]
    box_bytes = box[0] * box[1] * 2
    maps = [machine.tensor_map(x.ctypes.data, x.shape[::-1], [x.shape[1] * 2], box, 2, width) for x in stored]
    out = np.zeros((rows, columns), np.float32)
    stride, leading = 8 * width, box_bytes if transposed else 16
    swizzle = {128: 1, 64: 2, 32: 3}[width]
    upper = swizzle << 62 | (stride >> 4) << 32 | (leading >> 4) << 16
    loads = "".join(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        f" [tile+{16384 * operand + box_bytes * i}], [%d{10 + operand}, {{%r{20 + i}, %r20}}], [tile+32768];\n"
        for operand in range(2)
        for i in range(boxes)
    )  # fmt: skip
    offsets = "".join(f"mov.u32 %r{20 + i}, {inner * i};\n" for i in range(boxes))
    products = ""
    for step in range(depth // 16):
        for operand in range(2):
            start = (16384 * operand + 32 * step) >> 4
            products += f"mov.b64 %d{12 + operand}, {upper | start};\n"
        products += (
            f"wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {registers(100, 32)}, %d12, %d13,"
            f" {int(step > 0)}, 1, 1, {int(transposed)}, {int(transposed)};\n"
        )
    body = f"""
    mov.b64 %d10, m0;
    mov.b64 %d11, m1;
    cvta.param.u64 %d10, %d10;
    cvta.param.u64 %d11, %d11;
    {offsets}
    setp.ne.u32 %p1, %r0, 0;
    @%p1 bra READY;
    mbarrier.init.shared.b64 [tile+32768], 1;
    mbarrier.arrive.expect_tx.shared.b64 _, [tile+32768], {2 * boxes * box_bytes};
    {loads}
    READY:
    bar.sync 0;
    WAIT:
    mbarrier.try_wait.parity.shared.b64 %p2, [tile+32768], 0;
    @!%p2 bra WAIT;
    wgmma.fence.sync.aligned;
    {products}
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    shr.u32 %r1, %r0, 5;
    and.b32 %r2, %r0, 31;
    shr.u32 %r3, %r2, 2;
    mad.lo.u32 %r3, %r1, 16, %r3;
    and.b32 %r4, %r0, 3;
    mul.lo.u32 %r5, %r3, {columns};
    mad.lo.u32 %r5, %r4, 2, %r5;
    mul.wide.u32 %d100, %r5, 4;
    add.u64 %d100, %d100, %d0;
    """
    for register in range(0, 32, 2):
        offset = 4 * (register // 4 * 8 + register % 4 // 2 * 8 * columns)
        body += f"st.global.v2.b32 [%d100+{offset}], {registers(100 + register, 2)};\n"
    text = kernel(body, 1, shared=32768 + 16).replace(
        "k(.param .u64 p0)", "k(.param .u64 p0, .param .align 64 .b8 m0[128], .param .align 64 .b8 m1[128])"
    )
    params = struct.pack("<Q", out.ctypes.data).ljust(64, b"\0") + maps[0] + maps[1]
    regions = [(x.ctypes.data, x.nbytes, x is out, "x") for x in (out, *stored)]
    module = machine.Module(text, 90)
    counts = module.launch("k", (1,), (128,), params, 0, regions, seed=seed)
    np.testing.assert_allclose(out, a.astype(np.float64) @ b.astype(np.float64).T, atol=1e-4)
    assert counts.tensor == {"wgmma.m64n64k16.f16": 4 * depth // 16}


@pytest.mark.parametrize("seed", [0, 2])
def test_tiles_beyond_a_tensor_are_zero(seed):
    a, out = np.arange(1, 31, dtype=np.float32).reshape(5, 6), np.full((8, 8), np.nan, np.float32)
    a = np.ascontiguousarray(np.pad(a, ((0, 0), (0, 2))))  # rows of 32 bytes, of which 24 belong to the tensor
    body = (
        """
    mov.b64 %d10, m0;
    cvta.param.u64 %d10, %d10;
    setp.ne.u32 %p1, %r0, 0;
    mov.u32 %r5, 2;
    mov.u32 %r6, -1;
    @%p1 bra READY;
    mbarrier.init.shared.b64 [tile+256], 1;
    mbarrier.arrive.expect_tx.shared.b64 _, [tile+256], 256;
    cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [tile], [%d10, {%r5, %r6}], [tile+256];
    READY:
    bar.sync 0;
    WAIT:
    mbarrier.try_wait.parity.shared.b64 %p2, [tile+256], 0;
    @!%p2 bra WAIT;
    shl.b32 %r1, %r0, 3;
    ld.shared.v2.b32 {%r2, %r3}, [%r1];
    """
        + at(0, 8)
        + "st.global.v2.b32 [%d100], {%r2, %r3};"
    )
    text = kernel(body, 1, shared=272).replace("k(.param .u64 p0)", "k(.param .u64 p0, .param .align 64 .b8 m0[128])")
    tensor = machine.tensor_map(a.ctypes.data, [6, 5], [32], [8, 8], 4)
    params = struct.pack("<Q", out.ctypes.data).ljust(64, b"\0") + tensor
    regions = [(out.ctypes.data, out.nbytes, True, "out"), (a.ctypes.data, a.nbytes, False, "a")]
    machine.Module(text, 90).launch("k", (1,), (32,), params, 0, regions, seed=seed)
    expected = np.zeros((8, 8))
    expected[1:6, :4] = a[:, 2:6]
    assert (out == expected).all()
