"""merge: calls over parts of the keys are one call over all of them."""

from __future__ import annotations

import pytest
import torch

import xlnet_kernels as xk

B, H, L, D = 2, 2, 7, 8


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_parts_are_the_whole(dtype):
    """Three parts; row 0 sees nothing at all, row 1 the second part alone."""
    torch.manual_seed(0)
    q, k, v, table = (
        torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in [(B, H, L, D)] * 3 + [(H, 2 * L, D)]
    )
    part = torch.tensor([0, 0, 1, 1, 2, 2, 2])
    seen = torch.ones(L, L, dtype=torch.bool)
    seen[0] = False
    seen[1] = part == 1
    call = dict(return_lse=True, backend="reference")
    parts = [xk.rel_attention(q, k, v, table, mask=(seen & (part == one))[None, None], **call) for one in range(3)]
    out, lse = xk.merge(*zip(*parts, strict=True))
    whole, whole_lse = xk.rel_attention(q, k, v, table, mask=seen[None, None], **call)
    assert out.dtype == dtype and lse.dtype == whole_lse.dtype
    atol = 0.03 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(out, whole, atol=atol, rtol=0)
    torch.testing.assert_close(lse, whole_lse, atol=atol, rtol=0)
    assert not out[:, :, 0].any() and (lse[:, :, 0] == -torch.inf).all()
    above = torch.randn(B, H, L, D).to(dtype), torch.randn(B, H, L).to(lse.dtype)
    found = torch.autograd.grad((out, lse), (q, k, v, table), above)
    wanted = torch.autograd.grad((whole, whole_lse), (q, k, v, table), above)
    assert not found[0][:, :, 0].any()
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=3 * atol, rtol=0)


def test_gradients_of_the_parts_themselves():
    outs = [torch.randn(1, 1, 3, 2, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    lses = [torch.randn(1, 1, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(lambda *x: xk.merge(x[:2], x[2:]), (*outs, *lses))
    fully_masked = [torch.full((1, 1, 3), -torch.inf, requires_grad=True) for _ in range(2)]
    zeros = [torch.zeros(1, 1, 3, 2, requires_grad=True) for _ in range(2)]
    out, lse = xk.merge(zeros, fully_masked)
    gradients = torch.autograd.grad((out, lse), (*zeros, *fully_masked), (torch.ones_like(out), torch.ones_like(lse)))
    assert not any(gradient.any() for gradient in gradients)


def test_weights_add_up_to_one_far_from_zero():
    """A log-sum-exp of 1000 is rounded by 3e-5, and so is each exponential of a difference to it."""
    out = torch.randn(1, 1, 3, 2)
    for lse in (torch.tensor([[[1000.0, 3e4, -2e3]]]), torch.tensor([[[-1e30, 1e30, 7.0]]])):
        for parts in (2, 3):
            lses = [lse.clone().requires_grad_() for _ in range(parts)]
            found, total = xk.merge([out] * parts, lses)
            torch.testing.assert_close(found, out, atol=0, rtol=3e-7)
            for gradient in torch.autograd.grad(total.sum(), lses):
                torch.testing.assert_close(gradient * parts, torch.ones(1, 1, 3), atol=0, rtol=3e-7)


OUT, LSE = torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3)


@pytest.mark.parametrize(
    "outs, lses, text",
    [
        ([], [], "outs must be a list of at least one tensor"),
        (OUT, LSE, "outs must be a list of at least one tensor, got Tensor"),
        ([OUT], [LSE, LSE], "one log-sum-exp for each of 1 outputs, got 2"),
        ([OUT, OUT[:, :, :2]], [LSE, LSE], r"outs\[1\] must be floating and like outs\[0\]"),
        ([OUT, OUT.double()], [LSE, LSE], r"outs\[1\] must be floating and like outs\[0\]"),
        ([OUT, OUT], [LSE, LSE[..., None]], r"lses\[1\] must be .*shape \(1, 1, 3\), got"),
        ([OUT, OUT], [LSE, LSE.double()], r"lses\[1\] must be torch.float32 like lses\[0\]"),
    ],
)
def test_parts_that_do_not_fit(outs, lses, text):
    with pytest.raises(ValueError, match=text):
        xk.merge(outs, lses)
