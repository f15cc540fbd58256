"""Gradients that sum over many rows, probabilities of any score, and values that are not finite.

An error that a whole row of dS shares, and that has the same sign in every row, does not average out in the gradients
of the biases, of rel_key and of the segment embeddings. Rows, values, keys and gradients with offsets show it.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import xlnet_kernels as xk
from tests.cases import COMPILED, INTERPRETED, READY, make
from xlnet_kernels import _extension

FUSED = [name for name in READY if name != "reference"]
SCORES = (1.0, 1e2, 1e3, 1.1750e4, 1e6, 2e8, 1e9)
SHARPNESS = {"flat": 0.0625, "moderate": 1.0, "sharp": 16.0}  # of the query rows and the biases added to them
# (rows, offset of values, of keys, of rel_key, of the output's gradient)
OFFSETS = {
    "sharp": ("sharp", 4.0, 0.0, 0.0, 0.0),
    "sharp, all offset": ("sharp", 4.0, 1.0, 0.0, 1.0),
    "moderate": ("moderate", 1.0, 0.5, 0.0, 0.3),
    "flat": ("flat", 4.0, 1.0, 0.0, 1.0),
    "flat, rel_key too": ("flat", 4.0, 1.0, 0.5, 1.0),
}


@dataclass
class Sums:
    """A causal call with segments whose gradients sum over many rows."""

    leaves: dict[str, Tensor]
    ids: Tensor
    grad_out: Tensor

    @classmethod
    def make(cls, kind: str, length: int, dtype: torch.dtype, heads: int = 2, head_dim: int = 64) -> Sums:
        rows, value, key, rel, grad = OFFSETS[kind]
        sharpness = SHARPNESS[rows]
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        leaves = {
            "query": normal(1, heads, length, head_dim) * sharpness,
            "key": normal(1, heads, length, head_dim) + key,
            "value": normal(1, heads, length, head_dim) + value,
            "rel_key": normal(heads, 2 * length, head_dim) + rel,
            "content_bias": normal(heads, head_dim) * sharpness,
            "position_bias": normal(heads, head_dim) * sharpness,
            "segment_embed": normal(2, heads, head_dim),
            "segment_bias": normal(heads, head_dim) * sharpness,
        }
        ids = torch.randint(2, (1, length), generator=generator)
        grad_out = (normal(1, heads, length, head_dim) + grad).to(dtype)
        return cls({name: leaf.to(dtype) for name, leaf in leaves.items()}, ids, grad_out)

    def gradients(self, backend: str, dtype: torch.dtype) -> dict[str, Tensor]:
        leaves = {name: leaf.to(dtype).requires_grad_() for name, leaf in self.leaves.items()}
        given = dict(leaves)
        segments = xk.Segments(self.ids, self.ids, given.pop("segment_embed"), given.pop("segment_bias"))
        mask = xk.RankMask.causal(1, self.grad_out.shape[2])
        out = xk.rel_attention(**given, segments=segments, mask=mask, backend=backend)
        gradients = torch.autograd.grad(out, [*leaves.values()], self.grad_out.to(dtype))
        return {name: gradient.double() for name, gradient in zip(leaves, gradients, strict=True)}

    def with_rounded_operands(self) -> dict[str, Tensor]:
        """Gradients with 16-bit operands of products, and all else exact.

        The operands are rows plus biases (as the reference rounds them), P and dS.
        """
        dtype = self.grad_out.dtype
        leaves = {name: leaf.double().requires_grad_() for name, leaf in self.leaves.items()}
        query, length = leaves["query"], self.grad_out.shape[2]
        biased = {}
        for name in ("content_bias", "position_bias", "segment_bias"):
            rows = query + leaves[name][:, None]
            biased[name] = rows + (_rounded(rows, dtype) - rows).detach()
        position = torch.arange(length)
        row = (length - position[:, None] + position).expand(*query.shape[:2], -1, -1)
        score = biased["content_bias"] @ leaves["key"].mT
        score = score + (biased["position_bias"] @ leaves["rel_key"].mT).gather(-1, row)
        kinds = torch.einsum("bhld,shd->bhls", biased["segment_bias"], leaves["segment_embed"])
        different = (self.ids[:, None, :, None] != self.ids[:, None, None, :]).expand_as(score)
        score = (score + torch.where(different, kinds[..., 1:], kinds[..., :1])) * query.shape[-1] ** -0.5
        hidden = position > position[:, None]
        P = score.detach().masked_fill(hidden, -torch.inf).softmax(-1)
        dP = self.grad_out.double() @ leaves["value"].detach().mT
        dS = P * (dP - (P * dP).sum(-1, keepdim=True))
        names = [name for name in leaves if name != "value"]
        found = dict(
            zip(names, torch.autograd.grad(score, [leaves[n] for n in names], _rounded(dS, dtype)), strict=True)
        )
        found["value"] = _rounded(P, dtype).mT @ self.grad_out.double()
        return {name: _rounded(gradient, dtype) for name, gradient in found.items()}


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).double()


def relative_error(found: Tensor, exact: Tensor) -> float:
    return ((found - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("score", SCORES)
def test_one_visible_key_has_probability_one_at_any_score(backend, score):
    query = torch.zeros(1, 1, 1, 16)
    query[..., 0] = score
    key = torch.full_like(query, 0.7)
    value = torch.ones(1, 1, 1, 16, requires_grad=True)
    out = xk.rel_attention(query, key, value, torch.zeros(1, 2, 16), scale=1.0, backend=backend)
    (grad,) = torch.autograd.grad(out.sum(), value)
    assert (grad - 1).abs().max() <= 1e-6


@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize("dtype, allowed", [(torch.bfloat16, 3e-3), (torch.float16, 4e-4)])
@pytest.mark.parametrize("length", [512, 2048])
@pytest.mark.parametrize("kind", OFFSETS)
def test_sums_over_rows_are_as_exact_as_their_inputs(backend, kind, length, dtype, allowed):
    """P and dS are float32, so errors are those of rounded results: at most 2**-9 and 2**-12 of each element.

    Where products take 16 bits they are rounded as well, each by itself: 2 to 3 times the square of the error.
    """
    if dtype == torch.bfloat16 and _extension.module.cpu_bfloat16_products is not None:
        allowed *= 3**0.5
    sums = Sums.make(kind, length, dtype, heads=1)
    exact = sums.gradients("reference", torch.float64)
    for name, gradient in sums.gradients(backend, dtype).items():
        assert relative_error(gradient, exact[name]) <= allowed, name


@pytest.mark.parametrize("backend", INTERPRETED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", OFFSETS)
def test_sums_over_rows_with_operands_of_16_bits(backend, kind, dtype):
    """Tensor cores take P and dS in 16 bits. Nothing else may add to what that costs, and nothing with one sign."""
    if backend == "triton" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter has no bfloat16")
    sums = Sums.make(kind, 256, dtype, heads=1, head_dim=16)
    exact, operands = sums.gradients("reference", torch.float64), sums.with_rounded_operands()
    for name, gradient in sums.gradients(backend, dtype).items():
        error, unit = gradient - exact[name], exact[name].norm()
        # The gradients of segments are made of one number a row, whose errors are few: their ratio scatters.
        allowed = 2.5 if name.startswith("segment") else 1.5
        assert error.norm() <= allowed * (operands[name] - exact[name]).norm(), name
        # The mean of n independent errors is within four of its standard deviations.
        assert abs(error.mean()) <= 4 * error.std() / error.numel() ** 0.5 + 1e-6 * unit, name


@pytest.mark.parametrize("backend", COMPILED)
def test_float32_gradients_are_as_exact_as_the_references(backend):
    """In 95 % of random problems no gradient is off by more than three times the reference's error."""
    worse = count = 0
    for seed in range(60):
        problem = make(1, 2, 20 + seed, mem=seed % 3 * 7, width=(16, 40, 64)[seed % 3], mask="order", seed=seed)
        exact = problem.to(torch.float64).results("reference")
        plain, found = problem.results("reference"), problem.results(backend)
        for name in (name for name in exact if name.startswith("grad")):
            error, baseline = ((gradients[name] - exact[name]).abs().max().item() for gradients in (found, plain))
            largest = exact[name].abs().max().item()
            assert error <= 10 * baseline + torch.finfo(torch.float32).eps * largest, (seed, name)
            worse += error > 3 * baseline
            count += 1
    assert worse <= 0.05 * count


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("kind", ["dense", "ranks"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_fully_masked_rows_hide_whatever_the_query_holds(backend, kind, bad):
    problem = make(1, 1, 5, mem=3, width=16)
    if kind == "dense":
        mask: xk.RankMask | Tensor = torch.ones(1, 1, 5, 8, dtype=torch.bool)
        mask[:, :, 2] = False
    else:
        mask = xk.RankMask(torch.tensor([[9, 9, 0, 9, 9]]), torch.ones(1, 8, dtype=torch.int64))
    clean = problem.with_options(mask=mask)
    dirty = clean.map(lambda leaf: leaf.clone())
    dirty.leaves["query"][:, :, 2] = bad
    wanted, found = clean.results(backend), dirty.results(backend)
    assert (found["out"][:, :, 2] == 0).all() and (found["lse"][:, :, 2] == -torch.inf).all()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("backend", FUSED)
def test_hidden_keys_stay_hidden_where_the_query_is_not_finite(backend):
    """Segments add to hidden scores: minus infinity plus NaN must not become visible in other rows."""
    problem = make(1, 1, 5, mem=3, width=16)
    mask = torch.rand(1, 1, 5, 8) < 0.5
    mask[:, :, 2], mask[:, :, 0] = False, True
    problem.leaves["query"][:, :, 2] = torch.nan
    found = problem.with_options(mask=mask).results(backend, needs=())
    assert not found["out"].isnan().any() and found["lse"][0, 0, 2] == -torch.inf


@pytest.mark.parametrize("backend", READY)
def test_rows_whose_every_score_is_minus_infinity_are_nan_as_in_softmax(backend):
    # Powers of two: where float32 is a sum of TF32 numbers, products of others may be inf and -inf at once: NaN.
    query, key = torch.full((1, 1, 2, 16), -(2.0**126)), torch.full((1, 1, 2, 16), 2.0**17)
    value = torch.ones(1, 1, 2, 16)
    mask = torch.tensor([[True, True], [False, False]])[None, None]
    out, lse = xk.rel_attention(
        query, key, value, torch.zeros(1, 4, 16), mask=mask, scale=1.0, return_lse=True, backend=backend
    )
    assert out[0, 0, 0].isnan().all() and (out[0, 0, 1] == 0).all() and (lse == -torch.inf).all()


@pytest.mark.parametrize("backend", FUSED)
def test_an_output_beyond_float16_does_not_reach_gradients(backend):
    x = torch.zeros(1, 1, 2, 16, dtype=torch.float16)
    value = torch.full_like(x, 6e4).requires_grad_()
    query = torch.ones_like(x).requires_grad_()
    out = xk.rel_attention(
        query, x + 1, value, torch.zeros(1, 4, 16, dtype=torch.float16), dropout_p=0.5, backend=backend
    )
    gradients = torch.autograd.grad(out, (query, value), torch.full_like(out, 2**-10))
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("backend", FUSED)
def test_a_small_scale_does_not_cost_float16_its_range(backend):
    """dS times this scale would be below 2**-14, the smallest number that float16 has all bits for: 4e-3 off."""
    leaves = [256 * torch.randn(1, 1, 40, 16), 256 * torch.randn(1, 1, 40, 16), torch.randn(1, 1, 40, 16)]
    leaves = [leaf.half() for leaf in [*leaves, 256 * torch.randn(1, 80, 16)]]
    grad_out = torch.randn(1, 1, 40, 16).half()

    def gradients(backend: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
        given = [leaf.to(dtype).requires_grad_() for leaf in leaves]
        return torch.autograd.grad(xk.rel_attention(*given, scale=2.0**-16, backend=backend), given, grad_out.to(dtype))

    found, exact = gradients(backend, torch.float16), gradients("reference", torch.float64)
    for gradient, wanted in zip(found, exact, strict=True):
        assert wanted.abs().mean() > 2**-14 and relative_error(gradient.double(), wanted) <= 2e-3
