"""The fast path of plain calls through C++ (csrc/fast_path): the same results, and no other calls."""

from __future__ import annotations

import contextlib
from importlib import import_module
from unittest import mock

import numpy
import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import xlnet_kernels as xk
from tests.cases import MASKS, MODULES, assert_close, make
from xlnet_kernels import _extension, fast_path
from xlnet_kernels.backends import first_calls

BACKENDS = import_module("xlnet_kernels.backends")._BACKENDS
pytestmark = pytest.mark.skipif(fast_path._fast_path is None, reason=str(_extension.fast_path_reason))

PROBLEMS = {
    "nothing but rows": dict(biases=False, segments=False),
    "one row for many keys": dict(batch=1, length=1, keys=30),
    "memory, biases, segments": dict(mem=5),
    "rel_key that ends at 0": dict(rel_rows="uni", mem=2),
    "rel_key of each sequence": dict(rel_batch=True),
    "max_distance": dict(extra_distance=3),
    "window": dict(length=20, window=(4, 7)),
    "positions": dict(positions=True, mask="order"),
    "float16": dict(dtype=torch.float16),
    "bfloat16": dict(dtype=torch.bfloat16),
    "float64": dict(dtype=torch.float64),
    **{f"mask {mask}": dict(mask=mask) for mask in MASKS if mask not in (None, "dense")},
}


@contextlib.contextmanager
def ways():
    """Yields a list to which each call adds whether the fast path served it."""
    attend, found = fast_path.attend, []

    def spy(*arguments):
        result = attend(*arguments)
        found.append(result is not None)
        return result

    with mock.patch.object(fast_path, "attend", spy):
        yield found


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("backend", [None, "cpu"])
def test_results_are_those_of_the_python_checks(name, backend):
    problem = make(**PROBLEMS[name])
    with ways() as went:
        fast = problem.results(backend)
    assert went == [True]
    with mock.patch.object(fast_path, "attend", lambda *_: None):
        slow = problem.results(backend)
    assert fast.keys() == slow.keys()
    for key, value in slow.items():
        assert fast[key].dtype == value.dtype and fast[key].stride() == value.stride(), key
        assert torch.equal(fast[key].nan_to_num(), value.nan_to_num()), key


def plain(**changes):
    x = torch.randn(2, 2, 6, 8)
    return dict(query=x, key=x, value=x, rel_key=torch.randn(2, 12, 8)) | changes


class Subclass(torch.Tensor):
    pass


class Watching(TorchFunctionMode):
    def __torch_function__(self, function, types, arguments=(), options=None):
        return function(*arguments, **(options or {}))


class Catching(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        return function(*arguments, **(options or {}))


x = torch.randn(2, 2, 6, 8)
NOT_SERVED = {
    "dropout": dict(dropout_p=0.1),
    "dropout by another type": dict(dropout_p=0),
    "another backend": dict(backend="reference"),
    "dense mask": dict(mask=torch.ones(6, 6, dtype=torch.bool)),
    "mask of one for all sequences": dict(mask=xk.RankMask.causal(1, 6)),
    "subclass": dict(query=x.as_subclass(Subclass)),
    "numbers of numpy": dict(scale=numpy.float64(0.5)),
    "whole number as scale": dict(scale=1),
    "negative view": dict(query=torch.randn(2, 2, 6, 8, dtype=torch.complex64).conj().imag),
}


@pytest.mark.parametrize("name", NOT_SERVED)
def test_calls_that_the_fast_path_does_not_serve(name):
    with ways() as went:
        assert xk.rel_attention(**plain(**NOT_SERVED[name])).shape == x.shape
    assert not any(went)


MODES = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "torch function mode": Watching,
    "forward-mode gradients": forward_ad.dual_level,
    "dispatch mode": Catching,
    "self check": lambda: mock.patch.dict(first_calls._wrong, {("cpu", "cpu", torch.float32): "wrong"}),
    "a better backend": lambda: mock.patch.dict(BACKENDS, {"cpu": MODULES["reference"]}),
}


@pytest.mark.parametrize("name", MODES)
def test_modes_have_their_say(name):
    with ways() as went, MODES[name]():
        xk.rel_attention(**plain())
    assert went == [False]


