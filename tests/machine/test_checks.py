"""Each rule that the machine checks, proved by a kernel that breaks it and by one that does not."""

from __future__ import annotations

import re

import numpy as np
import pytest

from lib.machine import machine
from lib.simt import simt_build
from tests.machine.snippets import at, fault, run, zeros

pytestmark = pytest.mark.skipif(simt_build.COMPILER is None, reason=simt_build.NO_COMPILER)


def test_uninitialized():
    out = zeros()
    fault("shl.b32 %r1, %r0, 2;\nld.shared.b32 %r2, [%r1];", kind="uninitialized", shared=128)
    store = "\n" + at(0, 4) + "st.global.b32 [%d100], %r2;"
    found = fault("add.u32 %r2, %r3, 1;" + store, out, kind="uninitialized")
    assert "stored to global memory" in found.message
    found = fault("setp.lt.u32 %p1, %r0, 7;\n@%p1 mov.u32 %r2, 1;" + store, out, kind="uninitialized")
    assert found.lane == 7
    run("setp.lt.u32 %p1, %r0, 7;\n@%p1 mov.u32 %r2, 1;\n@!%p1 mov.u32 %r2, 2;" + store, out)
    run("add.u32 %r2, %r3, 1;" + store, out, check=False)


# %r9 has a value in the lower half of the warp alone
HALF = "setp.lt.u32 %p1, %r0, 16;\n@%p1 add.u32 %r9, %r0, 100;\n"
STORE = at(0, 4) + "@%p1 st.global.b32 [%d100], %r2;\n"
STORE_ALL = at(0, 4) + "st.global.b32 [%d100], %r2;\n"
OWN_WORD = "shl.b32 %r1, %r0, 2;\n"
# How a value gets from %r9 to %r2, in its own lane
PASSES = {
    "moved": "mov.b32 %r2, %r9;",
    "computed": "mad.lo.u32 %r2, %r9, 3, %r0;\ncvt.rn.f32.u32 %r3, %r2;\nex2.approx.f32 %r3, %r3;",
    "selected": "selp.b32 %r2, %r9, %r0, %p1;",
    "packed": "mov.b64 %d1, {%r9, %r0};\nmov.b64 {%r2, _}, %d1;",
    "conditional": "setp.gt.u32 %p2, %r9, 7;\nmov.b32 %r2, 0;\n@%p2 mov.b32 %r2, %r9;",
    "exchanged": "shfl.sync.bfly.b32 %r3, %r9, 1, 31, -1;\nshfl.sync.bfly.b32 %r2, %r3, 1, 31, -1;",
    "shared": OWN_WORD + "st.shared.b32 [%r1], %r9;\nld.shared.b32 %r2, [%r1];",
    "local": "mov.u64 %d1, stack;\nst.local.b32 [%d1], %r9;\ncvta.local.u64 %d1, %d1;\nld.b32 %r2, [%d1];",
}


@pytest.mark.parametrize("way", PASSES)
def test_undefined_values_may_be_passed_on(way):
    """As far as the lanes that are stored do not depend on them."""
    out, body = zeros(), ".local .align 4 .b8 stack[4];\n" + HALF + PASSES[way] + "\n"
    run(body + STORE, out, shared=128)
    assert (out[:16] != 0).all() and (out[16:] == 0).all()
    if way == "selected":  # the other lanes chose what they have
        run(body + STORE_ALL, out, shared=128)
    else:
        assert fault(body + STORE_ALL, out, shared=128, kind="uninitialized").lane == 16


def test_undefined_values_that_do_not_matter():
    """A known operand may decide alone."""
    run(HALF + "selp.b32 %r3, -1, 0, %p1;\nand.b32 %r2, %r9, %r3;\n" + STORE_ALL, zeros())
    run(HALF + "selp.b32 %r3, 0, -1, %p1;\nor.b32 %r2, %r9, %r3;\n" + STORE_ALL, zeros())
    both = HALF + "setp.gt.u32 %p2, %r9, 7;\nand.pred %p3, %p2, %p1;\n"
    run(both + "@%p3 mov.b32 %r0, 1;\nselp.b32 %r2, 1, 0, %p3;\n" + STORE_ALL, zeros())
    run(HALF + "setp.gt.and.u32 %p3, %r9, 7, %p1;\nselp.b32 %r2, 1, 0, %p3;\n" + STORE_ALL, zeros())
    fault(
        HALF + "setp.gt.or.u32 %p3, %r9, 7, %p1;\nselp.b32 %r2, 1, 0, %p3;\n" + STORE_ALL, zeros(), kind="uninitialized"
    )


