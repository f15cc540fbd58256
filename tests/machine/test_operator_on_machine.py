"""The operator's GPU kernels as their compilers left them, on the machine: outputs and all gradients, every feature."""

from __future__ import annotations

import os
from dataclasses import replace
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")
import triton  # noqa: E402

if triton.knobs.runtime.interpret:
    pytest.skip("Triton interprets in this process", allow_module_level=True)

import xlnet_kernels as xk  # noqa: E402
from lib.machine import cuda_driver  # noqa: E402
from lib.machine.machine import Fault  # noqa: E402
from lib.machine.package import serving  # noqa: E402
from lib.machine.triton_driver import Record  # noqa: E402
from tests.cases import (  # noqa: E402
    ANY_RANKS,
    TWO_SCORES,
    Problem,
    assert_ranks_of_any_size_are_right,
    assert_right,
    assert_two_keys_have_their_weights,
    make,
    make_mask,
)
from tests.machine.features import Features, pairwise  # noqa: E402

EVERYTHING = "XLNET_KERNELS_MACHINE" in os.environ
BASE = Features(
    architecture=80, dtype=torch.bfloat16, head_dim=16, mask="order", rel_rows="bi", rel_batch=False, memory=False,
    positions=False, segments=True, biases=True, dropout=False, deterministic=False, grad_lse=False, tf32=False,
    aligned=False, layout="contiguous",
)  # fmt: skip
# Together they have every dtype and feature once, and every mask but causal ones and windows, which are ranks, too.
SAMPLE = {
    "order": BASE,
    "wgmma": replace(
        BASE, architecture=90, dtype=torch.float16, head_dim=80, layout="projections", mask=None, segments=False
    ),
    "uni-padding-dropout": replace(
        BASE, dtype=torch.float16, rel_rows="uni", mask="padding", deterministic=True, dropout=True, aligned=True,
        head_dim=40, biases=False,
    ),
    "memory-positions-window": replace(
        BASE, architecture=90, memory=True, positions=True, mask="ranks", rel_rows="window", grad_lse=True
    ),
    "float32-dense": replace(BASE, dtype=torch.float32, mask="dense", segments=False, memory=True),
    "tf32": replace(BASE, architecture=90, dtype=torch.float32, tf32=True, rel_batch=True),
}  # fmt: skip


KERNELS = {"triton": {"forward_kernel", "rows_kernel", "keys_kernel"}, "cuda": {"forward_kernel", "backward_kernel"}}
NVCC_ARCHITECTURE = 80


def without_float16(features: Features) -> Features:
    """The features in a normal run, to avoid minutes of nvcc: no float16, which has bfloat16's templates."""
    is_float16 = features.dtype == torch.float16 and not EVERYTHING
    return replace(features, dtype=torch.bfloat16) if is_float16 else features


@pytest.fixture(params=["triton", "cuda"])
def backend(request) -> str:
    if request.param == "cuda" and cuda_driver.unavailable() is not None:
        pytest.skip(cuda_driver.unavailable())
    return request.param


@pytest.mark.parametrize("features", SAMPLE.values(), ids=SAMPLE.keys())
def test_sample(backend, features):
    if backend == "cuda" and not EVERYTHING:
        features = replace(without_float16(features), architecture=NVCC_ARCHITECTURE)
    with serving(features.architecture) as record:
        features.check(backend, features.problem(1, rows=80, most_batch=1))
    ran = " ".join(launch.name for launch in record.launches)
    assert all(name in ran for name in KERNELS[backend]), ran


WARPGROUPS = replace(BASE, architecture=90, head_dim=64)
# Conditions of the kernels of csrc/cuda/sm90: memory before the keys, each way of the mask and of segments, dropout,
# the ends of rel_key.
SERVED_BY_WARPGROUPS = {
    "order": WARPGROUPS,
    "wide-memory": replace(WARPGROUPS, head_dim=128, mask="ranks", memory=True, layout="projections"),
    "float16-gaps": replace(WARPGROUPS, dtype=torch.float16, mask="padding", rel_rows="window", memory=True),
    "causal-uni": replace(WARPGROUPS, mask="causal", rel_rows="uni", segments=False, rel_batch=True),
    "dense-dropout": replace(WARPGROUPS, head_dim=128, mask="dense", dropout=True, biases=False),
    "window": replace(WARPGROUPS, mask="window", aligned=True, layout="projections"),
}
NEEDS_NVCC = pytest.mark.skipif(cuda_driver.unavailable() is not None, reason=str(cuda_driver.unavailable()))


