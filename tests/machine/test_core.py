"""The machine's instructions against numpy, a family at a time."""

from __future__ import annotations

import numpy as np
import pytest

from lib.machine import machine
from lib.simt import simt_build
from tests.machine.snippets import at, lanewise, run

pytestmark = pytest.mark.skipif(simt_build.COMPILER is None, reason=simt_build.NO_COMPILER)

RANDOM = np.random.default_rng(0)
EDGES = {  # of every type
    np.int16: [0, 1, -1, 32767, -32768, 255],
    np.uint16: [0, 1, 65535, 32768],
    np.int32: [0, 1, -1, 2**31 - 1, -(2**31), 31],
    np.uint32: [0, 1, 2**32 - 1, 2**31, 32, 33],
    np.int64: [0, 1, -1, 2**63 - 1, -(2**63)],
    np.uint64: [0, 1, 2**64 - 1, 2**63],
    np.float32: [0.0, -0.0, 1.0, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 3e38],
    np.float64: [0.0, -0.0, np.inf, np.nan, 1e-310],
    np.float16: [0.0, -0.0, 1.0, np.inf, -np.inf, np.nan, 6e-8, 65504.0],
}  # fmt: skip


def numbers(kind: type, shift: int = 0, count: int = 96) -> np.ndarray:
    dtype = np.dtype(kind)
    if dtype.kind == "f":
        made = (RANDOM.standard_normal(count) * 10.0 ** RANDOM.integers(-3, 4, count)).astype(dtype)
    else:
        made = RANDOM.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, count, dtype=dtype, endpoint=True)
    edges = np.roll(np.array(EDGES[kind], dtype), shift)
    made[: len(edges)] = edges
    return np.roll(made, shift * 7)


def same(result: np.ndarray, expected: np.ndarray, tolerance: float = 0.0) -> None:
    expected = expected.astype(result.dtype)
    if tolerance:
        np.testing.assert_allclose(result, expected, rtol=tolerance, atol=0)
    else:
        np.testing.assert_array_equal(result, expected)


INTEGERS = [
    ("s16", np.int16),
    ("u16", np.uint16),
    ("s32", np.int32),
    ("u32", np.uint32),
    ("s64", np.int64),
    ("u64", np.uint64),
]


