"""Counts of machine code: as often as the machine ran the PTX that it was made from."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
import triton  # noqa: E402

if triton.knobs.runtime.interpret:
    pytest.skip("Triton interprets in this process", allow_module_level=True)

from benchmarks.lib import plain_attention  # noqa: E402
from lib.machine.machine_code import assemble, basic_blocks  # noqa: E402
from lib.machine.triton_driver import on_machine  # noqa: E402
from lib.simt import simt_build  # noqa: E402
from tests.machine import snippets  # noqa: E402

pytestmark = pytest.mark.skipif(simt_build.COMPILER is None, reason=simt_build.NO_COMPILER)


@pytest.mark.parametrize("architecture", [80, 90])
def test_products_and_copies_are_as_many_as_the_machine_counted(architecture):
    x = [torch.randn(1, 256, 64, dtype=torch.bfloat16) for _ in range(3)]
    with on_machine(architecture) as record:
        plain_attention.forward(*x, plain_attention.Config(128, 64, 4, 3))
    (launch,) = record.launches
    code = assemble(launch.ptx, launch.name, architecture)
    found = code.executed(code.weights(launch.counts.lines), launch.counts.lines)
    assert found["HMMA"] + found["HGMMA"] == sum(launch.counts.tensor.values()) > 0
    copies = [text for text in enumerate(launch.ptx.splitlines(), 1) if "cp.async.cg" in text[1]]
    assert found["LDGSTS"] == sum(launch.counts.lines.get(line, 0) for line, _ in copies) > 0
    assert 0.5 < found.total() / launch.counts.issued < 1.5


def test_a_loop_that_is_unrolled_is_counted_once_for_each_turn():
    """ptxas unrolls by four, and runs the rest of 99 turns one by one.

    Copies of a line share its executions, which misses a few where they do not run equally often.
    """
    numbers = np.arange(128, dtype=np.uint32)
    body = (
        "mov.b32 %r1, 0;\nmov.b32 %r2, 0;\nld.global.b32 %r9, [%d1];\nAGAIN:\n"
        "ld.global.b32 %r3, [%d0];\nadd.u32 %r2, %r2, %r3;\n"
        "add.u64 %d0, %d0, 4;\nadd.u32 %r1, %r1, 1;\nsetp.ne.u32 %p1, %r1, %r9;\n@%p1 bra AGAIN;\n"
        "st.global.b32 [%d1], %r2;\n"
    )
    out = np.array([99], np.uint32)
    counts = snippets.run(body, numbers, out, block=32)
    assert out[0] == 98 * 99 // 2
    code = assemble(snippets.kernel(body, 2), "k", 90)
    loads = sum(name == "LDG" for block in code.blocks for _, name in block)
    found = code.executed(code.weights(counts.lines), counts.lines)
    assert loads > 2 and found["LDG"] == pytest.approx(99 + 1, rel=0.15)
    # not four times as many as in the PTX, as all copies of all lines together are
    assert 0.3 < found.total() / counts.issued < 1.5


def test_blocks_end_at_labels_and_branches():
    text = """
.text.other:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
	.section	.text.k,"ax",@progbits
.text.k:
	//## File ".nv_debug_ptx_txt", line 7
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/              @!P0 BRA `(.L_x_0) ;
	//## File ".nv_debug_ptx_txt", line 9
        /*0020*/                   FADD.FTZ R1, R1, R2 ;
.L_x_0:
        /*0030*/                   EXIT ;
        /*0040*/                   NOP;
"""
    assert basic_blocks(text, "k") == [[(7, "MOV"), (7, "BRA")], [(9, "FADD")], [(9, "EXIT")]]
