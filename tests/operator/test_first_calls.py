"""Comparison of a backend with the reference before the first call of each kind."""

from __future__ import annotations

import itertools
import json
import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import xlnet_kernels as xk
from tests.cases import make
from tests.operator.fake_backend import BACKENDS, installed
from xlnet_kernels.backends import first_calls, gpus
from xlnet_kernels.call import INPUT_NAMES
from xlnet_kernels.functional import collect

STACK = {"xlnet_kernels": "1", "Triton": "2", "driver": "3", "device": "a GPU"}
DEVICE = torch.device("cuda", 0)
PLAIN = first_calls.Kind(torch.float32, 8, (), (False, False), False, False, 0, False)


@pytest.fixture
def use(monkeypatch):
    """Makes a fake backend the best one, asked to be compared."""
    forget(monkeypatch)
    monkeypatch.setattr(first_calls, "_wish", lambda: "1")
    with installed() as install:
        yield install


def forget(monkeypatch) -> None:
    """As in a new process."""
    monkeypatch.setattr(first_calls, "_verdicts", {})
    monkeypatch.setattr(first_calls, "_wrong", {})
    first_calls._remembered.cache_clear()


def call(dtype=torch.float32, head_dim=8, backend=None, **options):
    x = torch.ones(1, 1, 3, head_dim, dtype=dtype)
    return xk.rel_attention(x, x, x, torch.ones(1, 6, head_dim, dtype=dtype), backend=backend, **options)


VARIANTS = {
    "dtype": {"dtype": torch.float64},
    "head_dim": {"head_dim": 16},
    "content_bias": {"content_bias": torch.ones(1, 8)},
    "mask of ranks": {"mask": xk.RankMask.causal(1, 3)},
    "dense mask": {"mask": torch.ones(3, 3, dtype=torch.bool)},
    "positions": {"query_positions": torch.arange(3)[None]},
    "sorted positions": {"query_positions": xk.RowPositions(torch.arange(3)[None])},
    "dropout": {"dropout_p": 0.5},
    "not deterministic": {"deterministic": False},  # conftest.py asks for the other
    "window": {"max_distance": 1},
    "memory": {"memory": (torch.ones(1, 1, 2, 8), torch.ones(1, 1, 2, 8))},
    "gradients": {"position_bias": torch.ones(1, 8, requires_grad=True)},
}


def call_of(name: str):
    options = dict(VARIANTS[name])
    if name == "window":
        x = torch.ones(1, 1, 3, 8)
        return xk.rel_attention(x, x, x, torch.ones(1, 2, 8), **options)
    if name == "memory":
        x = torch.ones(1, 1, 3, 8)
        return xk.rel_attention(x, x, x, torch.ones(1, 8, 8), **options)
    return call(**options)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_right_backend_is_compared_once_for_each_kind(use, name):
    fake = use()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for run, calls in ((call, 2), (call, 3), (lambda: call_of(name), 5), (lambda: call_of(name), 6)):
            run()
            assert fake.calls == calls
    with_gradients = [key[2].has_gradients for key in first_calls._verdicts]
    assert with_gradients == [False, name == "gradients"]


def test_a_wrong_backend_is_named_and_the_next_one_serves(use):
    fake = use(factor=1.01)
    with pytest.warns(
        RuntimeWarning, match='backend "fake" is not used.*out is off by.*allowed are.*torch 2'
    ) as caught:
        found = call()
    assert torch.equal(found, call()) and (found == 1).all()  # the reference's
    assert len(caught) == 1 and fake.calls == 1
    with pytest.raises(RuntimeError, match='backend="fake" is unavailable: its results are wrong on this device'):
        call(backend="fake")


def test_a_backend_that_is_wrong_for_one_kind_serves_the_others(use):
    fake = use(wrong_when=lambda call: call.mask is not None)
    mask = torch.ones(3, 3, dtype=torch.bool)
    with pytest.warns(RuntimeWarning, match="is not used for such calls"):
        assert (call(mask=mask) == 1).all()
    before = fake.calls
    assert (call() == 1).all() and fake.calls == before + 2
    assert (call(mask=mask) == 1).all() and fake.calls == before + 2


def test_backward_is_compared_where_gradients_are_wanted(use):
    use(wrong_gradient=True)
    assert (call() == 1).all()
    bias = torch.ones(1, 8, requires_grad=True)
    with pytest.warns(RuntimeWarning, match="is not used.*grad query is off by"):
        call(content_bias=bias)
    with torch.no_grad():
        call(content_bias=bias)
    assert [reason is None for reason in first_calls._verdicts.values()] == [True, False, True]