@pytest.mark.parametrize(("name", "kind"), INTEGERS)
def test_integer_arithmetic(name, kind):
    a, b, c = numbers(kind), numbers(kind, 1), numbers(kind, 2)
    bits = np.dtype(kind).itemsize * 8

    def exact(values: np.ndarray) -> np.ndarray:
        return np.array([int(v) for v in values], object)

    def wrapped(values: np.ndarray) -> np.ndarray:
        return np.array([v % 2**bits for v in values], f"u{bits // 8}").astype(kind)

    x, y, z = exact(a), exact(b), exact(c)
    for op, inputs, expected in [
        ("add", (a, b), x + y), ("sub", (a, b), x - y), ("mul.lo", (a, b), x * y), ("mul.hi", (a, b), (x * y) >> bits),
        ("mad.lo", (a, b, c), x * y + z), ("min", (a, b), np.minimum(a, b)), ("max", (a, b), np.maximum(a, b)),
    ]:  # fmt: skip
        same(lanewise(f"{op}.{name}", kind, *inputs), wrapped(exact(expected)))
    divisor = (
        np.where((b == 0) | (b == -1), np.array(3, kind), b)
        if kind in (np.int16, np.int32, np.int64)
        else np.maximum(b, 1)
    )
    quotient = np.array(
        [abs(int(v)) // abs(int(w)) * (1 if (v < 0) == (w < 0) else -1) for v, w in zip(a, divisor, strict=True)],
        object,
    )
    same(lanewise(f"div.{name}", kind, a, divisor), wrapped(quotient))
    same(lanewise(f"rem.{name}", kind, a, divisor), wrapped(x - quotient * exact(divisor)))
    if bits < 64:
        wide = np.dtype(f"{np.dtype(kind).kind}{bits // 4}").type
        same(lanewise(f"mul.wide.{name}", wide, a, b), x * y)
    for compare, function in [
        ("lt", np.less),
        ("le", np.less_equal),
        ("gt", np.greater),
        ("ge", np.greater_equal),
        ("eq", np.equal),
        ("ne", np.not_equal),
    ]:
        same(lanewise(f"setp.{compare}.{name}", np.uint32, a, b), function(a, b))


def test_bits():
    a, b, c = numbers(np.uint32), numbers(np.uint32, 1), numbers(np.uint32, 2)
    long = numbers(np.uint64)
    small = RANDOM.integers(0, 40, 96, dtype=np.uint32)
    for op, function in [("and", np.bitwise_and), ("or", np.bitwise_or), ("xor", np.bitwise_xor)]:
        same(lanewise(f"{op}.b32", np.uint32, a, b), function(a, b))
        same(lanewise(f"{op}.b64", np.uint64, long, long[::-1].copy()), function(long, long[::-1]))
    same(lanewise("shl.b32", np.uint32, a, small), np.where(small > 31, 0, a.astype(np.uint64) << small))
    same(lanewise("shr.u32", np.uint32, a, small), np.where(small > 31, 0, a.astype(np.uint64) >> small))
    same(
        lanewise("shr.s32", np.int32, a.view(np.int32), small),
        a.view(np.int32) >> np.minimum(small, 31).astype(np.int32),
    )
    same(lanewise("popc.b32", np.uint32, a), np.array([int(v).bit_count() for v in a]))
    same(lanewise("clz.b64", np.uint32, long), np.array([64 - int(v).bit_length() for v in long]))
    same(lanewise("brev.b32", np.uint32, a), np.array([int(f"{v:032b}"[::-1], 2) for v in a]))
    same(lanewise("bfind.u32", np.uint32, a), np.array([(int(v).bit_length() - 1) % 2**32 for v in a]))
    same(lanewise("lop3.b32", np.uint32, a, b, c, constants=", 0xe8"), (a & b) | (a & c) | (b & c))
    same(
        lanewise("shf.l.wrap.b32", np.uint32, a, b, small),
        ((b.astype(np.uint64) << 32 | a) << (small & 31).astype(np.uint64)) >> np.uint64(32),
    )
    same(lanewise("bfe.u32", np.uint32, a, constants=", 5, 7"), a >> 5 & 127)
    same(lanewise("bfe.s32", np.int32, a.view(np.int32), constants=", 5, 7"), (a >> 5 & 127 ^ 64).astype(np.int32) - 64)
    same(lanewise("bfi.b32", np.uint32, a, b, constants=", 8, 4"), b & ~np.uint32(0xF00) | (a & 15) << 8)
    same(lanewise("prmt.b32", np.uint32, a, b, constants=", 0x5410"), (a & 0xFFFF) | b << 16)


@pytest.mark.parametrize(("bits", "kind"), [(32, np.uint32), (64, np.uint64)])
def test_carries(bits, kind):
    """Sums, differences and products of three words, by word."""
    words = [numbers(kind, shift) for shift in range(6)]
    out = np.zeros((3, 3, 96), kind)
    r = {32: "%r", 64: "%d"}[bits]
    body = "".join(at(i, bits // 8) + f"ld.global.b{bits} {r}{10 + i}, [%d100];\n" for i in range(6))
    for row, (first, op) in enumerate([("add", "add"), ("sub", "sub"), ("mad.lo", "mad")]):
        for word in range(3):
            x, y = f"{r}{10 + word}", f"{r}{13 + word}"
            name = f"{first}.cc" if word == 0 else f"{op}c.hi" if op == "mad" else f"{op}c"
            name += ".cc" if word == 1 else ""
            # x0 y0 + (x0, x1, x2), whose second word is the upper half of the product; that of the third is added too
            operands = f"{x}, {y}"
            if op == "mad":
                operands = f"{r}10, {r}13, {x}" if word < 2 else f"{x}, 0, {x}"
            body += f"{name}.u{bits} {r}{20 + row * 3 + word}, {operands};\n"
            address = at(6, bits // 8) + f"st.global.b{bits} [%d100+{(row * 3 + word) * 96 * bits // 8}], "
            body += address + f"{r}{20 + row * 3 + word};\n"
    run(body, *words, out, block=96)

    def joined(parts: list[np.ndarray]) -> list[int]:
        return [sum(int(v) << bits * i for i, v in enumerate(words)) for words in zip(*parts, strict=True)]

    x, y = joined(words[:3]), joined(words[3:])
    for found, expected in zip(
        out,
        [
            [a + b for a, b in zip(x, y, strict=True)],
            [a - b for a, b in zip(x, y, strict=True)],
            [a + int(p) * int(q) for a, p, q in zip(x, words[0], words[3], strict=True)],
        ],
        strict=True,
    ):
        assert joined(list(found)) == [v % 2 ** (3 * bits) for v in expected]


def test_signed_carry():
    a, b, c = numbers(np.int32), numbers(np.int32, 1), numbers(np.int32, 2)
    high = np.array([(int(x) * int(y) >> 32) + int(z) for x, y, z in zip(a, b, c, strict=True)])
    same(lanewise("mad.hi.cc.s32", np.int32, a, b, c), high.astype(np.uint32).view(np.int32))


@pytest.mark.parametrize(("name", "kind"), [("f32", np.float32), ("f64", np.float64), ("f16", np.float16)])
def test_float_arithmetic(name, kind):
    a, b, c = numbers(kind), numbers(kind, 1), numbers(kind, 2)
    with np.errstate(all="ignore"):
        same(lanewise(f"add.{name}", kind, a, b), a + b)
        same(lanewise(f"sub.{name}", kind, a, b), a - b)
        same(lanewise(f"mul.{name}", kind, a, b), a * b)
        same(lanewise(f"neg.{name}", kind, a), -a)
        same(lanewise(f"abs.{name}", kind, a), abs(a))
        same(lanewise(f"min.{name}", kind, a, b), np.fmin(a, b))
        if name == "f32":
            signed = np.copysign(np.fmin(abs(a), abs(b)), np.copysign(1, a) * np.copysign(1, b)).astype(a.dtype)
            same(lanewise("min.xorsign.abs.f32", kind, a, b), signed)
        same(lanewise(f"max.{name}", kind, a, b), np.fmax(a, b))
        fused = (a.astype(np.longdouble) * b + c) if kind != np.float16 else a.astype(np.float64) * b + c
        finite = np.isfinite(fused)
        result = lanewise(f"fma.rn.{name}", kind, a, b, c)
        same(result[finite], fused[finite], 1e-15 if kind == np.float64 else 0)
        same(lanewise(f"setp.lt.{name}", np.uint32, a, b), a < b)
        same(lanewise(f"setp.neu.{name}", np.uint32, a, b), ~(a == b))
        if kind == np.float32:
            same(lanewise("div.rn.f32", kind, a, b), a / b)
            flushed = np.where(abs(a) < 1.17549435e-38, 0, a)
            same(lanewise("add.ftz.f32", kind, a, np.zeros_like(a)), flushed)
            same(lanewise("setp.gtu.f32", np.uint32, a, b), ~(a <= b))


def test_two_halves_are_compared_at_once():
    a, b = numbers(np.float16), numbers(np.float16, 1)
    x, y = (pair[: a.size // 2 * 2].view(np.uint32) for pair in (a, b))
    out = np.zeros(2 * x.size, np.uint32)
    body = at(0, 4) + "ld.global.u32 %r10, [%d100];\n" + at(1, 4) + "ld.global.u32 %r11, [%d100];\n"
    body += "setp.lt.f16x2 %p1|%p2, %r10, %r11;\nselp.b32 %r98, 1, 0, %p1;\nselp.b32 %r99, 1, 0, %p2;\n"
    body += at(2, 8) + "st.global.v2.u32 [%d100], {%r98, %r99};\n"
    run(body, x, y, out, block=x.size)
    same(out, (a < b)[: out.size])


def test_two_halves_are_compared_into_a_mask():
    a, b = numbers(np.float16), numbers(np.float16, 1)
    x, y = (pair[: a.size // 2 * 2].view(np.uint32) for pair in (a, b))
    out = np.zeros(x.size, np.uint32)
    body = at(0, 4) + "ld.global.u32 %r10, [%d100];\n" + at(1, 4) + "ld.global.u32 %r11, [%d100];\n"
    body += "set.lt.u32.f16x2 %r98, %r10, %r11;\n" + at(2, 4) + "st.global.u32 [%d100], %r98;\n"
    run(body, x, y, out, block=x.size)
    same(out.view(np.uint16), np.where((a < b)[: 2 * out.size], 0xFFFF, 0).astype(np.uint16))


@pytest.mark.parametrize(
    ("op", "function"), [("ex2.approx.ftz", np.exp2), ("lg2.approx", np.log2), ("rcp.approx.ftz", np.reciprocal),
                         ("sqrt.rn", np.sqrt), ("rsqrt.approx", lambda x: x**-0.5), ("tanh.approx", np.tanh)],
)  # fmt: skip
def test_approximations(op, function):
    a = abs(RANDOM.standard_normal(256).astype(np.float32) * 10) + np.float32(0.01)
    same(lanewise(f"{op}.f32", np.float32, a), function(a.astype(np.float64)), 4e-7)
    if op.startswith("ex2"):
        ends = np.array([-np.inf, np.inf, -200, 128, -149, -126, 0, np.nan] * 4, np.float32)
        same(lanewise("ex2.approx.f32", np.float32, ends), np.exp2(ends.astype(np.float64)), 4e-7)


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def test_conversions():
    a = numbers(np.float32)
    finite = np.where(np.isfinite(a), a, 0).astype(np.float32)
    with np.errstate(all="ignore"):
        same(lanewise("cvt.rn.f16.f32", np.float16, a), a)
        same(lanewise("cvt.f32.f16", np.float32, a.astype(np.float16)), a.astype(np.float16).astype(np.float32))
        same(lanewise("cvt.rn.bf16.f32", np.uint16, finite), to_bfloat16(finite))
        same(
            lanewise("cvt.rzi.s32.f32", np.int32, finite),
            np.clip(np.trunc(finite.astype(np.float64)), -(2**31), 2**31 - 1),
        )
        same(lanewise("cvt.rni.s32.f32", np.int32, finite / 1e30), np.rint(finite / 1e30))
        same(lanewise("cvt.rmi.f32.f32", np.float32, finite), np.floor(finite))
        same(lanewise("cvt.f64.f32", np.float64, a), a.astype(np.float64))
        same(
            lanewise("cvt.rn.f32.f64", np.float32, finite.astype(np.float64) * 1.000001),
            finite.astype(np.float64) * 1.000001,
        )
    whole = numbers(np.int32)
    same(lanewise("cvt.rn.f32.s32", np.float32, whole), whole)
    same(lanewise("cvt.rz.f32.s32", np.float32, np.full(32, 2**25 - 1, np.int32)), np.full(32, 2**25 - 2))
    same(lanewise("cvt.s64.s32", np.int64, whole), whole)
    same(lanewise("cvt.u64.u32", np.uint64, whole.view(np.uint32)), whole.view(np.uint32))
    same(lanewise("cvt.s32.s8", np.int32, whole), whole.astype(np.int8))
    same(lanewise("cvt.sat.s8.s32", np.int32, whole), np.clip(whole, -128, 127))
    same(lanewise("cvt.s32.s64", np.int32, whole.astype(np.int64) << 3), (whole.astype(np.int64) << 3).astype(np.int32))
    pair = lanewise("cvt.rn.f16x2.f32", np.uint32, finite / 1e30, -finite / 1e30)
    same((pair >> 16).astype(np.uint16).view(np.float16), finite / 1e30)
    same(pair.astype(np.uint16).view(np.float16), -finite / 1e30)
    same(lanewise("cvt.rna.tf32.f32", np.uint32, finite), (finite.view(np.uint32) + 0x1000) & ~np.uint32(0x1FFF))


def test_bfloat16_arithmetic():
    a = to_bfloat16(RANDOM.standard_normal(64))
    b = to_bfloat16(RANDOM.standard_normal(64))
    wide = [(x.astype(np.uint32) << 16).view(np.float32) for x in (a, b)]
    same(lanewise("add.bf16", np.uint16, a, b), to_bfloat16(wide[0] + wide[1]))
    same(lanewise("mul.bf16", np.uint16, a, b), to_bfloat16(wide[0] * wide[1]))
    both = a.astype(np.uint32) | b.astype(np.uint32) << 16
    doubled = lanewise("add.bf16x2", np.uint32, both, both)
    same(doubled.astype(np.uint16), to_bfloat16(2 * wide[0]))
    same((doubled >> 16).astype(np.uint16), to_bfloat16(2 * wide[1]))


@pytest.mark.parametrize(
    ("op", "source"),
    [
        ("bfly", lambda i: i ^ 5),
        ("idx", lambda i: np.full(32, 5)),
        ("up", lambda i: np.where(i >= 5, i - 5, i)),
        ("down", lambda i: np.where(i < 27, i + 5, i)),
    ],
)
def test_shuffles(op, source):
    a = numbers(np.uint32, count=32)
    bound = 0 if op == "up" else 31
    same(lanewise(f"shfl.sync.{op}.b32", np.uint32, a, constants=f", 5, {bound}, -1"), a[source(np.arange(32))])


def test_votes_and_reductions():
    a = RANDOM.integers(-50, 50, 32).astype(np.int32)
    out = np.zeros((8, 32), np.int32)
    stores = "".join(f"st.global.b32 [%d101+{128 * i}], %r{20 + i};\n" for i in range(8))
    run(
        at(0, 4) + at(1, 4, "%d101") + f"""
        ld.global.b32 %r1, [%d100];
        redux.sync.add.s32 %r20, %r1, -1;
        redux.sync.min.s32 %r21, %r1, -1;
        redux.sync.max.s32 %r22, %r1, -1;
        setp.gt.s32 %p1, %r1, 0;
        vote.sync.ballot.b32 %r23, %p1, -1;
        vote.sync.any.pred %p2, %p1, -1;
        vote.sync.all.pred %p3, %p1, -1;
        selp.b32 %r24, 1, 0, %p2;
        selp.b32 %r25, 1, 0, %p3;
        and.b32 %r2, %r1, 3;
        match.any.sync.b32 %r26, %r2, -1;
        elect.sync %r27|%p4, -1;
        selp.b32 %r27, 1, 0, %p4;
        {stores}""", a, out,
    )  # fmt: skip
    ballot = sum(1 << i for i in range(32) if a[i] > 0)
    matches = [sum(1 << j for j in range(32) if a[j] & 3 == a[i] & 3) for i in range(32)]
    expected = [np.full(32, v) for v in (a.sum(), a.min(), a.max())] + [np.full(32, ballot, np.uint32).view(np.int32)]
    expected += [
        np.full(32, (a > 0).any()),
        np.full(32, (a > 0).all()),
        np.array(matches, np.uint32).view(np.int32),
        np.arange(32) == 0,
    ]
    same(out, np.array(expected))


@pytest.mark.parametrize("seed", range(8))
def test_divergence_and_loops(seed):
    """Collatz: every lane leaves the loop at another time, with a branch inside."""
    a = np.arange(1, 129, dtype=np.uint32)
    out = np.zeros_like(a)
    run(
        at(0, 4) + at(1, 4, "%d101") + """
        ld.global.b32 %r1, [%d100];
        mov.b32 %r2, 0;
        AGAIN:
        setp.eq.u32 %p1, %r1, 1;
        @%p1 bra DONE;
        and.b32 %r3, %r1, 1;
        setp.eq.u32 %p2, %r3, 0;
        @%p2 bra EVEN;
        mad.lo.u32 %r1, %r1, 3, 1;
        bra.uni NEXT;
        EVEN:
        shr.u32 %r1, %r1, 1;
        NEXT:
        add.u32 %r2, %r2, 1;
        bra AGAIN;
        DONE:
        shfl.sync.bfly.b32 %r4, %r2, 1, 31, -1;
        st.global.b32 [%d101], %r4;
        """, a, out, block=128, seed=seed,
    )  # fmt: skip

    def steps(n: int) -> int:
        return 0 if n == 1 else 1 + steps(n // 2 if n % 2 == 0 else 3 * n + 1)

    same(out, np.array([steps(int(n)) for n in a])[np.arange(128) ^ 1])


def test_local_memory_and_vectors():
    a = numbers(np.uint32, count=128)
    out = np.zeros_like(a)
    counts = run(
        at(0, 16) + at(1, 16, "%d101") + """
        mov.u64 %d10, stack;
        ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%d100];
        st.local.v2.u32 [%d10], {%r1, %r2};
        st.local.v2.u32 [%d10+8], {%r3, %r4};
        cvta.local.u64 %d11, %d10;
        ld.u32 %r5, [%d11+12];
        ld.local.v2.u32 {%r6, %r7}, [%d10];
        mov.b64 %d12, {%r6, %r5};
        mov.b64 {%r8, _}, %d12;
        st.global.v4.b32 [%d101], {%r5, %r3, %r7, %r8};
        """.replace("mov.u64 %d10", ".local .align 16 .b8 stack[16];\nmov.u64 %d10"), a, out,
    )  # fmt: skip
    same(out.reshape(-1, 4), a.reshape(-1, 4)[:, [3, 2, 1, 0]])
    assert counts.local_bytes == 32 * (16 + 4 + 8)


def test_unknown_instruction():
    with pytest.raises(machine.UnknownInstruction) as error:
        run("add.f32 %r1, %r1, %r1;\nfrobnicate.b32 %r1, %r2;")
    assert error.value.name == "frobnicate.b32"
    assert error.value.line > 10
    with pytest.raises(machine.UnknownInstruction):
        run("ld.global.L9::magic.b32 %r1, [%d0];")