@NEEDS_NVCC
@pytest.mark.few
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("features", SERVED_BY_WARPGROUPS.values(), ids=SERVED_BY_WARPGROUPS.keys())
def test_forward_by_warpgroups(features, seed):
    """Two tiles of rows, with every barrier, copy and wgmma checked."""
    state = torch.tensor([2**62 + 12345, 2**61 + 2**40 + 77])
    with mock.patch("xlnet_kernels.dropout.new_state", lambda device: state), serving(90, seed=seed) as record:
        assert_right(without_float16(features).problem(seed, rows=230, most_batch=2), "cuda", needs=())
    assert "warpgroup_forward_kernel" in record.launches[-1].name


@NEEDS_NVCC
@pytest.mark.parametrize(("width", "head_dim"), [(64, 64), (60, 64), (128, 128), (123, 128)])
def test_outputs_of_warpgroups_fill_whole_sectors(width, head_dim):
    """Each is written once, 16 bytes a lane, also where rows of the caller's width are not aligned to as many.

    On the way to them through shared memory no two lanes meet at a bank.
    """
    problem = make(1, 1, 256, width=width, dtype=torch.bfloat16)
    with serving(90) as record:
        assert_right(problem, "cuda", needs=())
    launch = record.launches[-1]
    assert "warpgroup_forward_kernel" in launch.name
    # Rows of out, and of each row four numbers: lse, also what segments give to it, row_max and row_sum
    assert launch.counts.global_sectors_written == 256 * (head_dim * 2 + 4 * 4) // 32
    assert launch.counts.shared_conflicts == 0


@NEEDS_NVCC
@pytest.mark.parametrize(("architecture", "head_dim"), [(80, 64), (80, 128), (90, 96)])
def test_additions_fill_whole_sectors(architecture, head_dim):
    """An addition has one number of a lane on sm_80, two on sm_90. Tiles are of 64 rows and of 64 keys, two of each."""
    problem = make(1, 1, 128, width=head_dim, biases=False, segments=False, dtype=torch.bfloat16)
    with serving(architecture) as record:
        assert_right(problem.with_options(deterministic=True), "cuda")
    launch = next(launch for launch in record.launches if "15backward_kernel" in launch.name)
    windows = [128 + key - (row + 63) for key in (0, 64) for row in (0, 64)]  # first of 128 rows of rel_key, of 256
    rows = sum(64 + min(first + 128, 256) - max(first, 0) for first in windows)  # of query's gradient and rel_key's
    assert launch.counts.atomic_sectors == rows * head_dim * 4 // 32 + 2  # each block counts itself for its turn