def test_undefined_values_end_where_they_show():
    address = HALF + "mul.wide.u32 %d1, %r9, 0;\nadd.u64 %d1, %d1, %d0;\n"
    run(address + "@%p1 ld.global.b32 %r2, [%d1];", zeros())
    for body, words in [
        (address + "ld.global.b32 %r2, [%d1];", "address"),
        (address + "mov.b32 %r2, 1;\n@%p1 st.global.b32 [%d1], %r2;\nst.global.b32 [%d1], %r2;", "address"),
        (address + "red.global.add.u32 [%d1], 1;", "what the instruction does"),
        (HALF + "red.global.add.u32 [%d0], %r9;", "what the instruction does"),
        (HALF + "setp.gt.u32 %p2, %r9, 7;\n@%p2 bra DONE;\nDONE:", "whether the instruction is executed"),
        (HALF + "setp.gt.u32 %p2, %r9, 7;\n@%p2 st.global.b32 [%d0], 1;", "whether the instruction is executed"),
        (HALF + "bar.sync %r9;", "what the instruction does"),
        (HALF + "shfl.sync.bfly.b32 %r2, %r0, 1, 31, %r9;", "which lanes"),
        (HALF + "vote.sync.any.pred %p2, %p1, -1;\nredux.sync.add.u32 %r2, %r9, -1;\n" + STORE, "stored to global"),
    ]:
        assert words in fault(body, zeros(), kind="uninitialized").message, body


def test_undefined_numbers_of_a_product():
    """They reach the row of a and the column of b that they lie in, no others."""
    numbers = "".join(f"mov.b32 %r{i}, 0;\n" for i in range(20, 27))
    product = "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {{%r1,%r2,%r3,%r4}}, {{{},%r21}}, {{{}}}, "
    product += "{{%r23,%r24,%r25,%r26}};\n"
    first_rows = "setp.lt.u32 %p1, %r0, 16;\n@%p1 mov.b32 %r9, 0;\n"  # rows 0 to 3, or columns 0 to 3
    of_a = numbers + first_rows + product.format("%r9", "%r22")
    run(of_a + STORE, zeros())
    run(of_a + STORE_ALL.replace("%r2", "%r3"), zeros())  # rows 8 to 15
    assert fault(of_a + STORE_ALL, zeros(), kind="uninitialized").lane == 16
    of_b = numbers + first_rows + product.format("%r20", "%r9")
    assert fault(of_b + STORE, zeros(), kind="uninitialized").lane == 2


def test_divergence():
    part = "setp.lt.u32 %p1, %r0, 16;\n@%p1 bra SKIP;\n{}\nSKIP:\n"
    run(part.format("shfl.sync.bfly.b32 %r1, %r0, 1, 31, 0xffff0000;"))
    fault(part.format("shfl.sync.bfly.b32 %r1, %r0, 1, 31, -1;"), kind="divergence")
    fault(part.format("vote.sync.any.pred %p2, %p1, 0x0000ffff;"), kind="divergence")
    fault(part.format("redux.sync.add.u32 %r1, %r0, -1;"), kind="divergence")
    fault(part.format("bar.warp.sync -1;"), kind="divergence")
    fault(part.format("bar.sync 0;"), kind="divergence")
    numbers = "mov.b32 %r1, 0;\nmov.b32 %r2, 0;\nmov.b32 %r3, 0;\nmov.b32 %r4, 0;\n"
    product = "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%r1,%r2,%r3,%r4}, {%r1,%r2}, {%r3}, {%r1,%r2,%r3,%r4};"
    run(numbers + product)
    fault(numbers + part.format(product), kind="divergence")


