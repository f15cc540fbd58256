"""Comparison of a backend with the reference before the first call of each kind."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import xlnet_kernels as xk
from tests.cases import make
from tests.operator.fake_backend import BACKENDS, forget, installed
from xlnet_kernels.backends import first_calls, gpus
from xlnet_kernels.call import INPUT_NAMES
from xlnet_kernels.functional import collect

DEVICE = torch.device("cuda", 0)
PLAIN = first_calls.kind_of(collect(*[torch.ones(1, 1, 3, 8)] * 3, torch.ones(1, 6, 8), deterministic=False))


@pytest.fixture
def use(monkeypatch):
    """Makes a fake backend the best one, asked to be compared."""
    forget(monkeypatch)
    monkeypatch.setattr(first_calls, "_wish", lambda: "1")
    with installed() as install:
        yield install


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
    # conftest.py asks for the other, which only gradients know
    "not deterministic": {"deterministic": False, "content_bias": torch.ones(1, 8, requires_grad=True)},
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
    assert [any(first_calls.Kind(*key[2:]).needs) for key in first_calls._verdicts] == [
        False,
        name in ("gradients", "not deterministic"),
    ]


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
    with pytest.warns(RuntimeWarning, match="is not used.*grad content_bias is off by"):
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
    assert fake.calls == 4  # for each call a comparison and itself


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
    (kind,) = (first_calls.Kind(*key[2:]) for key in first_calls._verdicts)
    assert (any(kind.needs), kind.problems()[0].mask == "order") == (has_gradients, has_mask)
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_fake_gpu_is_not_asked(monkeypatch):
    """torch.export for a GPU on a machine without one."""
    monkeypatch.setattr(first_calls, "_wish", lambda: "")
    assert not first_calls.is_wanted(DEVICE)


def test_nothing_is_compared_while_a_cuda_graph_is_captured(use, monkeypatch):
    fake = use()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    first_calls.check_once("fake", DEVICE, *PLAIN)
    assert fake.calls == 0 and not first_calls._verdicts


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_a_gpu_is_asked_unless_a_result_vouches_for_it(monkeypatch, capability):
    monkeypatch.setattr(first_calls, "_wish", lambda: "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(gpus, "number", lambda device: 0)
    monkeypatch.setattr(first_calls, "VOUCHED", {"cuda": frozenset({(9, 0)}), "triton": frozenset()})
    first_calls._is_vouched_for.cache_clear()
    for device, name in (("cuda", "cuda"), ("cuda", "triton"), ("cpu", "cpu")):
        asked = first_calls.has_to_be_compared(name, torch.device(device))
        assert asked == (device == "cuda" and not (name == "cuda" and capability == (9, 0)))
    first_calls._is_vouched_for.cache_clear()


ROWS = {
    "each": {"length": 7},
    "some": {"length": 5, "positions": True},
    "sorted": {"length": 5, "positions": True},
    "more": {"length": 9, "positions": True},
    "few": {"length": 5, "mem": 2100},
    "few without memory": {"length": 2, "keys": 2200},
    "few, positions": {"length": 2, "keys": 2200, "positions": True},
}


@pytest.mark.few
@pytest.mark.parametrize("mask", [None, "order", "causal", "window", "ranks", "dense"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("rel_batch", [False, True])
@pytest.mark.parametrize("how", ["", "deterministic", "dropout", "no gradients", "one gradient"])
def test_the_compared_problem_is_of_the_calls_kind(use, mask, rows, segments, biases, rel_batch, how):
    fake = use()
    given = {"keys": 7 if "few" not in rows else ROWS[rows]["length"]} | ROWS[rows]
    problem = make(mask=mask, segments=segments, biases=biases, rel_batch=rel_batch, **given)
    if rows == "sorted":
        problem = problem.with_options(query_positions=xk.RowPositions(problem.options["query_positions"]))
    if how == "one gradient":
        for name in problem.leaves.keys() - {"key"}:
            problem.leaves[name].requires_grad_(False)
    with torch.set_grad_enabled(how != "no gradients"):
        problem.run(None, "cpu", deterministic=how == "deterministic", dropout_p=0.1 if how == "dropout" else 0.0)
    *compared, own = fake.kinds
    assert compared[0] == own and len(compared) == 1 + (own.rows == "few")


def test_an_unchecked_call_of_the_fast_path_is_not_compared(use):
    """Its arguments may be wrong; a fused backend that was compared serves it."""
    fake = use()
    with pytest.raises(ValueError, match="max_distance"):
        call(max_distance="far")
    with pytest.raises(ValueError, match="deterministic must be a bool"):
        call(deterministic=[])
    assert fake.calls == 0 and not first_calls._verdicts
    plain = collect(*[torch.ones(1, 1, 3, 8)] * 3, torch.ones(1, 6, 8))
    assert first_calls.known_kind("fake", plain) is None
    call()
    assert first_calls.known_kind("fake", plain) is not None
    with pytest.raises(ValueError, match="key is a nested tensor"):
        x = torch.ones(1, 1, 3, 8)
        xk.rel_attention(x, torch.nested.nested_tensor([torch.ones(1, 3, 8)]), x, torch.ones(1, 6, 8))
    for wrong in ({"key": 1}, {"max_distance": "far"}, {"deterministic": []}, {"dropout_p": None}):
        assert first_calls.known_kind("fake", plain._replace(**wrong)) is None


def test_gradients_of_a_recomputation_in_backward(use):
    """The first call with gradients runs in autograd's thread; the comparison must not wait for that thread."""
    fake = use()
    x = torch.ones(1, 1, 3, 8, requires_grad=True)
    rel_key = torch.ones(1, 6, 8)
    checkpoint(lambda x: xk.rel_attention(x, x, x, rel_key), x, use_reentrant=True).sum().backward()
    assert x.grad is not None and fake.calls == 4 and len(first_calls._verdicts) == 2


