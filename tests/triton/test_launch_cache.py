"""Plans that are kept from call to call, and their keys. test_triton_launch_cache.py of tests/machine has kernels."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
import triton  # noqa: E402

from xlnet_kernels.backends.triton import features, launch_cache  # noqa: E402


@pytest.fixture(autouse=True)
def no_plans(monkeypatch):
    monkeypatch.setattr(launch_cache, "plans", {})


def inputs(length: int = 3, dtype: torch.dtype = torch.float16, scale: float = 1.0, bias: bool = False) -> list:
    x, rel_key = torch.zeros(2, 2, length, 16, dtype=dtype), torch.zeros(2, 2 * length, 16, dtype=dtype)
    biases = torch.zeros(2, 16, dtype=dtype) if bias else None
    return [x, x, x, rel_key, biases, *[None] * 15, length, 0.0, scale, False]


def test_a_plan_serves_calls_of_one_signature():
    known = launch_cache.find(inputs(), (True,))
    assert launch_cache.find(inputs(), (True,)) is known  # other tensors
    strided = inputs()
    strided[1] = strided[1].transpose(0, 1)
    others = [
        inputs(4),
        inputs(dtype=torch.bfloat16),
        inputs(scale=2.0),
        inputs(scale=-1.0),
        inputs(bias=True),
        strided,
    ]
    for number, changed in enumerate((4, 0.1, 0.5, True)):  # max_distance, dropout_p, scale, deterministic
        others.append([*inputs()[: number - 4], changed, *inputs()[len(inputs()) - 3 + number :]])
    found = [
        known,
        launch_cache.find(inputs(), (False,)),
        launch_cache.find(inputs()),
        *(launch_cache.find(other, (True,)) for other in others),
        *(
            launch_cache.find(inputs(), (True, grad_out))
            for grad_out in (torch.zeros(3, 4), torch.zeros(3, 1).expand(3, 4))
        ),
    ]
    assert len({id(one) for one in found}) == len(found) == len(launch_cache.plans)


def test_float32_has_a_plan_for_each_precision(monkeypatch):
    found = []
    for allowed in (False, True):
        monkeypatch.setattr(launch_cache, "allows_tf32", lambda allowed=allowed: allowed)
        found.append(launch_cache.find(inputs(dtype=torch.float32)).precision)
    assert found == ["tf32x3", "tf32"]


def of_a_call(mem: int = 0, keys: int = 8, rel_len: int = 16, max_distance: int = 8, **tensors) -> launch_cache.Plan:
    """Eight rows; by default XLNet's table, whose first row no pair reads."""
    query, key, memory = (torch.zeros(2, 2, count, 16) for count in (8, keys, mem))
    given = dict.fromkeys(launch_cache.INPUT_NAMES) | {"query": query, "key": key, "value": key, **tensors}
    given |= {"memory_key": memory, "memory_value": memory} if mem else {}
    return launch_cache.Plan(given | {"rel_key": torch.zeros(2, rel_len, 16)}, max_distance, 0.0, 1.0)


@pytest.mark.parametrize(
    ("call", "keys", "rel_rows"),
    [
        ({}, False, True),
        ({"rel_len": 15, "max_distance": 7}, False, False),
        ({"rel_len": 16, "max_distance": 7}, False, True),
        ({"mem": 4, "rel_len": 19, "max_distance": 11}, False, False),
        ({"rel_len": 5, "max_distance": 2}, False, False),  # a window around each row
        ({"rel_len": 3, "max_distance": -1}, True, False),  # keys after each row alone
        ({"mem": 4, "rel_len": 5, "max_distance": 3}, True, False),  # the last memory key's distance to row 0 is 1
        ({"keys": 12, "rel_len": 10, "max_distance": 7}, True, False),  # keys up to two positions ahead
        ({"key_rank": torch.zeros(2, 8)}, True, True),
        ({"mask": torch.ones(2, 2, 8, 8)}, True, True),
        ({"query_positions": torch.zeros(2, 8)}, False, True),
        ({"query_positions": torch.zeros(2, 8), "rel_len": 5, "max_distance": 2}, True, True),
    ],
)
def test_copies_are_made_where_rows_may_be_unread(call, keys, rel_rows):
    known = of_a_call(**call)
    assert (known.has_unread_keys, known.has_unread_rel_rows) == (keys, rel_rows)


