"""Models that exist twice, here and in transformers, with the same weights; and inputs for both."""

from __future__ import annotations

import torch
import transformers
from torch import Tensor
from transformers.models.xlnet import modeling_xlnet

import xlnet_kernels as xk

SIZES = dict(vocab_size=50, d_model=32, n_layer=2, n_head=4, d_inner=48, dropout=0.0, summary_last_dropout=0.0)
B, L, M, N = 2, 7, 5, 3


def _fill(model, std: float):
    """Random weights, those of a LayerNorm around one."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=float(name.lower().endswith("norm.weight")), std=std)
    return model


def theirs(name: str, **options):
    """transformers' model in evaluation mode, its weights far from zero so that every term counts."""
    model = getattr(modeling_xlnet, name)(transformers.XLNetConfig(**SIZES | options)).eval()
    return _fill(model, 0.3)


def twins(name: str, backend: str | None = None, **options):
    """transformers' model and ours with its weights."""
    model = theirs(name, **options)
    ours = getattr(xk, name)(xk.XLNetConfig(**SIZES | options), backend)
    ours.load_state_dict(model.state_dict())
    return model, ours.eval()


def base_size_twins():
    """Language models of the published base size but for the vocabulary, initialised as XLNet is."""
    sizes = dict(vocab_size=200, d_model=768, n_layer=12, n_head=12, d_inner=3072, dropout=0.0)
    with torch.device("meta"):  # so that weights are drawn once
        model = modeling_xlnet.XLNetLMHeadModel(transformers.XLNetConfig(**sizes))
        ours = xk.XLNetLMHeadModel(xk.XLNetConfig(**sizes))
    model.to_empty(device="cpu").tie_weights()
    _fill(model, 0.02)
    ours.load_state_dict(model.state_dict(), assign=True)
    return model.eval(), ours.eval()


def ours(name: str = "XLNetModel", backend: str | None = None, **options):
    """Our model in evaluation mode with weights far from zero."""
    model = getattr(xk, name)(xk.XLNetConfig(**SIZES | options), backend).eval()
    return _fill(model, 0.3)


def make_inputs(batch: int = B, length: int = L, targets: int = N, vocab: int = 50) -> dict[str, Tensor]:
    """Everything a permutation language model is given. The last position is seen by all: no row is fully masked."""
    perm_mask = (torch.rand(batch, length, length) > 0.5).float()
    perm_mask[:, :, -1] = 0
    attention_mask = torch.ones(batch, length)
    attention_mask[0, :1] = 0
    positions = torch.stack([torch.randperm(length)[:targets] for _ in range(batch)])
    return dict(
        input_ids=torch.randint(vocab, (batch, length)),
        token_type_ids=torch.randint(3, (batch, length)),
        attention_mask=attention_mask,
        perm_mask=perm_mask,
        target_mapping=torch.nn.functional.one_hot(positions, length).float(),
    )


def make_mems(model, length: int = M, batch: int = B) -> list[Tensor]:
    return [torch.randn(length, batch, model.config.d_model) for _ in range(model.config.n_layer)]


def assert_same(found, wanted, atol: float = 1e-4, where: str = "output") -> None:
    """Assert equal nesting of tensors, equal shapes and close values."""
    if wanted is None or found is None:
        assert found is None and wanted is None, f"{where}: {type(found)} and {type(wanted)}"
    elif isinstance(wanted, Tensor):
        assert found.shape == wanted.shape, f"{where}: shape {tuple(found.shape)}, expected {tuple(wanted.shape)}"
        assert found.isfinite().all(), f"{where}: not finite"
        error = (found.double() - wanted.double()).abs().max().item() if wanted.numel() else 0.0
        assert error <= atol, f"{where}: error {error:.3g}"
    else:
        assert len(found) == len(wanted), f"{where}: {len(found)} items, expected {len(wanted)}"
        for index, (f, w) in enumerate(zip(found, wanted, strict=True)):
            assert_same(f, w, atol, f"{where}[{index}]")


def assert_same_outputs(found, wanted, names: tuple[str, ...], atol: float = 1e-4) -> None:
    for name in names:
        assert_same(getattr(found, name), getattr(wanted, name), atol, name)