def test_a_compiled_graph_may_take_dropout_as_an_argument(use):
    use()
    torch.compiler.reset()
    x, rel_key = torch.ones(1, 1, 3, 8), torch.ones(1, 6, 8)
    graph = torch.compile(
        lambda p: xk.rel_attention(x, x, x, rel_key, dropout_p=p, backend="fake"), backend="eager", fullgraph=True
    )
    for probability in (0.1, 0.2, 0.3):
        assert graph(probability).shape == x.shape


def test_compiled_autograd_of_the_user_is_left_out(use, monkeypatch):
    """It holds the compiler's lock, for which the comparison would wait, and would compile the comparison."""
    use()
    torch.compiler.reset()
    x = torch.ones(1, 1, 3, 8, requires_grad=True)
    rel_key = torch.ones(1, 6, 8)
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda x: xk.rel_attention(x, x, x, rel_key), backend="eager")(x).sum().backward()
    assert x.grad is not None and first_calls._verdicts


@pytest.mark.parametrize("bounded", [*itertools.product([False, True], repeat=2)])
def test_the_problem_of_a_window_has_the_window(bounded):
    for rows in ("", "few"):
        kind = PLAIN._replace(bounded=bounded, rows=rows)
        for problem in kind.problems():
            assert first_calls.kind_of(problem.call(problem.leaves())).bounded == bounded


@pytest.mark.parametrize("given", [("memory_key", "memory_value"), ("query_positions", "query_order"), ()], ids=str)
@pytest.mark.parametrize("rows", ["", "few"])
def test_no_gradient_of_the_problem_is_zero(given, rows):
    """With a mask that has a floor; an input without effect could be read wrongly."""
    names = (*given, "query_rank", "key_rank", "query_floor", "content_bias", "position_bias")
    kind = PLAIN._replace(given=tuple(name in names for name in first_calls._OPTIONAL), needs=(True,) * 10, rows=rows)
    for problem in kind.problems():
        found = problem.results(BACKENDS["reference"], torch.float64)
        assert len(found) > 7 and all(values.abs().max() > 1e-3 for values in found.values())


def test_an_order_of_rows_is_compared(use):
    """A backend that takes rows in ascending order for the rows themselves is found."""

    def ignores_order(call):
        return call.query_order is not None

    use(wrong_when=ignores_order)
    rows = xk.RowPositions(torch.tensor([[2, 0, 1]]))
    with pytest.warns(RuntimeWarning, match="is not used"):
        call(query_positions=rows)
    assert [first_calls.Kind(*key[2:]).problems()[0].positions for key in first_calls._verdicts] == ["sorted"]


def test_every_optional_tensor_is_part_of_a_kind():
    x = torch.ones(1, 1, 3, 8)
    everything = collect(x, x, x, x[0])._replace(**dict.fromkeys(INPUT_NAMES[4:], x))
    assert all(first_calls.kind_of(everything).given) and INPUT_NAMES[-1] == "dropout_state"
    for name in first_calls._OPTIONAL:
        assert first_calls.kind_of(everything._replace(**{name: None})) != first_calls.kind_of(everything)
