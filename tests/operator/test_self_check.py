"""Comparison of a backend with the reference before its first call, and the effects of errors."""

from __future__ import annotations

import warnings
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import xlnet_kernels as xk
from xlnet_kernels import info
from xlnet_kernels.backends import reference, self_check

BACKENDS = import_module("xlnet_kernels.backends")._BACKENDS


class Fake(SimpleNamespace):
    """A backend on the CPU: the reference times `factor`. It counts its calls outside of compiled graphs."""

    DEVICE = "cpu"
    DTYPES = (torch.float32, torch.float64)  # so that 16-bit problems are left out

    def unavailable(self):
        return None

    def max_head_dim(self, dtype):
        return None

    def rel_attention(self, call):
        if not torch.compiler.is_compiling():
            self.calls += 1
        if self.error is not None:
            raise self.error
        out, lse = reference.rel_attention(call)
        return out * self.factor, lse


@pytest.fixture
def use(monkeypatch):
    """Makes such a backend the best one, asked to be checked."""
    monkeypatch.setattr(self_check, "_wish", lambda: "1")
    monkeypatch.setattr(self_check, "_checked", set())
    monkeypatch.setattr(self_check, "_refusals", {})

    original = dict(BACKENDS)

    def install(factor: float = 1.0, error: Exception | None = None) -> Fake:
        fake = Fake(calls=0, factor=factor, error=error)
        BACKENDS.clear()
        BACKENDS.update({"fake": fake, "reference": reference})
        return fake

    yield install
    BACKENDS.clear()
    BACKENDS.update(original)  # in their order, which is that of preference


def call(dtype=torch.float32, head_dim=8, backend=None):
    x = torch.ones(1, 1, 3, head_dim, dtype=dtype)
    return xk.rel_attention(x, x, x, torch.ones(1, 6, head_dim, dtype=dtype), backend=backend)


def test_a_right_backend_is_compared_once_for_each_dtype_and_head_dim(use):
    fake = use()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for expected, problem in ((2, {}), (3, {}), (5, {"head_dim": 16}), (7, {"dtype": torch.float64})):
            call(**problem)
            assert fake.calls == expected, problem


def test_a_wrong_backend_is_named_and_the_next_one_serves(use):
    fake = use(factor=1.01)
    with pytest.warns(RuntimeWarning, match='backend "fake" is not used.*out is off by.*allowed are') as caught:
        found = call()
    assert torch.equal(found, call()) and (found == 1).all()  # the reference's
    assert len(caught) == 1 and fake.calls == 1
    with pytest.raises(RuntimeError, match='backend="fake" is unavailable: its results are wrong on this device'):
        call(backend="fake")


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
    assert fake.calls >= 2 and not self_check._refusals


def test_nothing_is_compared_where_the_environment_says_so(use, monkeypatch):
    fake = use(factor=2.0)
    monkeypatch.setattr(self_check, "_wish", lambda: "0")
    assert (call() == 2).all() and fake.calls == 1


def test_nothing_is_compared_inside_a_compiled_graph_but_what_is_known_counts(use):
    fake = use(factor=2.0)
    graph = torch.compile(call, backend="eager", fullgraph=True)
    assert (graph() == 2).all() and fake.calls == 0
    with pytest.warns(RuntimeWarning, match="is not used"):
        call()
    torch.compiler.reset()
    assert (graph() == 1).all()


def test_nothing_is_compared_while_a_cuda_graph_is_captured(use, monkeypatch):
    fake = use()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    self_check.check_once("fake", fake, torch.device("cuda"), torch.float32, 8)
    assert fake.calls == 0 and not self_check._checked


def test_each_device_of_a_type_is_compared(monkeypatch):
    """A backend that is wrong on one GPU serves the others; graphs, which know the type alone, do without it."""
    wrong = {torch.device("cuda", 1)}
    compared = []

    def look(name, backend, device, dtype, head_dim):
        compared.append(device)
        return "wrong" if device in wrong else None

    monkeypatch.setattr(self_check, "_wish", lambda: "1")
    monkeypatch.setattr(self_check, "_checked", set())
    monkeypatch.setattr(self_check, "_refusals", {})
    monkeypatch.setattr(self_check, "_look", look)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    devices = [torch.device("cuda", index) for index in range(3)]
    for device in devices * 2:
        self_check.check_once("fake", Fake(), device, torch.float32, 8)
    assert compared == devices
    assert [self_check.refusal("fake", "cuda", torch.float32, device) for device in devices] == [None, "wrong", None]
    assert self_check.refusal("fake", "cuda", torch.float32) == "wrong"
    assert self_check.refusal("fake", "cuda", torch.float32, torch.device("cuda", 3)) == "wrong"  # not compared yet
    assert self_check.refusal("fake", "cuda", torch.float16) is None
    assert self_check.refusal("fake", "cpu", torch.float32) is None


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_a_gpu_is_asked_unless_a_result_vouches_for_it(monkeypatch, capability):
    monkeypatch.setattr(self_check, "_wish", lambda: "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(self_check, "VOUCHED", {"cuda": frozenset({(9, 0)})})
    self_check._is_vouched_for.cache_clear()
    for device, name in (("cuda", "cuda"), ("cuda", "triton"), ("cpu", "cpu")):
        asked = self_check._is_asked_for(name, torch.device(device))
        assert asked == (device == "cuda" and not (name == "cuda" and capability == (9, 0)))
    self_check._is_vouched_for.cache_clear()


def test_random_state_and_modes_of_the_caller_do_not_matter(use):
    fake = use()
    state = torch.get_rng_state()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=False):
        call()
    assert fake.calls == 2 and torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("problem", self_check.problems(), ids=lambda p: f"{p.name} {p.dtype}")
def test_each_problem_is_right_on_the_cpu_and_tells_a_wrong_result(problem):
    wrong = Fake(calls=0, factor=1.05, error=None)
    assert self_check.compare(wrong, problem, "cpu")
    if xk.backends()["cpu"].available:
        assert self_check.compare(BACKENDS["cpu"], problem, "cpu") == []


def test_the_command_prints_a_table_and_fails_where_a_backend_does(use, capsys):
    use(factor=1.5)
    assert not info.check()
    text = capsys.readouterr().out
    assert max(map(len, text.split("fake, plain")[0].splitlines())) <= 80
    assert "\u2717" in text and "-" in text and "fake, order, float32: out is off by" in text
    use()
    assert info.check()
    assert "All right." in capsys.readouterr().out
