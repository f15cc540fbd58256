"""The Triton backend beyond what operator/test_operator.py asks of every backend: tiles, modes, dispatch."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch.utils._pytree import tree_leaves

import xlnet_kernels as xk
from tests.cases import MODULES, NO_ORDERS, READY, assert_right, make, run_without_order
from xlnet_kernels.backends import choose

pytest.importorskip("triton")
if "triton" not in READY:
    pytest.skip(f"the Triton backend is {xk.backends()['triton']}", allow_module_level=True)

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from xlnet_kernels.backends.triton import features, launch, launch_cache, shift, tuning  # noqa: E402
from xlnet_kernels.two_streams import split_positions  # noqa: E402

DEVICE = MODULES["triton"].DEVICE
INTERPRETED = triton.knobs.runtime.interpret
interpreted = pytest.mark.skipif(not INTERPRETED, reason="asks what Triton's interpreter does; this compiles")
# (BLOCK_M, BLOCK_N, BLOCK_D, KEEP) like those of the table, with chunks that are narrower than HEAD_DIM
TILES = {
    "M=2N-kept": (128, 64, 16, True),
    "M=2N-small": (64, 32, 16, True),
    "M=2N": (64, 32, 16, False),
    "M=N-wide": (64, 64, 16, False),
    "M=N": (32, 32, 16, False),
    "M<N": (16, 32, 16, False),
}
HEAD_DIM = 24
PROBLEMS = {
    "order": dict(length=75, mask="order"),
    "memory-in-the-middle-of-a-tile": dict(length=70, mem=37, mask="ranks"),
    "uni": dict(length=70, rel_rows="uni", rel_batch=True),
    "window": dict(length=100, mem=20, mask="window", extra_distance=-1),
    "rows-in-any-order": dict(length=75, keys=75, mem=5, positions=True, mask="ranks"),
    "rows-far-apart": dict(length=40, keys=150, mem=20, positions=True, rel_rows="uni", mask="order"),
}


def use_tiles(monkeypatch, BLOCK_M: int, BLOCK_N: int, BLOCK_D: int = 16, KEEP: bool = True) -> None:
    def choose(kernel, *_):
        # Only forward has 128 rows in the table. Triton 3.9 cannot compile the kernel of rows with as many, and with
        # positions: it makes a tile of bits in shared memory, where its own check wants bytes.
        wide = BLOCK_M == 128 and kernel != "forward" and not INTERPRETED
        rows, keys = (64, 32) if wide else (BLOCK_M, BLOCK_N)
        return tuning.Config(rows, keys, BLOCK_D, KEEP, 4, 1)

    monkeypatch.setattr(tuning, "choose", choose)
    monkeypatch.setattr(launch_cache, "plans", {})  # others were made with other tiles


@interpreted
@pytest.mark.parametrize("tiles", ["M=2N-kept", "M<N"])
@pytest.mark.parametrize("problem", ["rows-in-any-order", "rows-far-apart"])
@pytest.mark.parametrize("how", NO_ORDERS)
def test_stays_inside_its_tensors_whatever_the_order(monkeypatch, how, problem, tiles):
    """On a GPU positions and rows are not checked; the interpreter checks every address."""
    use_tiles(monkeypatch, *TILES[tiles])
    run_without_order(make(1, 1, width=16, **PROBLEMS[problem]).with_options(deterministic=True), how, "triton")


def test_tiles_are_those_of_the_table():
    """Every tile shape and KEEP in it is tested here, or by operator/test_operator.py, which runs the interpreter's."""
    tested = {(BLOCK_M, BLOCK_N, KEEP) for BLOCK_M, BLOCK_N, _, KEEP in TILES.values()} | {(64, 64, True)}
    configs = [tuning.Config(*config) for entry in tuning.TABLE.values() for config in entry]
    assert {(config.BLOCK_M, config.BLOCK_N, config.KEEP) for config in configs} <= tested