def stacked(seed: int, keys: int, step: int, mem: int, width: int, mask: str | None, dtype=torch.bfloat16) -> Problem:
    """Two streams: content rows at all positions and a query row at each `step`-th, in any order."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.cat([torch.arange(keys), torch.arange(0, keys, step)])
    rows = torch.stack([positions[torch.randperm(len(positions), generator=generator)] for _ in range(2)])
    problem = make(2, 1, rows.shape[1], keys, mem, width, dtype=dtype if EVERYTHING else torch.bfloat16, seed=seed)
    options = {} if mask is None else {"mask": make_mask(mask, rows, 1, keys, mem, generator)}
    return problem.with_options(query_positions=rows, **options)


def assert_by_warpgroups(record: Record) -> None:
    """Both passes: the main loop after `preprocess`, and in backward before `postprocess`."""
    assert "warpgroup_forward_kernel" in record.launches[1].name
    assert "warpgroup_backward_kernel" in record.launches[3].name


STACKED = {
    "sixth": (200, 6, 0, 64, "order"),
    "all-memory": (100, 1, 30, 128, "ranks", torch.float16),
    "third-dense": (150, 3, 10, 128, "dense"),
    "most-causal": (220, 50, 0, 64, "causal", torch.float16),
    "half": (90, 2, 0, 64, None),
}


@NEEDS_NVCC
@pytest.mark.few
@pytest.mark.parametrize("sizes", STACKED.values(), ids=STACKED.keys())
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_stacked_streams_by_warpgroups(sizes, dropout):
    """Rows sorted between each other, one window of rel_key for 64 of them, each shifted by its own amount.

    Backward moves each row's part of the band from tile to tile.
    """
    state = torch.tensor([2**62 + 12345, 2**61 + 2**40 + 77])
    problem = stacked(5, *sizes).with_options(dropout_p=dropout, deterministic=False)
    with mock.patch("xlnet_kernels.dropout.new_state", lambda device: state), serving(90) as record:
        assert_right(problem, "cuda")
    assert_by_warpgroups(record)


@NEEDS_NVCC
@pytest.mark.few
@pytest.mark.parametrize("most", [3, 40, 1000])
@pytest.mark.parametrize("mask", [None, "ranks"])
def test_rows_in_any_order_by_warpgroups(most, mask):
    """Gaps of up to `most` between positions: the block goes to the keys once for each run of rows."""
    generator = torch.Generator().manual_seed(most)
    keys, mem, length = 150, 20, 170
    rows = torch.randint(most, (2, length), generator=generator).cumsum(1).clamp(max=10**9) % keys
    problem = make(2, 1, length, keys, mem, 64, dtype=torch.bfloat16)
    options = {} if mask is None else {"mask": make_mask(mask, rows, 1, keys, mem, generator)}
    with serving(90) as record:
        assert_right(problem.with_options(query_positions=rows, deterministic=False, **options), "cuda")
    assert_by_warpgroups(record)


@NEEDS_NVCC
@pytest.mark.parametrize("head_dim", [64, 128])
def test_one_visible_key_of_a_stacked_row_has_probability_one(head_dim):
    """Backward takes each row's band in two halves; the sums are forward's."""
    torch.manual_seed(0)
    keys = 80
    positions = torch.cat([torch.arange(keys), torch.arange(0, keys, 3)])[None]
    rows = positions.shape[1]
    query, key, rel_key = (16 * torch.randn(1, 1, n, head_dim).bfloat16() for n in (rows, keys, 2 * keys))
    content_bias, position_bias = (4 * torch.randn(1, head_dim).bfloat16() for _ in range(2))
    value = torch.randn_like(key).requires_grad_()
    grad_out = torch.randn_like(query)
    seen = torch.arange(rows) % keys
    with serving(90) as record:
        out = xk.rel_attention(
            query, key, value, rel_key, content_bias=content_bias, position_bias=position_bias, scale=2.0,
            mask=torch.nn.functional.one_hot(seen, keys).bool(), query_positions=positions, deterministic=False,
            backend="cuda",
        )  # fmt: skip
        (grad,) = torch.autograd.grad(out, value, grad_out)
    assert_by_warpgroups(record)
    assert torch.equal(out, value[:, :, seen])
    first, second = grad_out[:, :, :keys].float(), torch.zeros(1, 1, keys, head_dim)
    second[:, :, : rows - keys] = grad_out[:, :, keys:].float()
    assert torch.equal(grad, (first + second).bfloat16())


@NEEDS_NVCC
@pytest.mark.parametrize("features", SERVED_BY_WARPGROUPS.values(), ids=SERVED_BY_WARPGROUPS.keys())
def test_gradients_by_warpgroups(features):
    """Up to two blocks of keys and four tiles of rows, with every barrier, copy and wgmma checked."""
    features = replace(without_float16(features), grad_lse=features.memory)
    with serving(90, seed=3) as record:
        features.check("cuda", features.problem(3, rows=230, most_batch=1))
    assert any("warpgroup_backward_kernel" in launch.name for launch in record.launches)


@NEEDS_NVCC
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients_of_tiles_that_do_not_follow_each_other(head_dim):
    """Rows that see nothing between others: the window of rel_key begins anew.

    Where keys are hidden as well, it does so for one of a block's two consumers only. Infinities of rows that see
    nothing stay there.
    """
    key_rank = (torch.arange(448) // 64 == 1).int()[None]
    query_rank = (torch.arange(448) // 64 % 3 != 1).int()[None]
    problem = make(1, 1, 448, width=head_dim, dtype=torch.bfloat16)
    problem = problem.with_options(mask=xk.RankMask(query_rank, key_rank), deterministic=False)
    problem.leaves["query"][:, :, 64:128] = torch.inf
    with serving(90) as record:
        assert_right(problem, "cuda")
    assert any("warpgroup_backward_kernel" in launch.name for launch in record.launches)


def tiles_in_three_runs(head_dim: int) -> Problem:
    """640 rows and keys; of ten tiles of 64 keys no row sees 1, 2, 5 and 9."""
    rank = torch.zeros(1, 640, dtype=torch.int32)
    for tile in (1, 2, 5, 9):
        rank[:, 64 * tile : 64 * (tile + 1)] = 1
    query_rank = torch.ones(1, 640, dtype=torch.int32)
    return make(1, 1, 640, width=head_dim, dtype=torch.bfloat16).with_options(mask=xk.RankMask(query_rank, rank))


@NEEDS_NVCC
def test_tiles_that_do_not_follow_each_other():
    """Empty tiles between others: rel_key's window begins anew, one slot of it still being there."""
    with serving(90) as record:
        assert_right(tiles_in_three_runs(64), "cuda", needs=())
    found = record.launches[-1].counts.tensor
    # six tiles are left in three runs; a run takes two products with rel_key more, at its start and after its last tile
    assert found["wgmma.m64n64k16.bf16"] == 5 * 8 * (3 * 6 + 3 * 2) * 4


