"""Errors of the machine about addresses, by kernels that miss their tensors and by right ones."""

from __future__ import annotations

import numpy as np
import pytest

from lib.simt import simt_build
from tests.machine.snippets import at, fault, run, zeros

pytestmark = pytest.mark.skipif(simt_build.COMPILER is None, reason=simt_build.NO_COMPILER)


def test_bounds():
    a = zeros(64)
    inside = at(0, 4) + "st.global.b32 [%d100], %r0;"
    run(inside, a, block=64)
    assert (a == np.arange(64)).all()
    found = fault(inside, a, kind="bounds", block=96)
    assert (found.warp, found.lane, found.block, found.kernel) == (2, 0, (0, 0, 0), "k")
    assert found.ptx_line > 0 and "p0" in found.message
    fault(at(0, 4) + "ld.global.b32 %r1, [%d100+-4];", a, kind="bounds")
    fault(at(0, 4) + "red.global.add.u32 [%d100+256], %r0;", a, kind="bounds")
    fault("mov.u64 %d1, 0;\nld.global.b32 %r1, [%d1];", a, kind="bounds")
    fault(inside, a, kind="bounds", read_only=(0,))
    fault(at(0, 16) + "mov.u32 %r1, 0;\ncp.async.cg.shared.global [%r1], [%d100], 16;", a, kind="bounds", shared=512)


def test_bounds_are_those_of_the_pointer():
    """An address computed from one tensor's pointer may not be in another tensor."""
    both = zeros(128)
    a, b = both[:64], both[64:]  # neighbours
    store, load = "st.global.b32 [%d100+{}], %r0;", "ld.global.b32 %r1, [%d100+{}];"
    for access in (
        store,
        load,
        "red.global.add.u32 [%d100+{}], %r0;",
        "shl.b32 %r2, %r0, 2;\ncp.async.ca.shared.global [%r2], [%d100+{}], 4;",
    ):
        run(at(0, 4) + access.format(0), a, b, shared=128)
        run(at(1, 4) + access.format(128), a, b, shared=128)
        found = fault(at(0, 4) + access.format(256), a, b, kind="bounds", shared=128)
        assert "offset 256 of p0 (256 bytes)" in found.message
        found = fault(at(1, 4) + access.format(-256), a, b, kind="bounds", shared=128)
        assert "offset -256 of p1 (256 bytes)" in found.message
    # lanes of one instruction in two tensors, each in its own
    halves = "setp.lt.u32 %p1, %r0, 16;\nselp.b64 %d2, %d0, %d1, %p1;\n" + at(2, 4)
    run(halves + store.format(64), a, b)
    assert (a[16:32] == np.arange(16)).all() and (b[32:48] == np.arange(16, 32)).all()
    fault(halves + store.format(192), a, b, kind="bounds")
    # an address out of memory is of any tensor that it is in
    table = np.array([b.ctypes.data], np.uint64)
    loaded = "ld.global.b64 %d2, [%d1];\nld.global.b32 %r1, [%d2];"
    run(loaded, a, table, b)
    assert both[64:].any()


def test_a_predicate_keeps_lanes_from_memory():
    a = zeros(20)
    run(at(0, 4) + "setp.lt.u32 %p1, %r0, 20;\n@%p1 st.global.b32 [%d100], %r0;", a)
    assert (a == np.arange(20)).all()


def test_alignment():
    fault(at(0, 4) + "ld.global.v2.b32 {%r1, %r2}, [%d100];", zeros(), kind="alignment")
    fault("mul.lo.u32 %r1, %r0, 2;\nst.shared.b32 [%r1], %r0;", kind="alignment", shared=256)


def test_shared_size():
    store = "shl.b32 %r1, %r0, 2;\nst.shared.b32 [%r1], %r0;"
    run(store, shared=128)
    run(store, dynamic=128)
    assert fault(store, dynamic=124, kind="shared").lane == 31