def test_deadlock():
    first_warp_only = "setp.gt.u32 %p1, %r0, 31;\n@%p1 bra SKIP;\nbar.sync {};\nSKIP:\n"
    run(first_warp_only.format("0"), block=64)  # the other warps have ended
    fault(first_warp_only.format("1") + "bar.sync 0;", block=64, kind="deadlock")
    fault(first_warp_only.format("0, 64"), block=64, kind="deadlock")
    wait = "WAIT:\nmbarrier.try_wait.parity.shared.b64 %p1, [tile], 0;\n@!%p1 bra WAIT;\n"
    start = "setp.eq.u32 %p2, %r0, 0;\n@%p2 mbarrier.init.shared.b64 [tile], {};\nbar.sync 0;\n"
    run(start.format(32) + "mbarrier.arrive.shared.b64 _, [tile];\n" + wait, shared=8, architecture=90)
    fault(
        start.format(33) + "mbarrier.arrive.shared.b64 _, [tile];\n" + wait, shared=8, architecture=90, kind="deadlock"
    )


EXCHANGE = """
shl.b32 %r1, %r0, 2;
st.shared.b32 [%r1], %r0;
{}
xor.b32 %r2, %r1, 128;
ld.shared.b32 %r3, [%r2];
{}
st.shared.b32 [%r1], %r3;
"""


@pytest.mark.parametrize("seed", range(4))
def test_race(seed):
    run(EXCHANGE.format("bar.sync 0;", "bar.sync 0;"), block=64, shared=256, seed=seed)
    fault(EXCHANGE.format("bar.sync 0;", ""), block=64, shared=256, seed=seed, kind="race")
    fault(EXCHANGE.format("", "bar.sync 0;"), block=64, shared=256, seed=seed, kind="race or uninitialized")


def test_warps_may_write_the_same():
    store = "mov.u32 %r1, 0;\nmov.u32 %r2, {};\nst.shared.b32 [%r1], %r2;"
    run(store.format(7), block=64, shared=128)
    fault(store.format("%warpid"), block=64, shared=128, kind="race")


def test_named_barriers_order_their_warps_alone():
    body = """
    mov.u32 %r9, %warpid;
    shl.b32 %r1, %r9, 2;
    setp.eq.u32 %p1, %r9, 0;
    @%p1 st.shared.b32 [0], %r9;
    setp.lt.u32 %p2, %r9, 2;
    @%p2 bar.sync 1, 64;
    setp.eq.u32 %p3, %r9, {};
    @%p3 ld.shared.b32 %r3, [0];
    bar.sync 0;
    """
    run(body.format(1), block=96, shared=128)
    fault(body.format(2), block=96, shared=128, kind="race or uninitialized", seed=3)


COPY = """
shl.b32 %r1, %r0, 4;
mul.wide.u32 %d100, %r0, 16;
add.u64 %d100, %d100, %d0;
cp.async.cg.shared.global [%r1], [%d100], 16;
cp.async.commit_group;
{}
ld.shared.b32 %r2, [%r1];
"""


@pytest.mark.parametrize("seed", range(4))
def test_asynchronous_copies(seed):
    a = zeros(32 * 4)
    run(COPY.format("cp.async.wait_group 0;"), a, shared=512, seed=seed)
    fault(COPY.format(""), a, shared=512, seed=seed, kind="asynchronous")
    fault(COPY.format("cp.async.wait_group 1;"), a, shared=512, seed=seed, kind="asynchronous")
    fault(COPY.format("st.shared.b32 [%r1], %r0;"), a, shared=512, seed=seed, kind="asynchronous")
    others = COPY.format("cp.async.wait_group 0;\n{}\nxor.b32 %r1, %r1, 512;")
    b = zeros(64 * 4)
    run(others.format("bar.sync 0;"), b, shared=1024, block=64, seed=seed)
    fault(others.format(""), b, shared=1024, block=64, seed=seed, kind="race or uninitialized or asynchronous")


def wgmma(
    between: str = "", before: str = "wgmma.fence.sync.aligned;", proxy: str = "fence.proxy.async;", after: str = ""
) -> str:
    """Zeros in shared memory, one product of them."""
    sums = ", ".join(f"%r{10 + i}" for i in range(4))
    return f"""
    shl.b32 %r1, %r0, 4;
    mov.b32 %r2, 0;
    st.shared.v4.b32 [%r1], {{%r2, %r2, %r2, %r2}};
    st.shared.v4.b32 [%r1+2048], {{%r2, %r2, %r2, %r2}};
    {proxy}
    bar.sync 0;
    mov.b64 %d1, 0x0000000800080000;
    {before}
    wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {{{sums}}}, %d1, %d1, 0, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned;
    {between}
    wgmma.wait_group.sync.aligned 0;
    {after}
    add.f32 %r3, %r10, %r11;
    """