@NEEDS_NVCC
@pytest.mark.parametrize("missing", ["content_bias", "position_bias"])
def test_either_bias_can_be_missing_where_stages_are_used_again(missing):
    """A stage has rows of rel_key and their v.r at one time, keys and their u.k at another."""
    problem = tiles_in_three_runs(64)
    problem = replace(problem, leaves={name: x for name, x in problem.leaves.items() if name != missing})
    with serving(90) as record:
        assert_right(problem.with_options(deterministic=False), "cuda")
    assert [launch.name.count("warpgroup_") for launch in record.launches].count(1) == 2


@NEEDS_NVCC
@pytest.mark.parametrize(("head_dim", "warps", "m_tiles"), [(64, 4, 2), (128, 8, 1)])
def test_columns_of_the_band_are_carried_from_tile_to_tile(head_dim, warps, m_tiles):
    """On sm_80, tiles of 32 keys: each row of rel_key is multiplied once for 16 rows of query in a run of tiles."""
    with serving(80) as record:
        assert_right(tiles_in_three_runs(head_dim), "cuda", needs=())
    found = record.launches[-1].counts.tensor
    products, sums = 3 * 4 * head_dim // 16, 2  # of a tile of 16 rows: content, position and values, and of weights
    begun = 2 * head_dim // 16  # the first 16 columns of a run
    segments = 2 * head_dim // 16  # once: query rows and the segment bias times both embeddings
    assert found["mma.m16n8k16.bf16"] == 5 * warps * m_tiles * (12 * (products + sums) + 3 * begun + segments)


@NEEDS_NVCC
@pytest.mark.parametrize("ranks", ANY_RANKS, ids=str)
def test_ranks_of_any_size(ranks):
    with serving(90) as record:
        assert_ranks_of_any_size_are_right(*ranks, "cuda", torch.bfloat16)
    assert "warpgroup_forward_kernel" in record.launches[1].name