@pytest.mark.few
@pytest.mark.parametrize(
    "tiles, problem",
    [(tiles, problem) for tiles in TILES for problem in (PROBLEMS if TILES[tiles][3] else list(PROBLEMS)[1::2])],
)
def test_any_tile_shape(monkeypatch, tiles, problem):
    use_tiles(monkeypatch, *TILES[tiles])
    assert_right(make(1, 1, width=HEAD_DIM, **PROBLEMS[problem]), "triton")


@pytest.mark.parametrize("mask", [None, "window", "causal", "padding", "blocks"])
def test_tiles_that_are_all_seen_or_of_one_segment(monkeypatch, mask):
    """Tiles without a test for each score, beside those with one: long runs of one segment, borders of masks."""
    use_tiles(monkeypatch, 32, 32)
    length, mem = 150, 45
    problem = make(1, 1, length, mem=mem, mask=None if mask == "blocks" else mask)
    keys = torch.arange(mem + length)[None]
    problem = replace(problem, query_ids=(keys[:, mem:] >= 130).long(), key_ids=(keys >= 130).long())
    if mask == "blocks":  # own keys inside and outside of what ranks show
        rows = torch.arange(length)[None]
        ranks = xk.RankMask(rows // 40, keys // 40, (rows // 40 - 2).clamp(min=0), rows % 3 == 0)
        problem = problem.with_options(mask=ranks)
    if mask is None:
        problem = make(1, 1, length, mem=mem, rel_rows="uni")
        problem = replace(problem, query_ids=keys[:, mem:] // 64, key_ids=keys // 64)
    assert_right(problem, "triton")


def test_positions_outside_of_the_segment_are_clamped():
    x, rel_key = torch.randn(1, 1, 3, 16), torch.randn(1, 6, 16)
    far, near = torch.tensor([[-(2**40), 1, 2**40]]), torch.tensor([[0, 1, 2]])
    mask = [torch.tensor([[1, 2, 3]]), torch.tensor([[0, 1, 2]]), None, torch.ones(1, 3, dtype=torch.bool), None]
    for positions in (split_positions(far), split_positions(xk.RowPositions(far))):
        found = [
            launch.forward(*(x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in arguments))[0]
            for arguments in (
                (x, x, x, rel_key, *[None] * 8, *mask, *given, None, 3, 0.0, 1.0, False, False)
                for given in (positions, (near, None))
            )
        ]
        assert torch.equal(*found)


def test_rel_key_is_copied_once_and_not_for_every_batch():
    x, rel_key = torch.zeros(5, 2, 3, 16), torch.zeros(2, 16, 6).transpose(1, 2)
    call = launch.Call((x, x, x, rel_key, *[None] * 16, 3, 0.0, 1.0, False))
    given = call.arguments["rel_key"]
    assert given.stride_b == 0 and given.data.untyped_storage().nbytes() == rel_key.untyped_storage().nbytes()


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch 2.9 and newer")
def test_float32_precision_is_what_the_user_said_in_the_new_way_or_the_old(monkeypatch):
    matmul = torch.backends.cuda.matmul

    def precision(dtype: torch.dtype, dropout_p: float = 0.0) -> str:
        x, rel_key = torch.zeros(1, 1, 3, 16, dtype=dtype), torch.zeros(1, 6, 16, dtype=dtype)
        return launch_cache.find((x, x, x, rel_key, *[None] * 16, 3, dropout_p, 1.0, False)).precision

    before = matmul.fp32_precision
    try:
        for said, found in (("tf32", "tf32"), ("ieee", "tf32x3")):
            matmul.fp32_precision = said  # torch refuses to answer in the old way from here on
            assert precision(torch.float32) == found
            assert precision(torch.float16) == "ieee"
        matmul.fp32_precision = "tf32"
        for said, found in (("tf32", "tf32"), ("ieee", "tf32x3")):
            matmul.fp32_precision = said
            for loses in (False, True):  # Triton 3.6 and 3.7 do, of a call with dropout
                monkeypatch.setattr(features, "version", lambda loses=loses: (3, 7) if loses else (3, 8))
                monkeypatch.setattr(launch_cache, "plans", {})
                assert precision(torch.float32) == found
                assert precision(torch.float32, 0.1) == ("ieee" if loses else found)
    finally:
        matmul.fp32_precision = before


@pytest.mark.parametrize("deterministic", [True, False], ids=["", "atomic"])
def test_rows_that_see_no_key_touch_no_other_memory(monkeypatch, deterministic):
    """Left padding hides every key that rel_key, which ends at distance 0, leaves the first tiles."""
    use_tiles(monkeypatch, 32, 32)
    mask = xk.RankMask.padding(torch.arange(224)[None] < 192)
    assert_right(make(1, 1, 224, rel_rows="uni").with_options(mask=mask, deterministic=deterministic), "triton")


@interpreted
def test_the_interpreter_ends_where_a_kernel_leaves_its_tensors():
    whole = torch.zeros(64)
    for kernel, what in ((_read_beyond, "masked_load"), (_add_beyond, "atomic_rmw")):
        kernel[(1,)](whole[:16], whole[16:32], 16)
        with pytest.raises(triton.runtime.errors.InterpreterError, match=f"{what}: 1 of 17 addresses outside"):
            kernel[(1,)](whole[:16], whole[32:48], 17)


@triton.jit
def _read_beyond(x, out, count):
    i = tl.arange(0, 32)
    tl.store(out + i, tl.load(x + i, mask=i < count, other=0.0), mask=i < 16)


@triton.jit
def _add_beyond(x, out, count):
    i = tl.arange(0, 32)
    tl.atomic_add(out + i, tl.load(x + i, mask=i < 16, other=0.0), mask=i < count)


def test_any_number_of_heads_fits_into_a_grid(monkeypatch):
    grids = []

    class Kernel:
        __name__, arg_names = "kernel", ()

        def __getitem__(self, grid):
            grids.append(grid)
            return lambda **options: None

    kernels = [name for name in vars(launch) if name.endswith("_kernel")]
    for name in kernels:
        monkeypatch.setattr(launch, name, Kernel())
    x, rel_key = torch.zeros(2**16, 1, 1, 16), torch.zeros(2**16, 1, 2, 16)
    inputs = (x, x, x, rel_key, *[None] * 16, 1, 0.0, 1.0, False)
    out, _, row_max, row_sum, out_residual = launch.forward(*inputs, True)
    launch.backward(x, None, out, out_residual, row_max, row_sum, [True] * 10, *inputs)
    assert len(grids) >= len(kernels) == 5 and all(size < 2**16 for grid in grids for size in grid[1:])  # CUDA's limit


def test_bounds_of_ranks_follow_rows_sorted_by_position(monkeypatch):
    use_tiles(monkeypatch, 32, 32)
    positions = torch.arange(149, -1, -1)[None]
    mask = xk.RankMask.causal(1, 150, window=100).rows(positions)
    assert_right(make(1, 1, 150).with_options(query_positions=positions, mask=mask), "triton")


@pytest.mark.parametrize(
    "capability, family", [((8, 0), 80), ((8, 9), 80), ((9, 0), 90), ((10, 0), 100), ((12, 0), 80), ((13, 0), 80)]
)
def test_gpus_that_are_not_in_the_table_have_a_family(capability, family):
    assert tuning.family(capability) == family


def test_the_table_serves_every_head_dim_and_dtype():
    for capability in ((8, 6), (9, 0), (12, 0)):
        for kind in ("16-bit", "float32", "ieee"):
            for head_dim in (1, 16, 64, 65, 80, 129, 256):
                for kernel in tuning.KERNELS:
                    config = tuning.choose(kernel, kind, head_dim, capability)
                    assert config.BLOCK_M <= 2 * config.BLOCK_N and config.BLOCK_N >= 32  # what the kernels can do
                    assert 16 <= config.BLOCK_D < max(17, 2 * head_dim)


def test_a_class_without_an_entry_of_its_own_takes_the_lower_one():
    assert (90, "ieee", 64) not in tuning.TABLE
    for kernel in tuning.KERNELS:
        assert tuning.choose(kernel, "ieee", 64, (9, 0)) == tuning.choose(kernel, "ieee", 64, (8, 0))


def test_gpus_with_less_shared_memory_than_an_a100_can_have_entries_of_their_own(monkeypatch):
    """A wide one does not stand for narrow heads, none for other GPUs, and a family comes before a width."""
    own = ((32, 32, 64, True, 4, 1),) * 3
    added = dict.fromkeys([(86, "16-bit", 128), (86, "float32", 256), (80, "16-bit", 96)], own)
    monkeypatch.setattr(tuning, "TABLE", tuning.TABLE | added)
    assert tuning.choose("rows", "float32", 256, (9, 0)) != tuning.Config(*own[1])
    assert tuning.choose("rows", "16-bit", 96, (9, 0)) == tuning.Config(*tuning.TABLE[90, "16-bit", 128][1])
    for capability in ((8, 0), (8, 6), (8, 9), (9, 0), (12, 0)):
        has_own = capability in ((8, 6), (8, 9), (12, 0))
        assert (tuning.choose("rows", "16-bit", 128, capability) == tuning.Config(*own[1])) == has_own
        assert tuning.choose("rows", "16-bit", 64, capability) != tuning.Config(*own[1])


def test_a_launch_has_the_registers_of_its_configuration(monkeypatch):
    """Where the compiler chooses, the option is absent, because not every compiler knows it."""
    launched = []
    monkeypatch.setattr(launch_cache, "run", lambda *given: launched.append(given[-1]()))
    monkeypatch.setattr(launch_cache, "plans", {})
    configs = {"forward": tuning.Config(32, 32, 16, True, 4, 2, 168), "preprocess": tuning.PREPROCESS}
    monkeypatch.setattr(launch_cache.Plan, "config", lambda self, name: configs[name])
    make(1, 1, 40).call("triton")
    assert [options.get("maxnreg", "none") for options in launched] == ["none", 168]


@pytest.mark.parametrize("problem", ["order", "rows-in-any-order", "rows-far-apart"])
def test_gradients_added_atomically_are_the_same(monkeypatch, problem):
    use_tiles(monkeypatch, 32, 32)
    assert_right(make(2, 1, **PROBLEMS[problem]).with_options(deterministic=False), "triton")


@pytest.mark.parametrize("tiles", [(32, 32), (64, 64), (32, 128)])
def test_dropout_mask_does_not_depend_on_tiles(monkeypatch, tiles):
    problem = make(1, 2, 40, keys=90, mem=70).with_options(dropout_p=0.4)
    state = torch.tensor([2**62 + 12345, 2**61 + 2**40 + 77])
    monkeypatch.setattr("xlnet_kernels.dropout.new_state", lambda device: state.to(device))
    wanted = problem.results("reference")
    use_tiles(monkeypatch, *tiles)
    for name, found in problem.results("triton").items():
        assert torch.allclose(found, wanted[name], atol=1e-4, rtol=1e-4), name


@triton.jit
def _rotate(x, amount, out, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, QUADS: tl.constexpr):
    index = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    tl.store(out + index, shift.rotate(tl.load(x + index), tl.load(amount + tl.arange(0, BLOCK_M)), QUADS))


@pytest.mark.parametrize("quads", [False, True])
@pytest.mark.parametrize("columns", [16, 32, 64, 128])
def test_rotate_rotates_each_row_by_its_own_amount(columns, quads):
    x = torch.randn(16, columns, device=DEVICE)
    amount = torch.randint(-2 * columns, 2 * columns, (16,), dtype=torch.int32, device=DEVICE)
    out = torch.empty_like(x)
    _rotate[(1,)](x, amount, out, 16, columns, quads)
    column = (torch.arange(columns, device=DEVICE) + amount[:, None]) % columns
    assert torch.equal(out, x.gather(1, column))


def test_fragments_are_taken_apart_where_they_are_known(monkeypatch):
    config = tuning.Config(64, 64, 64, True, num_warps=4, num_stages=1)
    for capability in ((8, 0), (8, 9), (9, 0), (12, 0)):
        for kind in ("16-bit", "float32"):
            assert tuning.in_quads(config, kind, capability), capability
        assert not tuning.in_quads(config, "ieee", capability)
    assert not tuning.in_quads(config, "16-bit", (10, 0))  # tcgen05
    assert not tuning.in_quads(config, "16-bit", None)  # interpreted
    assert not tuning.in_quads(config._replace(num_warps=8), "16-bit", (9, 0))

    class Kernel:
        arg_names, pre_run_hooks, __name__ = ("META",), (), "kernel"

        def __getitem__(self, grid):
            return lambda META, **_: found.append(META.QUADS.value)

    found = []
    x, rel_key = torch.zeros(1, 1, 3, 16, dtype=torch.bfloat16), torch.zeros(1, 6, 16, dtype=torch.bfloat16)
    monkeypatch.setattr(launch_cache, "plans", {})
    call = launch.Call((x, x, x, rel_key, *[None] * 16, 3, 0.0, 1.0, False))
    monkeypatch.setattr(launch_cache.Plan, "capability", (9, 0))
    for keeps_fragments in (False, True):  # Triton before 3.9, and since
        monkeypatch.setattr(features, "version", lambda keeps=keeps_fragments: (3, 9) if keeps else (3, 8))
        call.launch(Kernel(), 1, config)
    assert found == [False, True]


def test_memory_is_linear_in_length(monkeypatch):
    """No tensor that the backend makes has a size that grows with the product of rows and keys."""
    largest = {}
    for length in (512, 1024):
        sizes = []
        monkeypatch.setattr(
            launch.Call,
            "launch",
            lambda self, kernel, count, config, _sizes=sizes, **arguments: _sizes.extend(
                a.numel() for a in tree_leaves(self.arguments | arguments) if isinstance(a, torch.Tensor)
            ),
        )
        problem = make(1, 1, length, mask="order").with_options(deterministic=False)
        problem.map(lambda leaf: leaf.requires_grad_()).call("triton")[0].sum().backward()
        largest[length] = max(sizes)
    assert largest[1024] <= 2 * largest[512]


@interpreted
def test_dtypes_it_does_not_serve_are_refused():
    x = torch.randn(1, 1, 4, 16, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="torch.float32, query is torch.float64"):
        xk.rel_attention(x, x, x, torch.randn(1, 8, 16, dtype=torch.float64), backend="triton")


@interpreted
def test_wide_heads_are_refused():
    x = torch.randn(1, 1, 4, 257)
    with pytest.raises(RuntimeError, match="head_dim up to 256, query has 257"):
        xk.rel_attention(x, x, x, torch.randn(1, 8, 257), backend="triton")


@interpreted
def test_automatic_choice_prefers_compiled_kernels():
    chosen = choose(None, torch.device("cpu"), torch.float32, 64)
    assert chosen is MODULES["cpu" if "cpu" in MODULES else "triton"]


def _fresh_process(code: str, **environment: str) -> str:
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "TRITON_INTERPRET": "0", **environment}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def test_triton_is_imported_by_the_first_call_only():
    code = "import sys, xlnet_kernels as xk; xk.backends(); print('triton.language' in sys.modules)"
    assert _fresh_process(code).strip() == "False"


@pytest.mark.parametrize(
    "setup, reason",
    [
        ("metadata.version = lambda name: exec('raise metadata.PackageNotFoundError')", "Triton is not installed"),
        ("metadata.version = lambda name: '3.5.1'", "it needs Triton 3.6 or newer, found 3.5.1"),
        ("torch.cuda.is_available = lambda: False", "no CUDA device"),
        (
            "torch.cuda.is_available = lambda: True; torch.cuda.current_device = lambda: 0; "
            "torch.cuda.get_device_capability = lambda device: (7, 5)",
            "it needs compute capability 8.0 or newer, this GPU has 7.5",
        ),
    ],
    ids=["no-triton", "old-triton", "no-gpu", "old-gpu"],
)
def test_says_why_it_is_unavailable(setup, reason):
    code = f"from importlib import metadata; import torch; import xlnet_kernels as xk; {setup}; "
    assert _fresh_process(code + "print(xk.backends()['triton'])").strip() == reason