def test_compilers_and_transforms_have_their_say():
    module = _Module()
    with ways() as went:
        torch.func.grad(lambda query: module(query).sum())(x)
        torch.func.vmap(module)(x[None])
        torch.jit.trace(module, x, check_trace=False)
    assert went and not any(went)
    graph = torch.export.export(module, (x,)).graph
    assert any("rel_attention" in str(node.target) for node in graph.nodes)


class _Module(torch.nn.Module):
    def forward(self, query):
        return xk.rel_attention(query, query, query, query.new_ones(2, 12, 8))


BAD = {
    "key of another shape": dict(key=x[..., :4]),
    "value of another dtype": dict(value=x.double()),
    "rel_key of too few rows": dict(rel_key=torch.randn(2, 11, 8)),
    "max_distance beyond any table": dict(max_distance=2**63 - 1),
    "max_distance as a flag": dict(max_distance=True, rel_key=torch.randn(2, 13, 8)),
    "scale": dict(scale=float("nan")),
    "deterministic": dict(deterministic=1),
    "positions outside": dict(query_positions=torch.full((2, 6), 6)),
    "positions of another type": dict(query_positions=torch.zeros(2, 6, dtype=torch.int16)),
    "integers": dict(query=x.long()),
    "no width": dict(query=x[..., :0], key=x[..., :0], value=x[..., :0], rel_key=torch.randn(2, 12, 0)),
    "ranks of other keys": dict(mask=xk.RankMask.causal(2, 7)),
    "memory of nothing": dict(memory=(None, None)),
    "nothing": dict(query=None),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_are_those_of_the_python_checks(name):
    texts = []
    for attend in (fast_path.attend, lambda *_: None):
        with (
            mock.patch.object(fast_path, "attend", attend),
            pytest.raises((ValueError, AttributeError)) as error,
        ):
            xk.rel_attention(**plain(**BAD[name]))
        texts.append(str(error.value))
    assert texts[0] == texts[1]


@pytest.fixture
def cuda_serves_the_cpu(monkeypatch):
    """Its operator is the CPU's on tensors there."""
    monkeypatch.setattr(BACKENDS["cpu"], "DEVICE", "none")
    changes = {"DEVICE": "cpu", "unavailable": lambda device=None: None, "max_head_dim": lambda dtype, device=None: 128}
    for name, value in changes.items():
        monkeypatch.setattr(BACKENDS["cuda"], name, value)
    monkeypatch.setattr(fast_path, "_OF_DEVICE", {"cpu": ("cuda", BACKENDS["cuda"])})


@pytest.mark.parametrize("backend", [None, "cuda"])
def test_cuda_has_the_fast_path_too(cuda_serves_the_cpu, backend):
    problem = make(mem=3, mask="order")
    with ways() as went:
        found = problem.results(backend)
    assert went == [True]
    assert_close(found, problem.to(torch.float64).results("reference"), problem)


def test_a_backend_that_is_not_the_best_is_not_served(cuda_serves_the_cpu):
    with ways() as went, pytest.raises(RuntimeError, match='backend="cpu" is unavailable'):
        xk.rel_attention(**plain(backend="cpu"))
    assert went == [False]


def test_a_named_backend_of_other_devices_asks_for_no_best_one(monkeypatch):
    """Which would check that one first, where it has never run."""
    monkeypatch.setattr(fast_path, "choose", mock.Mock(side_effect=AssertionError))
    with ways() as went, pytest.raises(RuntimeError, match='backend="cuda"'):
        xk.rel_attention(**plain(backend="cuda"))
    assert went == [False]


def test_determinism_follows_torch(monkeypatch):
    given = []
    monkeypatch.setattr(fast_path, "attend", lambda call, backend: given.append(call.deterministic))
    xk.rel_attention(**plain())
    xk.rel_attention(**plain(deterministic=True))
    assert given == [None, True]


def test_wrong_calls_of_the_function_itself():
    with pytest.raises(TypeError, match="fast_path takes 25 arguments, got 1"):
        _extension.module.fast_path(x)
    assert _extension.module.fast_path(*[None] * 25) is None
