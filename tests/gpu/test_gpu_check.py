"""`make gpu-check` as far as a machine without a GPU can show it: its refusal, its limits, what it keeps and prints."""

from __future__ import annotations

import _thread
import json
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from tests import ROOT

pytestmark = pytest.mark.usefixtures("scripts")


def test_says_that_there_is_no_gpu(monkeypatch, capsys, tmp_path):
    import gpu_check

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu_check.main([str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.strip().endswith("no CUDA device on this machine, so there is nothing to check")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def interruptible():
    """Ctrl-C arrives; shells start what runs in the background with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


TESTS = """
import pytest

from tests import ROOT

from tests import ROOT

def test_good(): pass

@pytest.mark.skip(reason="no such thing here")
def test_absent(): pass

@pytest.mark.parametrize("x", [1, 2])
def test_bad(x): assert x > 2, "too small"

def test_no_end():
    import time
    time.sleep({seconds})
"""


@pytest.mark.parametrize("seconds", [0, 600], ids=["to-the-end", "stopped"])
def test_outcomes_are_kept_even_if_the_run_is_stopped(tmp_path, seconds, monkeypatch, interruptible):
    import gpu_check

    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # the run that is watched is no worker of this one
    file, lines = tmp_path / "test_it.py", tmp_path / "lines"
    file.write_text(TESTS.format(seconds=seconds))
    command = ["-m", "pytest", "-p", "no:cacheprovider", "-p", "tests.gpu.outcomes"]
    command += ["--rootdir", str(tmp_path), str(file)]

    def run() -> int:
        return gpu_check.run(command, 60, tmp_path / "log", {"OUTCOMES": str(lines)})

    def stop_after_four() -> None:
        while not lines.exists() or lines.read_text().count("\n") < 4:
            time.sleep(0.05)
        _thread.interrupt_main()

    if seconds:
        threading.Thread(target=stop_after_four, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            run()
    else:
        assert run() == 1
    found = gpu_check.count(lines)
    assert (found["passed"], found["failed"], found["skipped"]) == (1 if seconds else 2, 2, 1)
    assert found["skipped_because"] == {"no such thing here": 1}
    assert [one["test"].rpartition("::")[2] for one in found["failures"]] == ["test_bad[1]", "test_bad[2]"]
    assert all(one["reason"].startswith("AssertionError: too small") for one in found["failures"])


@pytest.mark.parametrize(
    "text, ends",
    [
        ("torch.AcceleratorError: CUDA error: an illegal memory access was encountered", True),
        ("RuntimeError: Triton Error [CUDA]: an illegal memory access was encountered", True),
        ("RuntimeError: rel_attention: the CUDA kernel forward for B=1: misaligned address", True),
        ("AssertionError: off by one", False),
    ],
)
def test_a_worker_that_has_lost_the_gpu_ends_itself(monkeypatch, text, ends):
    from tests.gpu import outcomes

    ended = []
    monkeypatch.setattr(outcomes, "WORKER", True)
    monkeypatch.setattr(outcomes, "_gpu_is_lost", False)
    monkeypatch.setattr(outcomes.os, "_exit", ended.append)
    outcomes.pytest_runtest_logreport(SimpleNamespace(failed=True, longreprtext=text))
    outcomes.pytest_runtest_logfinish("a test")
    assert bool(ended) == ends


def test_a_step_is_stopped_at_its_limit(capsys):
    import gpu_check

    assert gpu_check.run(["-c", "import time; time.sleep(600)"], 0) == -1
    assert "stopped after 0 s: -c" in capsys.readouterr().out


def test_a_test_that_failed_once_has_failed(tmp_path):
    from gpu_check import count

    lines = tmp_path / "lines"
    outcomes = ("passed", "failed", "passed")  # the last: run again by a new worker
    rows = [{"test": "a", "outcome": outcome, "seconds": 1, "reason": ""} for outcome in outcomes]
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"test": "b", "outc')
    assert {name: count(lines)[name] for name in ("passed", "failed")} == {"passed": 0, "failed": 1}
    assert count(tmp_path / "none")["passed"] == 0


def steps_of(monkeypatch, tmp_path, **replaced):
    """A run whose steps do what they are told here, and the record that it leaves."""
    import gpu_check

    tests = {"passed": 3, "failed": 0, "skipped": 1, "failures": [], "finished": True}

    def build(self):
        self.record["build"] = "pip"

    def test(self):
        self.record["tests"] = tests

    def sanitize(self):
        self.record["sanitizer"] = {"memcheck": "clean", "racecheck": "stopped"}

    def measure(self):
        gpu = {"architecture": 90, "multiprocessors": 132, "clock_mhz": 1980.0}
        run = {"rows": rows(), "environment": gpu, "settings": {"dtype": "bfloat16", "head_dim": 64}}
        self.file("-attn.json").write_text(json.dumps(run))
        self.record["benchmark"] = {"finished": True}

    steps = {"build": build, "test": test, "sanitize": sanitize, "measure": measure} | replaced
    for name, step in steps.items():
        step.__name__ = name
        monkeypatch.setattr(gpu_check.Check, name, step)
    monkeypatch.setattr("lib.harness.environment", lambda device: {})
    status = gpu_check.Check(tmp_path, "NVIDIA H200 (test)").run()
    return status, json.loads((tmp_path / "gpu-check-nvidia-h200-test.json").read_text())


def rows() -> list[dict]:
    """A content stream that takes 1.5 times the faster baseline forward, and 2 times backward."""
    times = {
        "xlnet_kernels triton": (3.0, 9.0),
        "plain SDPA, no positions, flash": (2.0, 5.0),
        "plain SDPA, no positions, cuDNN": (4.0, 7.0),
        "transformers eager": (40.0, 90.0),
    }
    found = [
        {"section": "core", "implementation": name, "length": 512, "direction": direction, "median_ms": ms}
        for name, both in times.items()
        for direction, ms in zip(("forward", "backward"), both, strict=True)
    ]
    streams = {"section": "streams", "length": 512, "direction": "forward", "median_ms": 1.0}
    found.append(streams | {"implementation": "content stream", "ratio_to_baseline": 1.0})
    found.append(streams | {"implementation": "both streams, N = L/6", "ratio_to_baseline": 1.21})
    long = {"section": "long", "length": 65536, "direction": "backward", "median_ms": 1.0, "peak_bytes": 2.5e9}
    return [*found, long | {"implementation": "xlnet_kernels triton"}]


def test_the_table_comes_last(monkeypatch, tmp_path, capsys):
    status, record = steps_of(monkeypatch, tmp_path)
    assert status == 0 and record["complete"]
    shown = capsys.readouterr().out
    (line,) = (line for line in shown.splitlines() if line.split()[:1] == ["512"])
    assert line.split() == ["512", "1.50", "flash", "2.00", "flash", "10.00", "-", "-", "-"]
    # beside counts, as multiples of plain attention: (9 - 3) ms / (5 - 2) ms backward
    ratios = [line.split()[-1] for line in shown.splitlines() if line.startswith("triton")]
    assert sorted(ratios) == ["1.50x", "2.00x"]
    assert "1.21 x the content stream" in shown and "xlnet_kernels triton needs 2.50 GB" in shown
    assert shown.splitlines()[-4:-2] == ["memcheck: clean", "racecheck: stopped"]
    assert shown.splitlines()[-2:][0] == "tests: 3 passed, 0 failed, 1 skipped"
    assert "build: pip" in shown.splitlines()[-1]


def failing_tests(self):
    failure = {"test": "tests/gpu/test_gpu.py::test_it", "outcome": "failed", "reason": "off by one"}
    self.record["tests"] = {"passed": 3, "failed": 1, "skipped": 0, "failures": [failure], "finished": True}


def errors_in_memory(self):
    self.record["sanitizer"] = {"memcheck": "errors"}


def stopped(self):
    raise KeyboardInterrupt


def failing_build(self):
    self.record["build"] = "failed"


@pytest.mark.parametrize(
    "step, replacement, status, text",
    [
        ("test", failing_tests, 1, "FAILED tests/gpu/test_gpu.py::test_it: off by one"),
        ("sanitize", errors_in_memory, 1, "memcheck: errors"),
        ("build", failing_build, 1, "build: failed"),
        ("build", stopped, 130, "build: not reached"),
        ("measure", stopped, 130, "tests: 3 passed"),
    ],
)
def test_what_went_wrong_shows_in_status_and_table(monkeypatch, tmp_path, capsys, step, replacement, status, text):
    found, record = steps_of(monkeypatch, tmp_path, **{step: replacement})
    assert found == status and text in capsys.readouterr().out
    assert record["complete"] == (status == 1)


@pytest.mark.parametrize(
    "commands, said",
    [
        ("exit 0", "clean"),
        ("exit 9", "errors"),
        ("exit 3", "exit status 3"),
        ("sleep 600", "stopped"),
        ("echo '========= Invalid __global__ write of size 4 bytes'; sleep 600", "errors"),
        ("echo '========= Error: Race reported between two places'; sleep 600", "errors"),
    ],
)
def test_what_the_sanitizer_says(monkeypatch, tmp_path, commands, said):
    import gpu_check

    program = tmp_path / "compute-sanitizer"
    program.write_text(f"#!/bin/sh\n{commands}\n")
    program.chmod(0o755)
    monkeypatch.setattr(gpu_check.shutil, "which", lambda name: str(program))
    monkeypatch.setattr(gpu_check, "SANITIZER", 2)
    check = gpu_check.Check(tmp_path, "GPU")
    check.file("-memcheck.log").write_text("========= Invalid __global__ read, in an earlier run\n")
    check.sanitize()
    assert check.record["sanitizer"] == {"memcheck": said, "racecheck": said}


def test_the_sanitizer_sees_every_tensors_end_and_our_kernels_alone(monkeypatch, tmp_path):
    import gpu_check

    program = tmp_path / "compute-sanitizer"
    program.write_text('#!/bin/sh\necho "$PYTORCH_NO_CUDA_MEMORY_CACHING $*"\n')
    program.chmod(0o755)
    monkeypatch.setattr(gpu_check.shutil, "which", lambda name: str(program))
    check = gpu_check.Check(tmp_path, "GPU")
    check.sanitize()
    for tool in ("memcheck", "racecheck"):
        said = check.file(f"-{tool}.log").read_text()
        assert said.startswith(f"1 --tool {tool} --kernel-name kns=xlnet_kernels --report-api-errors no ")
        assert said.endswith(f"{sys.executable} -m tests.gpu.small_calls\n")


def test_the_benchmark_needs_no_rich(tmp_path):
    for name in ("rich", "transformers"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not here')")
    output = tmp_path / "results.json"
    command = [sys.executable, "benchmarks/attn.py", "--device", "cpu", "--lengths", "16", "32", "--heads", "1"]
    command += ["--head-dim", "8", "--batch", "1", "--implementations", "reference", "plain", "eager", "--seconds"]
    command += ["0.01", "--sections", "core", "--direction", "forward", "--output", str(output)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "xlnet_kernels reference" in done.stdout
    assert "transformers eager (L 32 forward): transformers is not installed" in done.stdout
    assert json.loads(output.read_text())["complete"]
