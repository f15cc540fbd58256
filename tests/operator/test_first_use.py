"""Messages while a first call compiles: one line, and none where nothing is compiled."""

from __future__ import annotations

import io
import logging
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from xlnet_kernels import _extension, _first_use, info
from xlnet_kernels.backends import cuda


@pytest.fixture
def lines(caplog, monkeypatch):
    """The log, and an event that its first line sets."""
    caplog.set_level(logging.INFO, logger="xlnet_kernels")
    said = threading.Event()
    say = _first_use.say

    def tell(what: str) -> None:
        say(what)
        said.set()

    monkeypatch.setattr(_first_use, "say", tell)
    return SimpleNamespace(text=lambda: [record.getMessage() for record in caplog.records], said=said)


class Kernel:
    """A kernel whose launch calls `wait`, from a function of the file `file`."""

    __name__, arg_names, pre_run_hooks = "forward_kernel", ["META"], []

    def __init__(self, wait, file: str) -> None:
        found = {"wait": wait}
        exec(compile("def launch(**named):\n    wait()\n", file, "exec"), found)
        self.launch = found["launch"]

    def __getitem__(self, grid):
        return self.launch


@pytest.fixture
def launch(monkeypatch):
    """A first launch of a plan, or one of a plan that has kept its kernel."""
    launch_cache = pytest.importorskip("xlnet_kernels.backends.triton.launch_cache")
    monkeypatch.setattr(launch_cache, "INTERPRETED", False)
    monkeypatch.setattr(_first_use, "SECONDS", 0.001)

    def run(kernel: Kernel, **kept) -> None:
        known = SimpleNamespace(kernels=kept.get("kernels", {}), title=lambda name: f"the Triton kernel {name}")
        launch_cache.run(known, kernel, 1, 2, {}, lambda: {"META": None})

    return run


def until(event: threading.Event) -> None:
    assert event.wait(60)


@pytest.mark.parametrize("file", ["compiler/code_generator.py", "backends/nvidia/compiler.py", "runtime/build.py"])
def test_a_triton_kernel_that_compiles_says_so_once(lines, launch, file):
    """It "compiles" until that is said."""
    triton = pytest.importorskip("triton")
    path = Path(triton.__file__).parent / file
    assert path.is_file()  # so that a Triton with other files is noticed
    launch(Kernel(lambda: until(lines.said), str(path)))
    assert lines.text() == ["compiling the Triton kernel forward_kernel once; a cache on disk keeps the result"]


def test_a_launch_that_takes_long_without_a_compiler_says_nothing(lines, launch, monkeypatch):
    """Taking a kernel from Triton's cache is in a file of Triton's, too."""
    looked, looks, is_inside = threading.Event(), [], _first_use._is_inside

    def look(*given) -> bool:
        looks.append(is_inside(*given))
        if len(looks) == 3:
            looked.set()
        return looks[-1]

    monkeypatch.setattr(_first_use, "_is_inside", look)
    launch(Kernel(lambda: until(looked), "/lib/triton/compiler/compiler.py"))
    assert lines.text() == [] and not any(looks)


def test_later_launches_and_the_interpreter_are_not_watched(launch, monkeypatch):
    from xlnet_kernels.backends.triton import launch_cache

    ran = []
    monkeypatch.setattr(_first_use.threading, "Thread", None)

    class Kept:
        def __getitem__(self, grid):
            return lambda *arguments: ran.append("kept")

    launch(Kernel(None, "here.py"), kernels={("forward_kernel", 1): (Kept(), None)})
    monkeypatch.setattr(launch_cache, "INTERPRETED", True)
    launch(Kernel(lambda: ran.append("interpreted"), "here.py"))
    assert ran == ["kept", "interpreted"]


def test_a_title_names_the_kernel_the_gpu_and_the_problem(monkeypatch):
    launch_cache = pytest.importorskip("xlnet_kernels.backends.triton.launch_cache")
    known = SimpleNamespace(capability=(9, 0), dtype=torch.bfloat16, head_dim=64)
    assert (
        launch_cache.Plan.title(known, "keys_kernel")
        == "the Triton kernel keys_kernel for sm_90 (bfloat16, head_dim 64)"
    )


@pytest.mark.parametrize(("capability", "count"), [((9, 0), 0), ((12, 0), 1)])
def test_what_the_driver_compiles_from_ptx_is_said_once(lines, monkeypatch, capability, count):
    monkeypatch.setattr(_extension, "module", SimpleNamespace(cuda_architectures="8.0;9.0a;10.0+PTX"))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    cuda._say_where_the_driver_compiles.cache_clear()
    try:
        for _ in range(2):
            cuda._say_where_the_driver_compiles(0)
    finally:
        cuda._say_where_the_driver_compiles.cache_clear()
    assert len(lines.text()) == count and all("for sm_120 from PTX" in text for text in lines.text())


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_check_shows_progress_on_a_terminal_and_lines_elsewhere(monkeypatch, capsys, stream):
    written = stream()
    monkeypatch.setattr("sys.stderr", written)

    def compare(*arguments):
        _first_use.say("a kernel")
        return []

    problem = info.self_check.problems()[0]
    monkeypatch.setattr(info.self_check, "problems", lambda: (problem,))
    monkeypatch.setattr(info.self_check, "compare", compare)
    monkeypatch.setattr(info.xlnet_kernels, "backends", lambda: {"torch": SimpleNamespace(available=True)})
    logger = logging.getLogger("xlnet_kernels")
    before = logger.level, logger.propagate, list(logger.handlers)
    assert info.check() and "All right." in capsys.readouterr().out
    said, line = "compiling a kernel once; a cache on disk keeps the result\n", "1 of 1: plain, float32, torch"
    if stream is Terminal:
        clear = "\r\x1b[K"
        assert written.getvalue() == clear + line + clear + said + clear + line + clear
    else:
        assert written.getvalue() == said
    assert (logger.level, logger.propagate, list(logger.handlers)) == before


def test_no_thread_watches_where_nobody_listens(monkeypatch):
    monkeypatch.setattr(_first_use.threading, "Thread", None)
    monkeypatch.setattr(_first_use._LOGGER, "isEnabledFor", lambda level: False)
    with _first_use.compiling("a kernel"):
        pass
