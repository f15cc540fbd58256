"""Counter-based dropout: the generator's known answers, its statistics, and that the mask can be rebuilt."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import xlnet_kernels as xk
from tests.cases import READY, make
from xlnet_kernels import dropout

ONES = 0xFFFFFFFF


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
    # element by element from the docstring: word (j % 64) // 16 of the counter (j // 64 * 16 + j % 16, i, bh, offset)
    seed, offset, first, others = 0x0123456789ABCDEF, 0x87654321, 0xFEDCB, 0x2A9
    mask = dropout.keep_mask(torch.tensor([seed, others << 52 | first << 32 | offset]), 2, 3, 2, 150, 0.3)
    for b, h, i, j in [(0, 0, 0, 0), (1, 2, 1, 149), (1, 0, 1, 77), (0, 2, 0, 63), (1, 1, 0, 64), (0, 1, 1, 16)]:
        counter = [j // 64 * 16 + j % 16, i, b * (3 + others) + h + first, offset]
        key = [seed & ONES, seed >> 32]
        words = dropout.philox([torch.tensor(w) for w in counter], [torch.tensor(w) for w in key])
        assert mask[b, h, i, j] == (int(words[j % 64 // 16]) >= int(0.3 * 2**32))


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