def test_a_backend_that_cannot_run_is_replaced_too(use):  # and is not said to be wrong
    use(error=ValueError("no such instruction"))
    with pytest.warns(RuntimeWarning, match="could not be compared.*: ValueError: no such instruction"):
        assert (call() == 1).all()


def test_a_full_device_says_nothing_of_the_backend(use):
    fake = use(error=torch.OutOfMemoryError("full"))
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):  # of the call itself
            call()
    assert fake.calls == 6  # for each call two comparisons, as the fast path asks too, and itself


@pytest.mark.parametrize("mode", ["meta device", "inference", "checkpoint"])
def test_the_comparison_does_not_see_modes_of_the_caller(use, mode):
    fake = use()
    if mode == "meta device":
        x = torch.ones(1, 1, 3, 8)
        with torch.device("meta"):
            xk.rel_attention(x, x, x, torch.ones(1, 6, 8, device="cpu"))
    elif mode == "inference":
        with torch.inference_mode():
            call()
    else:
        x = torch.ones(1, 1, 3, 8, requires_grad=True)
        rel_key = torch.ones(1, 6, 8)
        checkpoint(lambda x: xk.rel_attention(x, x, x, rel_key), x, use_reentrant=False).sum().backward()
        assert x.grad is not None
    assert fake.calls >= 2 and not first_calls._wrong


def test_random_state_and_modes_of_the_caller_do_not_matter(use):
    fake = use()
    state = torch.get_rng_state()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=False):
        call()
    assert fake.calls == 2 and torch.equal(torch.get_rng_state(), state)


def test_nothing_is_compared_where_the_environment_says_so(use, monkeypatch):
    fake = use(factor=2.0)
    monkeypatch.setattr(first_calls, "_wish", lambda: "0")
    assert (call() == 2).all() and fake.calls == 1


def one_call(x, rel_key, bias, mask):
    heads = x.view(1, 3, 1, -1).transpose(1, 2)
    return xk.rel_attention(heads, heads, heads, rel_key, content_bias=bias, mask=mask)


def inputs(head_dim: int, has_gradients: bool, has_mask: bool):
    bias = torch.ones(1, head_dim, requires_grad=has_gradients)
    mask = xk.RankMask.causal(1, 3) if has_mask else None
    return torch.ones(1, 3, head_dim), torch.ones(1, 6, head_dim), bias, mask


@pytest.mark.parametrize("has_gradients, has_mask", [(False, False), (True, True)], ids=["forward", "backward"])
@pytest.mark.parametrize("fault", ["factor", "wrong_gradient"])
def test_a_comparison_precedes_a_compiled_graph(use, fault, has_gradients, has_mask):
    """A backend that is wrong serves no graph of the kind; eager calls know the result."""
    use(**{"factor": {"factor": 2.0}, "wrong_gradient": {"wrong_gradient": True}}[fault])
    given = inputs(8, has_gradients, has_mask)
    is_wrong = fault == "factor" or has_gradients
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.compiler.reset()
        found = torch.compile(one_call, backend="eager", fullgraph=True)(*given)
    assert sum("is not used" in str(warning.message) for warning in caught) == is_wrong
    (kind,) = (key[2] for key in first_calls._verdicts)
    assert (kind.has_gradients, "key_rank" in kind.tensors) == (has_gradients, has_mask)
    assert (found == 1).all() and torch.equal(found, one_call(*given)) and len(first_calls._verdicts) == 1


def test_a_graph_with_free_sizes(use):
    """A free length is no matter; with a free head_dim, a graph takes what is known of its dtype."""
    use(factor=2.0)

    def compiled(free: int, head_dim: int):
        x, rel_key = torch.ones(1, 1, 5, head_dim), torch.ones(1, 10, head_dim)
        torch._dynamo.mark_dynamic(x, free)
        torch._dynamo.maybe_mark_dynamic(rel_key, free - 1)
        torch.compiler.reset()
        attend = torch.compile(lambda x, rel_key: xk.rel_attention(x, x, x, rel_key), backend="eager", fullgraph=True)
        return attend(x, rel_key)

    assert (compiled(3, 24) == 2).all() and not first_calls._verdicts
    with pytest.warns(RuntimeWarning, match="is not used"):
        assert (compiled(2, 8) == 1).all()
    assert (compiled(3, 24) == 1).all() and len(first_calls._verdicts) == 1


