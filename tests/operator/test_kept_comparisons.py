"""Results of comparisons, kept by device and in a file for the next process."""

from __future__ import annotations

import json
import warnings

import pytest
import torch

import xlnet_kernels as xk
from tests.operator.fake_backend import BACKENDS, forget, installed
from xlnet_kernels.backends import first_calls, gpus
from xlnet_kernels.call import collect

STACK = {"xlnet_kernels": "1", "Triton": "2", "driver": "3", "device": "a GPU"}
DEVICE = torch.device("cuda", 0)
PLAIN = first_calls.kind_of(collect(*[torch.ones(1, 1, 3, 8)] * 3, torch.ones(1, 6, 8), deterministic=False))


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """GPUs whose comparisons are counted and fail where the test says so; their file is the test's own."""
    forget(monkeypatch)
    monkeypatch.setattr(first_calls, "_wish", lambda: "")
    monkeypatch.setattr(first_calls, "_is_vouched_for", lambda name, device: False)
    monkeypatch.setattr(gpus, "number", lambda device: device.index)
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

    def refused(device, dtype=torch.float32, kind=PLAIN):
        return first_calls.refusal("fake", device, dtype, *kind) is not None

    assert [refused(device) for device in devices] == [False, True, False]
    assert refused(torch.device("cuda", 3))
    assert refused(devices[0], kind=PLAIN._replace(head_dim=16)) and refused(devices[0], kind=())
    assert not refused(devices[0], torch.float16) and not refused(torch.device("cpu"))


class CompilationError(Exception):
    """As Triton's."""


FAULTS = {"right": [], "wrong": ["out is off"], "not compiled": CompilationError("no such instruction")}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=[*FAULTS])
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
    assert not fault or "self_check.jsonl keeps this result" in reasons[0]


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


@pytest.mark.parametrize("text", ["CUDA error: an illegal memory access was encountered", "no C compiler"])
def test_a_fault_that_something_else_may_have_caused_is_not_kept(gpu, monkeypatch, text):
    compared, faults = gpu
    faults["cuda:0"] = RuntimeError(text)
    for count in (1, 2):
        forget(monkeypatch)
        with pytest.warns(RuntimeWarning, match=text):
            first_calls.check_once("fake", DEVICE, *PLAIN)
        assert len(compared) == count


@pytest.mark.parametrize(
    "text", ["Triton Error [CUDA]: out of memory", "the CUDA kernel was not launched: out of memory"]
)
def test_memory_that_runs_out_in_a_kernels_launch_is_no_verdict(gpu, text):
    compared, faults = gpu
    faults["cuda:0"] = RuntimeError(text)
    for _ in range(2):
        first_calls.check_once("fake", DEVICE, *PLAIN)
    assert len(compared) == 2 and not first_calls._verdicts


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
