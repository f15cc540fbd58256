"""The whole attention layer with both streams: this package's TwoStreamAttention and transformers' own layer."""

from __future__ import annotations

import copy
import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from xlnet_kernels import TwoStreamAttention, relative_positions

from .harness import Run
from .implementations import transformers_attention, transformers_mask, transformers_segments
from .problem import Case, Problem, build_problem
from .text import VOCABULARY, Batch, build_batch

MODULE = "TwoStreamAttention"
TRANSFORMERS_MODULE = "transformers layer"


def our_module(case: Case, backend: str | None) -> Run:
    """Batch first; the query stream exists at the N targets only."""
    inputs, batch = _inputs(case), _batch(case)
    attention = TwoStreamAttention.from_transformers(_weights(case))
    attention.backend = backend
    mask, ids = batch.mask.to(case.device), batch.segment_ids.to(case.device)
    positions, rel_pos = batch.target_positions.to(case.device), _positions(case)
    leaves = {name: inputs[name].clone().requires_grad_() for name in ("h", "g")}
    mems = inputs["mems"] if case.mem_len else None

    def forward() -> tuple[Tensor, Tensor]:
        return attention(
            leaves["h"], leaves["g"], mask=mask, rel_pos=rel_pos, segment_ids=ids, mems=mems, target_positions=positions
        )

    return Run(forward, leaves | dict(attention.named_parameters()), (inputs["grad_h"], inputs["grad_g"]))


def transformers_module(case: Case, double: bool = False) -> Run:
    """Length first; target_mapping is dense, as its model builds it."""
    inputs, batch, problem = _inputs(case), _batch(case), _problem(case)
    attention = _weights(case)
    convert = Tensor.double if double else Tensor.clone
    attention = attention.double() if double else attention
    mask = batch.mask.to(case.device)
    hidden = [convert(transformers_mask(mask.to_bool(one), case.dtype)) for one in ("content", "query")]
    segment_matrix = convert(transformers_segments(problem))
    # (N, L, B)
    targets = F.one_hot(batch.target_positions, case.length).permute(1, 2, 0).to(case.device, case.dtype)
    targets, mems = convert(targets), convert(inputs["mems"]).transpose(0, 1) if case.mem_len else None
    rel_pos = convert(_positions(case))[:, None].expand(-1, case.batch, -1)
    leaves = {name: convert(inputs[name]).transpose(0, 1).contiguous().requires_grad_() for name in ("h", "g")}

    def forward() -> tuple[Tensor, Tensor]:
        return attention(leaves["h"], leaves["g"], *hidden, rel_pos, segment_matrix, mems, targets)

    grad_out = tuple(convert(inputs[name]).transpose(0, 1).contiguous() for name in ("grad_h", "grad_g"))
    return Run(forward, leaves | dict(attention.named_parameters()), grad_out, _batch_first)


def module_reference(case: Case, direction: str) -> dict[str, Tensor]:
    """transformers' layer in float64."""
    run = transformers_module(case, double=True)
    names = ["out", "out_g"] if direction == "forward" else run.leaves
    return {name: run.standard(name, value) for name, value in zip(names, run.step(direction), strict=True)}


def _batch_first(name: str, tensor: Tensor) -> Tensor:
    return tensor.transpose(0, 1) if name in ("out", "out_g", "h", "g") else tensor


def _weights(case: Case) -> torch.nn.Module:
    return copy.deepcopy(_layer(case))


@functools.lru_cache(maxsize=1)
def _layer(case: Case) -> torch.nn.Module:
    """transformers' layer, random as it initialises it but with biases of some size."""
    torch.manual_seed(0)
    layer = transformers_attention(case.heads, case.head_dim)
    for name in ("r_w_bias", "r_r_bias", "r_s_bias"):
        torch.nn.init.normal_(getattr(layer, name), std=0.3)
    return layer.to(case.device, case.dtype)


@functools.lru_cache(maxsize=1)
def _batch(case: Case) -> Batch:
    return build_batch(case.batch, case.length, case.mem_len)


@functools.lru_cache(maxsize=1)
def _problem(case: Case) -> Problem:
    return build_problem(case)


def _positions(case: Case) -> Tensor:
    keys = case.mem_len + case.length
    return relative_positions(keys, case.length, case.d_model, dtype=case.dtype, device=case.device)


def _inputs(case: Case) -> dict[str, Tensor]:
    """Embedded tokens, the query stream's vector, and gradients of both outputs."""
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(VOCABULARY + 1, case.d_model, generator=generator)
    batch = _batch(case)
    targets = torch.full_like(batch.target_positions, VOCABULARY)
    inputs = {"h": embedding[batch.tokens], "g": embedding[targets], "mems": embedding[batch.memory_tokens]}
    inputs |= {f"grad_{name}": torch.randn(inputs[name].shape, generator=generator) for name in ("h", "g")}
    return {name: tensor.to(case.device, case.dtype) for name, tensor in inputs.items()}
