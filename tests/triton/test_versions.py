"""The Triton kernels compiled for sm_90 and others by other versions of Triton, without a GPU."""

from __future__ import annotations

import json
import re

import pytest

pytest.importorskip("triton")
from benchmarks.compiled.sass import parse  # noqa: E402
from benchmarks.compiled.wgmma_hazards import hazards  # noqa: E402
from tests.triton.test_compile import in_a_process  # noqa: E402
from tests.wheels import wheel  # noqa: E402

VERSIONS = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
CALLS = ("order", "stacked", "plain", "dense", "dropout")
# Kernels, by (kernel, call), of which ptxas runs the products one after the other, and the last minor version of Triton
# with which it does; None: all of VERSIONS. The results are right, only slower. "keys" is the kernel of deterministic
# calls.
SERIALISED = {("forward", "dense"): None, ("forward", "plain"): (3, 7)} | {("keys", call): None for call in CALLS}
# Spilled loads and stores of kernels for heads of 64 in 16 bits, at most: a tenth above the most of VERSIONS. Rows with
# positions have a bound of their own, because with 3.8.0 they spill more than all others do.
SPILLS = {"forward": 140, "rows": 850, "keys": 150}
SPILLS_OF_STACKED = {**SPILLS, "rows": 1210}
CODE = """if True:
    import json, sys
    from benchmarks.compiled import triton_report
    for case in json.loads(sys.argv[1]):
        print(json.dumps(triton_report.report(*case)))"""


def check(version: str, cases: list[tuple], cache) -> None:
    found = in_a_process(cache, "-c", CODE, json.dumps(cases), first=wheel(f"triton=={version}"))
    rows = [json.loads(line) for line in found.splitlines()]
    assert len(rows) == len(cases)
    for row in rows:
        assert row["hazards"] == [], row
        most = (SPILLS_OF_STACKED if row["call"] == "stacked" else SPILLS)[row["kernel"]]
        assert row["spills"] <= most or row["head_dim"] != 64, row
        until = SERIALISED.get((row["kernel"], row["call"]), (0, 0))
        found = tuple(map(int, version.split(".")[:2]))
        assert not row["serialised"] or until is None or found <= until, row
        assert ("HGMMA" in row["products"]) == (row["architecture"] == 90), row


@pytest.mark.slow
@pytest.mark.parametrize("version", [VERSIONS[0], VERSIONS[-1]])  # the thorough test has all
def test_other_versions_compile_the_kernels(version, tmp_path):
    check(version, [(90, "16-bit", 64, "forward", "order"), (90, "16-bit", 64, "keys", "plain")], tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("architecture", [80, 86, 90, 100, 120])
@pytest.mark.parametrize("version", VERSIONS)
def test_other_versions_compile_every_kernel(version, architecture, tmp_path):
    if architecture == 100 and version == "3.6.0":
        pytest.skip("features.py refuses sm_100 with this version")
    calls = CALLS if architecture == 90 else ("order",)
    # features.py refuses wider heads there
    head_dims = (64,) if (architecture, version) == (100, "3.7.1") else (64, 128)
    kernels = [(head_dim, kernel) for head_dim in head_dims for kernel in ("forward", "rows", "keys")]
    check(version, [(architecture, "16-bit", *kernel, call) for kernel in kernels for call in calls], tmp_path)


def sass(*lines: str) -> list:
    """Instructions 16 bytes apart, as cuobjdump prints them."""
    return parse("".join(f"        /*{16 * i:04x}*/   {line} ;   /* 0x0 */\n" for i, line in enumerate(lines)))


PRODUCT = "HGMMA.64x16x16.F32.BF16 R24, R4, gdesc[UR8], R24, gsb0"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
FENCE = "WARPGROUP.ARRIVE"


@pytest.mark.parametrize(
    ("use", "fault"),
    [
        ("MOV R7, R40", "writes the factor"),
        ("LDS.128 R4, [R50]", "writes the factor"),
        ("IMAD.WIDE.U32 R6, R40, 0x4, R42", "writes the factor"),
        ("FADD R40, R31, R41", "touches the accumulator"),
        ("STG.E.64 [R40.64], R30", "touches the accumulator"),
        ("HGMMA.64x8x16.F32.BF16 R40, R24, gdesc[UR8], R40, gsb0", "as a factor"),
        ("HGMMA.64x8x16.F32.BF16 R4, gdesc[UR4], gdesc[UR8], R4, gsb0", "into the factor"),
        ("HGMMA.64x8x16.F32.BF16 R24, gdesc[UR4], gdesc[UR8], R24, gsb0", "into a part"),
        ("HMMA.16816.F32.BF16 R2, R40, R44, R2", "writes the factor"),
        ("HMMA.16816.F32.BF16 R40, R21, R44, R40", "touches the accumulator"),
        ("HMMA.16816.F32.BF16 R40, R44, R23, R40", "touches the accumulator"),
        ("HMMA.16816.F32.BF16 R40, R44, R22, R40", None),
        ("HMMA.16816.F32.BF16 R40, R44, R48, R22", "touches the accumulator"),
        ("HMMA.1688.F32.TF32 R2, R40, R44, R2", "writes the factor"),
        ("DADD R40, R40, R23", "touches the accumulator"),
        ("F2F.F64.F32 R6, R40", "writes the factor"),
        ("LEPC R6", "writes the factor"),
        ("SHF.L.U64.HI R7, R40, 0x8, R41", "writes the factor"),
        ("SHF.L.U64.HI R3, R40, 0x8, R41", None),
        ("SYNCS.ARRIVE.TRANS64.A1T0 R7, [R40], R41", "writes the factor"),
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R40], R7", None),
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R40], R23", None),
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R40], R24", "touches the accumulator"),
        ("FADD R40, R7, R41", None),
        ("IMAD.WIDE.U32 R40, R23, 0x4, R42", None),
        ("IMAD.WIDE.U32 R40, R23, -0x326172a9, RZ", None),
        ("IMAD.WIDE.U32.X R40, R50, R51, R23, P0", "touches the accumulator"),
        ("IMAD.WIDE.U32.X R40, R23, R50, R42, P0", None),
        ("STG.E [R40.64], R42", None),
        (PRODUCT, None),
    ],
)
def test_registers_of_running_products_are_left_alone(use, fault):
    (found,) = hazards(sass(PRODUCT, use, WAIT, "EXIT")) or [None]
    assert found is None if fault is None else fault in found
    assert hazards(sass(PRODUCT, WAIT, use, WAIT, "EXIT")) == []