VERSIONS = ((3, 5, 1), (3, 6, 0), (3, 7, 0), (3, 7, 1), (3, 8, 0), (3, 9, 0), (3, 10, 0))


@pytest.mark.parametrize(
    ("name", "on"),
    [
        ("backend", VERSIONS[1:]),
        ("backend on sm_100", VERSIONS[3:]),
        ("launch past the binder", VERSIONS[1:-1]),
        ("TF32 with dropout", VERSIONS[4:]),
        ("rotation in quads", VERSIONS[5:]),
        ("shift in PTX", VERSIONS[1:]),
    ],
)
def test_features_are_on_by_version_and_gpu(name, on, monkeypatch):
    for version in VERSIONS:
        monkeypatch.setattr(features, "version", lambda version=version: version)
        assert features.is_on(name, (9, 0)) == (version in on)
    monkeypatch.setattr(features, "version", lambda: on[-1])
    for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
        family = features.family(capability)
        assert features.is_on(name, capability) == (family in features.FEATURES[name].families)


@pytest.mark.parametrize("package", features.PACKAGES)
@pytest.mark.parametrize(
    ("version", "numbers"), [("3.7.1", (3, 7, 1)), ("3.8.0+gitabc1", (3, 8, 0)), ("3.6.0.post26", (3, 6, 0))]
)
def test_every_distribution_of_triton_is_found(package, version, numbers, monkeypatch):
    def versions(name: str) -> str:
        if name != package:
            raise features.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(features.metadata, "version", versions)
    assert features.version.__wrapped__() == numbers


def test_launches_do_not_read_metadata(monkeypatch):
    """They ask for features, and reading takes a millisecond."""
    features.version()
    monkeypatch.setattr(features, "metadata", None)
    assert features.is_on("backend") and features.refusal() is None


@pytest.mark.parametrize(
    ("version", "capability", "refused"),
    [
        ("3.5.1", None, "it needs Triton 3.6 or newer, found 3.5.1"),
        ("3.6.0", (9, 0), None),
        ("3.7.0", (10, 0), "it needs Triton 3.7.1 or newer on sm_100, found 3.7.0"),
        ("3.7.0", (12, 0), "it needs Triton 3.7.1 or newer on sm_120, found 3.7.0"),
        ("3.7.1", (10, 3), None),
        ("3.9.0", (7, 5), "it needs compute capability 8.0 or newer, this GPU has 7.5"),
    ],
)
def test_the_backend_is_refused_by_version_and_gpu(version, capability, refused, monkeypatch):
    monkeypatch.setattr(features, "installed", lambda: version)
    monkeypatch.setattr(features, "version", features.version.__wrapped__)
    assert features.refusal(capability) == refused


@pytest.mark.parametrize(
    ("version", "capability", "most"),
    [
        ("3.7.1", (10, 0), 64),
        ("3.7.1", (11, 0), 64),
        ("3.7.1", (12, 0), 256),
        ("3.7.1", (9, 0), 256),
        ("3.7.1", None, 256),
        ("3.8.0", (10, 0), 256),
    ],
)
def test_wide_heads_are_refused_where_their_backward_does_not_compile(version, capability, most, monkeypatch):
    monkeypatch.setattr(features, "installed", lambda: version)
    monkeypatch.setattr(features, "version", features.version.__wrapped__)
    assert features.max_head_dim(capability) == most


def test_plans_are_few(monkeypatch):
    monkeypatch.setattr(launch_cache, "_MOST", 2)
    first, second, third = (inputs(length) for length in (1, 2, 3))
    known = [launch_cache.find(one) for one in (first, second, third)]
    assert (
        len(launch_cache.plans) == 2 and launch_cache.find(third) is known[2] and launch_cache.find(second) is known[1]
    )
    assert launch_cache.find(first) is not known[0]  # the oldest went


def test_threads_insert_plans_one_after_the_other(monkeypatch):
    """While one looks for the oldest plan another may not add one."""

    class Plans(dict):
        def __iter__(self):
            assert not launch_cache._inserting.acquire(blocking=False)
            return super().__iter__()

    monkeypatch.setattr(launch_cache, "plans", Plans())
    monkeypatch.setattr(launch_cache, "_MOST", 1)
    launch_cache.find(inputs(1))
    launch_cache.find(inputs(2))
    assert len(launch_cache.plans) == 1 and launch_cache._inserting.acquire(blocking=False)
    launch_cache._inserting.release()