def test_nothing_is_compared_while_a_cuda_graph_is_captured(use, monkeypatch):
    fake = use()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    first_calls.check_once("fake", DEVICE, *PLAIN)
    assert fake.calls == 0 and not first_calls._verdicts


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """GPUs whose comparisons are counted and fail where the test says so; their file is the test's own."""
    forget(monkeypatch)
    monkeypatch.setattr(first_calls, "_wish", lambda: "")
    monkeypatch.setattr(first_calls, "_is_vouched_for", lambda name, device: False)
    monkeypatch.setattr(first_calls, "FILE", tmp_path / "cache" / "self_check.jsonl")
    monkeypatch.setattr(first_calls, "_stack", lambda device: STACK | {"device": f"GPU {device.index}"})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    compared, faults = [], {}

    def compare(backend, problem, device):
        compared.append((device, problem))
        fault = faults.get(device, [])
        if isinstance(fault, Exception):
            raise fault
        return fault

    monkeypatch.setattr(first_calls.self_check, "compare", compare)
    with installed() as install:
        install()
        yield compared, faults


def test_each_device_of_a_type_is_compared(gpu):
    """A backend that is wrong on one GPU serves the others; a call that was not compared does without it."""
    compared, faults = gpu
    faults["cuda:1"] = ["out is off"]
    devices = [torch.device("cuda", index) for index in range(3)]
    with pytest.warns(RuntimeWarning, match="GPU 1"):
        for device in devices * 2:
            first_calls.check_once("fake", device, *PLAIN)
    assert [device for device, _ in compared] == ["cuda:0", "cuda:1", "cuda:2"]

    def refused(device, dtype=torch.float32, of=PLAIN):
        return first_calls.refusal("fake", device, dtype, *of) is not None

    assert [refused(device) for device in devices] == [False, True, False]
    assert refused(torch.device("cuda", 3))
    assert refused(devices[0], of=PLAIN._replace(head_dim=16)) and refused(devices[0], of=())
    assert not refused(devices[0], torch.float16) and not refused(torch.device("cpu"))


@pytest.mark.parametrize(
    "fault", [[], ["out is off"], RuntimeError("no such instruction")], ids=["right", "wrong", "fails"]
)
def test_the_next_process_knows_the_result(gpu, monkeypatch, fault):
    compared, faults = gpu
    faults["cuda:0"] = fault
    reasons = []
    for process in range(2):
        forget(monkeypatch)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            first_calls.check_once("fake", DEVICE, *PLAIN)
        assert len(caught) == bool(fault)
        reasons.append(first_calls.refusal("fake", DEVICE, torch.float32, *PLAIN))
        assert len(compared) == 1, process
    assert reasons[0] == reasons[1] and (reasons[0] is None) == (not fault)


@pytest.mark.parametrize("change", [*STACK, "kind", "wish"])
def test_a_result_holds_for_its_stack_and_kind(gpu, monkeypatch, change):
    compared, _ = gpu
    first_calls.check_once("fake", DEVICE, *PLAIN)
    forget(monkeypatch)
    if change == "wish":  # XLNET_KERNELS_SELF_CHECK=1
        monkeypatch.setattr(first_calls, "_wish", lambda: "1")
    elif change != "kind":
        monkeypatch.setattr(first_calls, "_stack", lambda device: STACK | {"device": "GPU 0", change: "other"})
    first_calls.check_once("fake", DEVICE, *PLAIN._replace(head_dim=16 if change == "kind" else 8))
    assert len(compared) == 2


def test_a_fault_that_other_code_may_have_caused_is_not_kept(gpu, monkeypatch):
    compared, faults = gpu
    faults["cuda:0"] = RuntimeError("CUDA error: an illegal memory access was encountered")
    for count in (1, 2):
        forget(monkeypatch)
        with pytest.warns(RuntimeWarning, match="illegal memory access"):
            first_calls.check_once("fake", DEVICE, *PLAIN)
        assert len(compared) == count