def test_wgmma_in_flight():
    options = {"block": 128, "shared": 4096, "architecture": 90}
    run(wgmma(), **options)
    run(wgmma(between="mov.b32 %r20, %r10;", after="add.f32 %r21, %r20, %r20;"), **options)
    fault(wgmma(between="add.f32 %r20, %r10, %r10;"), kind="in_flight", **options)
    fault(wgmma(between="mov.b32 %r10, 0;"), kind="in_flight", **options)
    fault(wgmma(between="st.shared.b32 [%r1], %r2;"), kind="in_flight or race", **options)
    fault(wgmma(before=""), kind="in_flight", **options)
    fault(wgmma(proxy=""), kind="proxy", **options)
    fault(wgmma().replace("mov.b64 %d1,", "mov.b64 %d9,"), kind="uninitialized", **options)  # a descriptor
    in_shared = wgmma(after="st.global.b32 [%d0], %r10;").replace("mov.b32 %r2, 0;", "")
    fault(in_shared, zeros(), kind="uninitialized", **options)
    run(
        wgmma(after="st.shared.b32 [%r1], %r2;").replace(
            "wait_group.sync.aligned 0;", "wait_group.sync.aligned 0;\nbar.sync 0;"
        ),
        **options,
    )


def with_registers_of_a(**parts: str) -> str:
    """The product of `wgmma` with its rows in registers 4 to 7."""
    product = wgmma(**parts).replace("%d1, %d1, 0, 1, 1, 0, 0;", "{%r4, %r5, %r6, %r7}, %d1, 0, 1, 1, 0;")
    return "".join(f"mov.b32 %r{i}, 0;\n" for i in range(4, 8)) + product


FENCE = "wgmma.fence.sync.aligned;"
# Instructions after a product, and whether a second product with the same registers may follow without a fence
AFTER_A_PRODUCT = {
    "nothing": ("", True),
    "a read": ("add.f32 %r3, %r10, %r11;", True),
    "a sum": ("add.f32 %r10, %r10, %r10;", False),
    "a factor": ("add.u32 %r6, %r0, 1;", False),
    "a lane's sum": ("setp.eq.u32 %p1, %r0, 3;\n@%p1 mov.b32 %r11, 0;", False),
    "a copy of what is old": ("mov.b32 %r12, %r11;", True),
    "a copy of what is new": ("add.u32 %r8, %r0, 1;\nmov.b32 %r9, %r8;\nmov.b32 %r4, %r9;", False),
}


@pytest.mark.parametrize("after", AFTER_A_PRODUCT.values(), ids=AFTER_A_PRODUCT.keys())
def test_a_fence_stands_between_writes_and_wgmma(after):
    """After other instructions; a copy is the register that it was made of."""
    between, is_free = after
    options = {"block": 128, "shared": 4096, "architecture": 90}
    start, product = with_registers_of_a().split(FENCE)
    product, end = product.split("add.f32")
    before, after = f"{start}{FENCE}{product}{between}\n", f"{product}add.f32{end}"
    run(before + FENCE + after, **options)
    if is_free:
        run(before + after, **options)
    else:
        fault(before + after, kind="in_flight", **options)
    fault(with_registers_of_a(before=f"{FENCE}\nmov.b32 %r7, 0;"), kind="in_flight", **options)
    run(with_registers_of_a(before=f"{FENCE}\nmov.b32 %r2, 0;"), **options)


@pytest.mark.parametrize("between", ["mov.b32 %r4, %r0;", "mov.b32 {%h1, %h2}, %r4;", "st.shared.b32 [%r1], %r4;"])
def test_registers_of_a_in_flight(between):
    """During a product its registers of a may be neither written nor read."""
    options = {"block": 128, "shared": 4096, "architecture": 90}
    product = with_registers_of_a()
    wait = "wgmma.wait_group.sync.aligned 0;\n"
    start, end = product.split(wait)
    one_may_go_on = start + wait.replace("0", "1")
    run(one_may_go_on + wait + "bar.sync 0;\n" + between + end, **options)
    fault(one_may_go_on + between + wait + end, kind="in_flight", **options)


