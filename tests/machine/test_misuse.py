"""Instructions given what PTX does not allow, one at a time: each ends the launch and says so."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from lib.machine import machine
from lib.simt import simt_build
from tests.machine.snippets import run

pytestmark = pytest.mark.skipif(simt_build.COMPILER is None, reason=simt_build.NO_COMPILER)

PART = "mov.u32 %r9, %laneid;\nsetp.lt.u32 %p1, %r9, 16;\n@%p1 bra SKIP;\n{}\nSKIP:\n"
# Numbers in all of the shared memory
FILL = "shl.b32 %r8, %r0, 4;\nst.shared.v4.b32 [%r8], {%r0, %r0, %r0, %r0};\nbar.sync 0;\n"
INIT = "setp.eq.u32 %p2, %r0, 0;\n@%p2 mbarrier.init.shared.b64 [tile], {};\nbar.sync 0;\n"
ASSERT = ".extern .func __assertfail(" + ", ".join(f".param .b64 p{i}" for i in range(5)) + ");"
MISUSES = {
    "local": (".local .align 4 .b8 stack[4];\nmov.u64 %d1, stack;\nld.local.b32 %r1, [%d1+4];", "local: local address"),
    "copy": (
        "mov.b32 %r1, 0;\nmov.b32 %r2, 8;\ncp.async.ca.shared.global [%r1], [%d0], 4, %r2;",
        "undefined: cp.async",
    ),
    "barrier": ("mov.b32 %r1, 16;\nbar.sync %r1;", "undefined: barrier 16 of 16"),
    "threads": ("bar.sync 1, 33;", "undefined: a barrier for 33 threads"),
    "lanes": ("and.b32 %r1, %r0, 1;\nbar.sync %r1;", "undefined: .* differs between lanes"),
    "twice": ("bar.arrive 1, 64;\nbar.arrive 1, 64;", "deadlock: a warp arrives twice at barrier 1"),
    "no arrivals": (INIT.format(0), "undefined: an mbarrier for 0 arrivals"),
    "arrivals": (INIT.format(1) + "@%p2 mbarrier.arrive.shared.b64 _, [tile], 2;", "undefined: more arrivals"),
    "no mbarrier": (FILL + "mbarrier.arrive.shared.b64 _, [tile];", "uninitialized: no mbarrier"),
    "shfl": (PART.format("shfl.sync.idx.b32 %r1, %r0, 3, 31, 0xffff0000;"), "divergence: shfl reads lane 3"),
    "matrices": (
        FILL + PART.format("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [tile];"),
        "divergence: ldmatrix is not executed by all lanes",
    ),
    "assertion": (
        "".join(f".param .b64 q{i};\nst.param.b64 [q{i}], %d0;\n" for i in range(5))
        + "call.uni __assertfail, (q0, q1, q2, q3, q4);",
        "assertion: an assertion of the kernel fails",
    ),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse(name):
    body, words = MISUSES[name]
    with pytest.raises(machine.Fault, match=words):
        run(body, np.zeros(64, np.uint32), block=64, shared=1024, architecture=90, declarations=ASSERT)


def test_the_page_has_the_number_of_opcodes_that_are_known():
    page = (Path(__file__).resolve().parents[2] / "docs/validation.md").read_text()
    (found,) = re.findall(r"knows (\d+)\s+opcodes", page)
    assert int(found) == len(machine.opcodes()) == len(set(machine.opcodes()))