def test_a_damaged_or_forbidden_file_is_no_error(gpu, monkeypatch, tmp_path):
    compared, _ = gpu
    file = first_calls.FILE
    first_calls.check_once("fake", DEVICE, *PLAIN)
    line = file.read_text()
    assert json.loads(line)["fault"] is None
    for text, count in (("{\n[1]\n" + line, 1), (line[:40], 2)):
        file.write_text(text)
        forget(monkeypatch)
        first_calls.check_once("fake", DEVICE, *PLAIN)
        assert len(compared) == count
    (tmp_path / "file").touch()
    monkeypatch.setattr(first_calls, "FILE", tmp_path / "file" / "under" / "a file")
    forget(monkeypatch)
    first_calls.check_once("fake", DEVICE, *PLAIN)
    assert len(compared) == 3 and first_calls._verdicts


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_a_gpu_is_asked_unless_a_result_vouches_for_it(monkeypatch, capability):
    monkeypatch.setattr(first_calls, "_wish", lambda: "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(first_calls, "VOUCHED", {"cuda": frozenset({(9, 0)})})
    first_calls._is_vouched_for.cache_clear()
    for device, name in (("cuda", "cuda"), ("cuda", "triton"), ("cpu", "cpu")):
        asked = first_calls._has_to_be_compared(name, torch.device(device))
        assert asked == (device == "cuda" and not (name == "cuda" and capability == (9, 0)))
    first_calls._is_vouched_for.cache_clear()


@pytest.mark.few
@pytest.mark.parametrize("mask", [None, "order", "causal", "window", "ranks", "dense"])
@pytest.mark.parametrize("mem", [0, 3])
@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("how", ["", "deterministic", "dropout", "no gradients"])
def test_the_compared_problem_is_of_the_calls_kind(use, mask, mem, segments, biases, positions, how):
    fake = use()
    problem = make(mem=mem, mask=mask, segments=segments, biases=biases, positions=positions)
    with torch.set_grad_enabled(how != "no gradients"):
        problem.run(None, "cpu", deterministic=how == "deterministic", dropout_p=0.1 if how == "dropout" else 0.0)
    compared, own = fake.kinds
    assert compared == own


@pytest.mark.parametrize("bounded", [*itertools.product([False, True], repeat=2)])
def test_the_problem_of_a_window_has_the_window(bounded):
    compared = PLAIN._replace(bounded=bounded).problem()
    assert first_calls.kind_of(compared.call(compared.leaves())).bounded == bounded


def test_every_optional_tensor_is_part_of_a_kind():
    x = torch.ones(1, 1, 3, 8)
    everything = collect(x, x, x, x[0])._replace(**dict.fromkeys(INPUT_NAMES[4:], x))
    assert {*first_calls.kind_of(everything).tensors} == {*INPUT_NAMES[4:]} - {"dropout_state"}


@pytest.mark.parametrize("has_file", [True, False])
def test_the_driver_is_part_of_the_stack(monkeypatch, tmp_path, has_file):
    file = tmp_path / "version"
    if has_file:
        file.write_text("NVRM version: 580.1\nGCC\n")
    monkeypatch.setattr(gpus, "_DRIVER_FILE", file)
    monkeypatch.setenv("PATH", str(tmp_path))  # without nvidia-smi
    gpus.driver.cache_clear()
    first_calls._stack.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    try:
        stack = first_calls._stack(DEVICE)
    finally:
        gpus.driver.cache_clear()
        first_calls._stack.cache_clear()
    assert stack["driver"] == ("NVRM version: 580.1" if has_file else "")
    assert (
        stack["device"] == "a GPU" and stack["torch"] == torch.__version__ and stack["xlnet_kernels"] == xk.__version__
    )


def test_numbers_of_gpus(monkeypatch):
    assert torch.cuda.is_available() or gpus.number(DEVICE) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    devices = None, torch.device("cuda"), torch.device("cpu"), torch.device("cuda", 1)
    assert [gpus.number(device) for device in devices] == [2, 2, 2, 1]


def test_each_gpu_has_its_own_answer(monkeypatch):
    """Kernels run on one GPU of a machine and not on the other, which is older."""
    capabilities = [(9, 0), (7, 5)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capabilities[device or 0])
    triton = BACKENDS["triton"]
    monkeypatch.setattr(triton, "INTERPRETED", False)
    monkeypatch.setattr(triton.features, "version", lambda: (3, 8))
    triton._unavailable.cache_clear()
    try:
        found = [triton.unavailable(torch.device("cuda", index)) for index in range(2)]
    finally:
        triton._unavailable.cache_clear()
    assert found[0] is None and "this GPU has 7.5" in found[1]
