"""Counter-based dropout: the generator's known answers, its statistics, and that the mask can be rebuilt."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import xlnet_kernels as xk
from tests.cases import COMPILED, READY, make
from xlnet_kernels import dropout
from xlnet_kernels._ops import ops

ONES = 0xFFFFFFFF
needs_kernels = pytest.mark.skipif("cpu" not in COMPILED, reason="the CPU kernels are not compiled")


@pytest.mark.parametrize(
    "counter, key, answer",
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),  # digits of pi
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_gives_the_known_answers_of_random123(counter, key, answer):
    words = dropout.philox([torch.tensor(w) for w in counter], [torch.tensor(w) for w in key])
    assert [int(word) for word in words] == list(answer)


def test_mask_is_laid_out_as_documented():
    # element by element, as the docstring of xlnet_kernels/dropout.py says it
    seed, offset, first, others, p = 0x0123456789ABCDEF, 0x87654321, 0xFEDCB, 0x2A9, 0.3
    mask = dropout.keep_mask(torch.tensor([seed, others << 52 | first << 32 | offset]), 2, 3, 40, 150, p)
    thresholds = set()
    for b, h, i, j in itertools.product(range(2), range(3), (0, 1, 39), range(150)):
        head = b * (3 + others) + h + first
        counter = [j // 64 * 4 + j % 8 // 2, i, head, offset]
        words = dropout.philox([torch.tensor(w) for w in counter], [torch.tensor(w) for w in (seed & ONES, seed >> 32)])
        byte = int(words[j % 64 // 16]) >> 8 * (j % 16 // 8 * 2 + j % 2) & 255
        phase = (seed + head * 0xC2B2AE35 + i * 0x85EBCA6B + j // 64 * 0x9E3779B9) % 2**32
        thresholds.add((int(p * 2**32) + phase // 2**8) // 2**24)
        assert mask[b, h, i, j] == (byte >= (int(p * 2**32) + phase // 2**8) // 2**24)
    assert thresholds == {76, 77}  # 0.3 * 256 is 76.8


def test_p_is_exact_on_average():
    """Bytes have 256 values, p any: what is dropped at a p between two of them, to five standard deviations."""
    for p in (0.25 + 1 / 1024, 0.001, 1 - 1 / 1024):
        torch.manual_seed(2)
        states = [dropout.new_state(torch.device("cpu")) for _ in range(4)]
        dropped = torch.stack([~dropout.keep_mask(state, 1, 8, 512, 1024, p) for state in states]).double()
        assert abs(dropped.mean() - p) < 5 * (p * (1 - p) / dropped.numel()) ** 0.5


def test_a_group_of_64_columns_is_correlated_by_what_rounding_p_takes():
    p = 0.002
    torch.manual_seed(3)
    states = [dropout.new_state(torch.device("cpu")) for _ in range(8)]
    dropped = torch.stack([~dropout.keep_mask(state, 1, 8, 512, 512, p) for state in states]).double() - p
    dropped = dropped.view(-1, 64)
    pairs = dropped.sum(1).square().sum() - dropped.square().sum()  # of different columns
    found, fraction = pairs / (dropped.shape[0] * 64 * 63 * p * (1 - p)), 256 * p % 1
    wanted = fraction * (1 - fraction) / (2**16 * p * (1 - p))
    assert abs(found - wanted) < 5 / (dropped.shape[0] * 64 * 63 / 2) ** 0.5


def test_nearly_everything_can_be_dropped():
    assert not dropout.keep_mask(torch.tensor([-1, 0]), 1, 1, 1, 64, 1 - 2**-33).any()  # a threshold of 256


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_statistics(p):
    torch.manual_seed(1)
    keep = dropout.keep_mask(dropout.new_state(torch.device("cpu")), 2, 4, 64, 192, p).double()
    n = keep.numel()
    assert abs(keep.mean() - (1 - p)) < 5 * (p * (1 - p) / n) ** 0.5
    centred = keep - keep.mean()
    for dim in range(4):  # neighbours in every direction are independent
        shifted = centred.roll(1, dim)
        assert abs((centred * shifted).mean()) < 5 * p * (1 - p) / n**0.5


def test_each_call_draws_a_new_mask_that_the_seed_repeats():
    problem = make(length=16, dtype=torch.float64).with_options(dropout_p=0.5)
    first, second = problem.call("reference")[0], problem.call("reference")[0]
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(problem.call("reference")[0], first)


def test_results_that_are_compared_have_one_mask():
    problem = make(length=16, dtype=torch.float64).with_options(dropout_p=0.5)
    found = [problem.results("reference") for _ in range(2)]
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("backend", READY)
@pytest.mark.parametrize("p", [0.2, 0.9])
def test_equals_the_formula_with_the_rebuilt_mask(backend, p):
    problem = make(length=11, keys=70, mem=30, mask="ranks", positions=True, dtype=torch.float64)
    x = problem.leaves
    # the probabilities: what comes out where the values are the identity
    identity = torch.eye(100, dtype=torch.float64).expand(2, 2, -1, -1)
    wide = {n: torch.nn.functional.pad(leaf, (0, 84)) for n, leaf in x.items()}
    wide |= {"memory_value": identity[:, :, :30], "value": identity[:, :, 30:]}
    probability = replace(problem, leaves=wide).call("reference", scale=16**-0.5)[0]

    torch.manual_seed(5)
    keep = dropout.keep_mask(dropout.new_state(torch.device("cpu")), 2, 2, 11, 100, p)
    torch.manual_seed(5)
    found, lse = problem.call(backend, dropout_p=p)
    wanted = (probability * keep / (1 - p)) @ torch.cat([x["memory_value"], x["value"]], 2)
    assert torch.allclose(found, wanted, atol=1e-11)
    assert torch.allclose(lse, problem.call(backend)[1], atol=1e-11)  # the log-sum-exp is before dropout


@pytest.mark.parametrize("backend", READY)
def test_some_heads_are_dropped_as_among_all(backend):
    """Heads 1 and 2 of 4, of the last two of three sequences."""
    tensors = [torch.randn(3, 4, 9, 8) for _ in range(3)] + [torch.randn(4, 18, 8)]
    torch.manual_seed(5)
    whole = xk.rel_attention(*tensors, dropout_p=0.4, backend=backend)
    torch.manual_seed(5)
    with dropout.of_shard(1 * 4 + 1, others=2):
        part = xk.rel_attention(*(x[1:, 1:3] for x in tensors[:3]), tensors[3][1:3], dropout_p=0.4, backend=backend)
    torch.testing.assert_close(part, whole[1:, 1:3])
    for first, others in ((2**20, 0), (0, 2**11)):
        with pytest.raises(ValueError, match="dropout has room for"), dropout.of_shard(first, others):
            pass


@pytest.mark.parametrize("backend", [name for name in READY if name != "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_backend_drops_the_same_elements(backend, dtype, monkeypatch):
    problem = make(1, 2, 66, mem=65, mask="order", dtype=dtype).with_options(dropout_p=0.3)
    with dropout.of_shard(5, others=3):
        state = dropout.new_state(torch.device("cpu"))
    monkeypatch.setattr(dropout, "new_state", lambda device: state.to(device))
    results = [problem.results(name) for name in ("reference", backend)]
    tolerance = 1e-4 if dtype == torch.float32 else 1e-10
    for name, wanted in results[0].items():
        assert torch.allclose(results[1][name], wanted, atol=tolerance, rtol=tolerance), name


@pytest.mark.parametrize("backend", [name for name in READY if name != "reference"])
def test_every_bit_of_the_state_is_read_alike(backend, monkeypatch):
    """An offset that is negative as int64: 2^12 - 1 other heads."""
    problem = make(2, 2, 5, mask="order").with_options(dropout_p=0.5)
    monkeypatch.setattr(dropout, "new_state", lambda device: torch.tensor([-1, -1], device=device))
    torch.testing.assert_close(problem.call(backend)[0], problem.call("reference")[0], rtol=1e-4, atol=1e-4)


def test_module_drops_in_training_only():
    attn, x = xk.TwoStreamAttention(32, 2, dropout=0.5), torch.randn(1, 8, 32)
    assert not torch.equal(attn(x)[0], attn(x)[0])
    attn.eval()
    assert torch.equal(attn(x)[0], attn(x)[0])


def dropped(x, p=0.3, seed=7):
    torch.manual_seed(seed)
    return dropout.Dropout(p)(x)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2**13, 3 * 2**14 + 77])  # one thread, and shares of which the last one is odd
def test_elements_are_those_of_the_documented_mask(dtype, size):
    x = torch.randn(size).to(dtype).requires_grad_()
    out = dropped(x)
    torch.manual_seed(7)
    seed, offset = torch.randint(0, 2**63 - 1, (2,))
    keep = dropout.keep_mask(torch.stack((seed, offset & ONES)), 1, 1, 1, size, 0.3).view(size)
    kept = torch.tensor(1 / (1 - 0.3), dtype=torch.float32)
    assert torch.equal(out, (keep * kept * x.float()).to(dtype))
    grad = torch.randn(size).to(dtype)
    (found,) = torch.autograd.grad(out, x, grad)
    assert torch.equal(found, (keep * kept * grad.float()).to(dtype))


@needs_kernels
def test_shapes_strides_and_second_derivatives():
    x = torch.randn(64, 3, 80, requires_grad=True)
    out = dropped(x.transpose(0, 2))
    assert out.shape == (80, 3, 64) and out.is_contiguous()
    assert torch.equal(out, dropped(x.transpose(0, 2).contiguous()))
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(out), create_graph=True)
    assert torch.equal(grad.transpose(0, 2), (out != 0) / 0.7)
    y = torch.randn(2**13, requires_grad=True)
    (grad,) = torch.autograd.grad((dropped(y) ** 2).sum(), y, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), y)
    assert torch.allclose(second, 2 * (dropped(torch.ones(2**13))) ** 2)


@needs_kernels
def test_batches_of_gradients_meet_the_same_elements():
    x = torch.randn(2**13, requires_grad=True)
    out, grads = dropped(x), torch.randn(3, 2**13)
    (found,) = torch.autograd.grad(out, x, grads, is_grads_batched=True)
    assert torch.allclose(found, grads * dropped(torch.ones(2**13)))


@contextlib.contextmanager
def kernel_calls():
    """Yields a list that grows with each call of the kernel."""
    found, apply = [], dropout._DropOut.apply
    with mock.patch.object(dropout._DropOut, "apply", lambda *given: found.append(given) or apply(*given)):
        yield found


@needs_kernels
@pytest.mark.parametrize("where", [
    dict(p=0.0), dict(p=1.0), dict(inplace=True), dict(size=2**13 - 1), dict(dtype=torch.float64), dict(train=False),
])  # fmt: skip
def test_torch_serves_the_rest(where):
    where = dict(p=0.3, inplace=False, size=2**13, dtype=torch.float32, train=True) | where
    x = torch.randn(where["size"], dtype=where["dtype"])
    ours, torchs = (kind(where["p"], where["inplace"]) for kind in (dropout.Dropout, torch.nn.Dropout))
    results = []
    with kernel_calls() as calls:
        for module in (ours, torchs):
            torch.manual_seed(3)
            results.append(module.train(where["train"])(x.clone()))
    assert not calls and torch.equal(*results)


@needs_kernels
def test_compilers_have_torchs_dropout():
    module, x = dropout.Dropout(0.3), torch.randn(2, 2**13)
    with kernel_calls() as calls:
        module(x)
        assert len(calls) == 1
        torch.jit.trace(module, x, check_trace=False)
        graph = torch.export.export(module, (x,)).graph
        assert len(calls) == 1
    assert any("dropout" in str(node.target) for node in graph.nodes)
    assert not any("drop_out" in str(node.target) for node in graph.nodes)


class Catching(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        return function(*arguments, **(options or {}))


def flop_counter():
    return FlopCounterMode(display=False)


@needs_kernels
@pytest.mark.parametrize("context", [Catching, flop_counter, forward_ad.dual_level, torch.no_grad])
def test_modes_do_not_change_the_elements(context):
    x, after = torch.randn(2**13), []
    plain = dropped(x)
    after.append(torch.rand(1))
    with context():
        found = dropped(x)
        after.append(torch.rand(1))
    assert torch.equal(found, plain) and torch.equal(*after)


@needs_kernels
def test_transforms_do_not_change_the_elements():
    x = torch.randn(3, 2**13)
    plain, first = dropped(x), dropped(x[0])
    assert torch.equal(torch.func.grad(lambda x: dropped(x).sum())(x), torch.where(plain == 0, 0, 1 / (1 - 0.3)))
    assert all(torch.equal(one, plain) for one in torch.func.jvp(dropped, (x,), (x,)))
    module = dropout.Dropout(0.3)
    torch.manual_seed(7)
    same = torch.func.vmap(module, randomness="same")(x)
    assert torch.equal(same[0], first) and torch.equal(same == 0, (first == 0).expand(3, -1))
    different = torch.func.vmap(module, in_dims=1, randomness="different")(x.T)
    assert all(0.28 < rate < 0.32 for rate in (different == 0).float().mean(1))
    assert not torch.equal(different[0] == 0, different[1] == 0)
    jacobian = torch.func.jacrev(lambda x: dropped(x).sum(1))(x)
    assert torch.equal(jacobian.sum(0) == 0, plain == 0)


@needs_kernels
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_a_recomputation_outside_of_a_mode_is_the_same(reentrant, p):
    attn, x = xk.TwoStreamAttention(64, 2, dropout=p), torch.randn(1, 128, 64, requires_grad=True)
    found = []
    for context in (contextlib.nullcontext, flop_counter):
        torch.manual_seed(3)
        with context():
            out = checkpoint(lambda x: attn(x)[0], x, use_reentrant=reentrant)
        out.square().sum().backward()
        found.append((out.detach(), x.grad))
        x.grad = None
    assert all(map(torch.equal, *found))


@needs_kernels
def test_numbers_are_drawn_where_the_input_is():
    x = torch.randn(2**13, requires_grad=True)
    with torch.device("meta"):
        out = dropped(x)
        (batch,) = torch.autograd.grad(out, x, torch.ones(2, 2**13, device="cpu"), is_grads_batched=True)
    assert out.device.type == batch.device.type == "cpu"


@needs_kernels
def test_fx_and_fake_tensors():
    traced = torch.fx.symbolic_trace(torch.nn.Sequential(dropout.Dropout(0.3)))
    assert "dropout" in traced.code
    with FakeTensorMode():
        x, state = torch.ones(3, 5).T, torch.zeros(2, dtype=torch.int64)
        assert ops.drop_out(x, state, 0.1).stride() == (3, 1)


@needs_kernels
def test_checkpointing_and_threads_keep_the_elements():
    x = torch.randn(2**16, requires_grad=True)
    plain = torch.autograd.grad(dropped(x).sum(), x)
    torch.manual_seed(7)
    kept = checkpoint(dropout.Dropout(0.3), x, use_reentrant=False).sum()
    assert torch.equal(*plain, *torch.autograd.grad(kept, x))
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(*plain, *torch.autograd.grad(dropped(x).sum(), x))
    finally:
        torch.set_num_threads(threads)


@needs_kernels
@pytest.mark.parametrize("given, text", [
    (dict(x=torch.ones(3, dtype=torch.float64)), "float32 or bfloat16, got Double"),
    (dict(p=0.0), "p must be in"), (dict(p=1.0), "p must be in"), (dict(p=float("nan")), "p must be in"),
    (dict(state=torch.zeros(3, dtype=torch.int64)), "two int64"), (dict(state=torch.zeros(2)), "two int64"),
])  # fmt: skip
def test_bad_calls_of_the_operator(given, text):
    given = dict(x=torch.ones(3), state=torch.zeros(2, dtype=torch.int64), p=0.1) | given
    with pytest.raises(ValueError, match=text):
        ops.drop_out(*given.values())


@needs_kernels
def test_any_number_of_dimensions():
    x = torch.randn(2**13)
    assert torch.equal(dropped(x.view(*[1] * 20, -1)).view(-1), dropped(x))
    assert dropped(x).shape == x.shape and ops.drop_out(x[0], torch.zeros(2, dtype=torch.int64), 0.1).shape == ()


@needs_kernels
def test_nothing_has_no_elements():
    assert ops.drop_out(torch.ones(0, 3), torch.zeros(2, dtype=torch.int64), 0.1).shape == (0, 3)