def test_a_product_of_the_loop_before_still_runs():
    loop = ["MOV R7, R40", FENCE, PRODUCT, "@P0 BRA 0x0", WAIT, "EXIT"]
    assert "writes the factor" in hazards(sass(*loop))[0]
    assert hazards(sass(*loop[:3], WAIT, *loop[3:])) == []
    assert "no wait" in hazards(sass(PRODUCT, "@P0 BRA 0x0", WAIT, "EXIT"))[0]


def test_a_wait_may_leave_the_newest_group_running():
    other = "HGMMA.64x8x16.F32.BF16 R60, gdesc[UR4], gdesc[UR8], R60, gsb0"
    partly = WAIT.replace("0x0", "0x1")
    assert hazards(sass(PRODUCT, other, partly, "MOV R4, R24", WAIT, "EXIT")) == []
    assert "accumulator" in hazards(sass(PRODUCT, other, partly, "MOV R4, R60", WAIT, "EXIT"))[0]


@pytest.mark.parametrize("write", ["MOV R7, R40", "LDS.128 R4, [R50]", "FADD R31, R40, R41", "@P0 MOV R24, RZ"])
def test_a_fence_stands_between_writes_and_products(write):
    """One on every way, and of all threads."""

    def found(*lines: str) -> list[str]:
        return hazards(sass(*lines, PRODUCT, WAIT, "EXIT"))

    assert found(write, FENCE) == []
    assert found(FENCE, re.sub(r" R\d+", " R90", write, count=1)) == []
    for lines in ((write,), (FENCE, write), (write, f"@P1 {FENCE}"), (write, "@P1 BRA 0x30", FENCE)):
        assert "since the last fence" in found(*lines)[0], lines
    loop = [FENCE, PRODUCT, WAIT, write, "@P0 BRA 0x10", "EXIT"]
    assert "since the last fence" in hazards(sass(*loop))[0]
    assert hazards(sass(*(line.replace("0x10", "0x0") for line in loop))) == []


def test_a_wait_of_some_threads_ends_no_product():
    assert "accumulator" in hazards(sass(PRODUCT, f"@P1 {WAIT}", "MOV R40, R24", WAIT, "EXIT"))[0]


def test_parted_threads_go_both_ways():
    assert "writes" in hazards(sass(PRODUCT, "BRA.DIV UR4, 0x40", "MOV R7, R40", "EXIT", WAIT, "EXIT"))[0]
    assert "writes" in hazards(sass(PRODUCT, "BRA.DIV UR4, 0x40", WAIT, "EXIT", "MOV R7, R40", "EXIT"))[0]


def test_code_that_cannot_be_followed_is_a_fault():
    assert "by a table" in hazards(sass("BRX R2 -0x10", PRODUCT, WAIT, "EXIT"))[0]
    assert "no way leads to" in hazards(sass("BRA 0x20", PRODUCT, WAIT, "EXIT"))[0]