@NEEDS_NVCC
@pytest.mark.parametrize("scores", TWO_SCORES, ids=str)
def test_weights_whatever_tile_has_the_larger_score(scores):
    with serving(90) as record:
        assert_two_keys_have_their_weights(scores, "cuda", torch.bfloat16)
    assert "warpgroup_forward_kernel" in record.launches[1].name


@NEEDS_NVCC
@pytest.mark.parametrize(
    ("architecture", "change", "forward", "backward"),
    [
        (90, {}, True, True),
        (90, {"dtype": torch.float16, "head_dim": 128}, True, True),
        (90, {"memory": True, "mask": "dense", "dropout": True, "rel_rows": "window", "rel_batch": True}, True, True),
        (90, {"deterministic": True}, True, True),
        (80, {}, False, False),
        (90, {"positions": True}, False, False),
        (90, {"head_dim": 80}, False, False),
        (90, {"dtype": torch.float32}, False, False),
    ],
)
def test_kernels_are_chosen_by_the_tables(architecture, change, forward, backward, monkeypatch):
    names: list[str] = []
    monkeypatch.setattr(cuda_driver.Device, "names", names)
    with serving(architecture):
        replace(WARPGROUPS, **change).problem(1, rows=40).results("cuda")
    assert "preprocess_kernel" in names[0] and "preprocess_kernel" in names[2] and "postprocess_kernel" in names[4]
    assert ("warpgroup_forward_kernel" in names[1]) == forward, names
    assert ("warpgroup_backward_kernel" in names[3]) == backward, names


@NEEDS_NVCC
def test_a_kernel_that_is_refused_leaves_the_next_launch_alone(monkeypatch):
    """A GPU without the shared memory for it keeps the error until someone asks."""
    problem = BASE.problem(1, rows=40, most_batch=1)
    with serving(NVCC_ARCHITECTURE):
        with monkeypatch.context() as small:
            small.setitem(cuda_driver.SHARED_MEMORY, NVCC_ARCHITECTURE, 16 * 1024)
            with pytest.raises(RuntimeError, match="forward.*invalid argument"):
                problem.results("cuda")
        BASE.check("cuda", problem)


@NEEDS_NVCC
def test_arrays_of_the_workspace_have_bounds_of_their_own(monkeypatch):
    """They lie in one tensor."""
    found: list[dict[int, int]] = []
    regions = cuda_driver._regions

    def record(parameters):
        known = regions(parameters)
        found.append({start: size for start, size, _, name in known if "device memory" in name})
        return known

    monkeypatch.setattr(cuda_driver, "_regions", record)
    heads, rows, width = 2, 70, 16
    problem = make(1, heads, rows, width=width, dtype=torch.bfloat16).with_options(deterministic=False)
    rel_rows = problem.leaves["rel_key"].shape[-2]
    with serving(NVCC_ARCHITECTURE):
        problem.results("cuda", with_lse=False)
    # float32 sums for the gradients of query and rel_key, of dS by distance and by key
    sums = {4 * heads * n for n in (rows * width, rel_rows * width, rel_rows, rows)}
    assert len(found) == 5 and all(sums <= set(launch.values()) for launch in found[2:]), found


def is_of_an_old_triton(error: Exception, features: Features) -> bool:
    """Triton 3.6 and 3.7 have two defects in 16 bits on sm_90 that the kernels do not go around: docs/validation.md."""
    of_wgmma = features.architecture == 90 and features.dtype != torch.float32
    if not triton.__version__.startswith(("3.6.", "3.7.")) or not of_wgmma:
        return False
    if isinstance(error, Fault):
        return error.kind == "in_flight" and error.kernel == "rows_kernel" and features.positions
    return "PassManager" in str(error) and features.mask == "dense"


@pytest.mark.skipif(not EVERYTHING, reason="`make test-machine` asks for it")
@pytest.mark.parametrize("features", pairwise(), ids=str)
def test_every_pair_of_features(backend, features):
    features = features.serves(backend)
    try:
        with serving(features.architecture):
            features.check(backend, features.problem(0, rows=150))
    except (Fault, RuntimeError) as error:
        if backend == "triton" and is_of_an_old_triton(error, features):
            pytest.xfail(str(error))
        raise