def test_a_copy_and_wgmma():
    """Data of cp.async are written through the generic proxy too."""
    address = "mul.wide.u32 %d100, %r0, 16;\nadd.u64 %d100, %d100, %d0;"
    options = {"block": 128, "shared": 4096, "architecture": 90}

    def body(wait: str) -> str:
        text = wgmma(proxy=wait).replace("mov.b32 %r2, 0;", address)
        store = re.compile(r"st\.shared\.v4\.b32 (\[.*\]), \{.*\};")
        copied, count = store.subn(r"cp.async.cg.shared.global \1, [%d100], 16;", text)
        assert count == 2
        return copied

    run(body("cp.async.wait_all;\nfence.proxy.async;"), zeros(512), **options)
    fault(body("cp.async.wait_all;"), zeros(512), kind="proxy", **options)
    run(body("cp.async.wait_all;"), zeros(512), copies_need_fence=False, **options)
    fault(wgmma(proxy=""), kind="proxy", copies_need_fence=False, **options)


def test_limits():
    run("", dynamic=163 * 1024)
    fault("", dynamic=163 * 1024 + 1, kind="limit")
    run("", dynamic=227 * 1024, architecture=90)
    fault("", dynamic=227 * 1024 + 1, architecture=90, kind="limit")
    fault("", block=1025, kind="limit")
    fault("", block=64, directives=".reqntid 32", kind="limit")
    fault("", block=64, directives=".maxntid 32", kind="limit")
    fault("", block=512, directives=".maxnreg 255", kind="limit")
    with pytest.raises(machine.MachineError, match="bytes"):
        machine.Module(".version 8.0\n.target sm_80\n.entry k(.param .u32 n) { ret; }", 80).launch(
            "k", (1,), (32,), b"", 0, []
        )


def test_traps_and_assertions():
    fault("setp.eq.u32 %p1, %r0, 3;\n@%p1 trap;", kind="trap")
    assert fault("setp.eq.u32 %p1, %r0, 3;\n@%p1 trap;", kind="trap").lane == 3


def test_faults_name_the_source():
    body = ".loc 1 42 7\nmov.u64 %d1, 0;\nld.global.b32 %r1, [%d1];"
    found = fault(body, kind="bounds", declarations='.file 1 "kernel.py"')
    assert (found.source_file, found.source_line) == ("kernel.py", 42)


@pytest.mark.parametrize("seed", range(4))
def test_stores_are_seen_by_their_own_thread(seed):
    a, b = zeros(), zeros()
    run(
        at(0, 4) + at(1, 4, "%d101") + """
        st.global.b32 [%d100], %r0;
        red.global.add.u32 [%d100], %r0;
        ld.global.b32 %r1, [%d100];
        st.global.b32 [%d101], %r1;
        """, a, b, block=64, seed=seed,
    )  # fmt: skip
    assert (b == 2 * np.arange(64)).all()


def test_a_store_without_a_fence_may_be_seen_late():
    """Another warp polls a flag and answers: with the fence it sees the number, without it may not."""
    body = """
    mov.u32 %r9, %warpid;
    setp.ne.u32 %p1, %r9, 0;
    @%p1 bra POLL;
    st.global.b32 [%d0], 7;
    {}
    {}.add.u32 %r1, [%d0+128], 1;
    ANSWER:
    atom.global.add.u32 %r1, [%d0+192], 0;
    setp.eq.u32 %p2, %r1, 0;
    @%p2 bra ANSWER;
    bra DONE;
    POLL:
    atom.global.add.u32 %r1, [%d0+128], 0;
    setp.eq.u32 %p2, %r1, 0;
    @%p2 bra POLL;
    ld.global.b32 %r2, [%d0];
    st.global.b32 [%d0+64], %r2;
    atom.global.add.u32 %r1, [%d0+192], 1;
    DONE:
    """

    def seen(fence: str, seed: int, signal: str = "atom.global") -> int:
        a = zeros()
        run(body.format(fence, signal), a, block=64, seed=seed)
        return int(a[16])

    assert all(seen("membar.gl;", seed) == 7 for seed in range(8))
    assert all(seen("", seed, "atom.global.gpu.acq_rel") == 7 for seed in range(8))
    assert 0 in {seen("", seed) for seed in range(8)}