def test_alignment_tells_tensors_apart():
    whole = torch.zeros(64, dtype=torch.float16)
    assert whole.data_ptr() % 16 == 0
    near, far = whole[4:], whole[8:]
    found = [launch_cache.alignment((a, None, 7, b)) for a in (far, near) for b in (far, near)]
    assert len(set(found)) == 4 and found[0] == launch_cache.alignment((whole, whole))


class Kernel:
    """Stands in for a JITFunction; `compiled` is what its run returns."""

    __name__ = "kernel"
    arg_names = ("x", "META", "y")

    def __init__(self, compiled) -> None:
        self.compiled, self.bound, self.pre_run_hooks = compiled, [], []

    def __getitem__(self, grid):
        def launch(**named):
            self.bound.append((grid, named))
            return self.compiled

        return launch


class Compiled:
    """Stands in for a CompiledKernel."""

    def __init__(self) -> None:
        self.launched = []

    def __getitem__(self, grid):
        return lambda *arguments: self.launched.append((grid, arguments))


def run(known, kernel, aligned: int, x) -> None:
    launch_cache.run(known, kernel, aligned, 5, {"y": 2, "x": x, "other": 3}, lambda: {"META": "meta", "num_warps": 4})


def test_the_binder_is_asked_once_for_each_alignment(monkeypatch):
    monkeypatch.setattr(triton.compiler, "CompiledKernel", Compiled)
    kernel, known = Kernel(Compiled()), SimpleNamespace(kernels={})
    for aligned, x in ((1, "a"), (1, "b"), (2, "c"), (1, "d")):
        run(known, kernel, aligned, x)
    assert kernel.bound == [((5,), {"x": x, "y": 2, "META": "meta", "num_warps": 4}) for x in "ac"]
    assert kernel.compiled.launched == [((5, 1, 1), (x, "meta", 2)) for x in "bd"]
    kernel.pre_run_hooks.append(print)  # which the binder calls
    run(known, kernel, 1, "e")
    assert len(kernel.bound) == 3


def test_a_triton_that_was_not_tried_launches_through_its_binder(monkeypatch):
    monkeypatch.setattr(triton.compiler, "CompiledKernel", Compiled)
    monkeypatch.setattr(features, "version", lambda: (3, 10, 0))
    kernel, known = Kernel(Compiled()), SimpleNamespace(kernels={})
    for x in "ab":
        run(known, kernel, 1, x)
    assert [named["x"] for _, named in kernel.bound] == ["a", "b"] and not known.kernels


def test_what_triton_does_not_promise_falls_back_to_its_binder():
    """Interpreted nothing comes back; a later Triton may return something else."""
    for compiled in (None, Compiled()):
        kernel, known = Kernel(compiled), SimpleNamespace(kernels={})
        for x in "ab":
            run(known, kernel, 1, x)
        assert [named["x"] for _, named in kernel.bound] == ["a", "b"] and not known.kernels


@pytest.mark.parametrize(
    ("heads", "batch", "length", "rel_len", "queues"),
    [
        (16, 1, 65536, 131072, (512, 1)),
        (16, 16, 512, 1024, (4, 3)),  # four tiles a head at once would leave processors idle
        (16, 1, 65536, 256, (1, 5)),  # a window: four blocks are at work
        (1, 1, 512, 1024, (4, 1)),  # no more copies than runs
    ],
)
def test_copies_of_a_deterministic_gradient_are_as_many_as_fill_a_gpu(
    monkeypatch, heads, batch, length, rel_len, queues
):  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(launch_cache, "INTERPRETED", False)
    x = torch.empty(batch, heads, length, 64, dtype=torch.bfloat16, device="meta")
    rel_key = torch.empty(heads, rel_len, 64, dtype=torch.bfloat16, device="meta")
    tensors = dict.fromkeys(launch_cache.INPUT_NAMES) | {"query": x, "key": x, "value": x, "rel_key": rel_key}
    known = launch_cache.Plan(tensors, rel_len // 2, 0.0, 1.0)
    known.device = SimpleNamespace(type="cuda")
    assert known.queues == queues
    rows = (queues[1] - 1) * heads * rel_len
    assert rows <= 2 * 132 * 64 * 2  # a block, twice as the other half of rel_key is for other keys
