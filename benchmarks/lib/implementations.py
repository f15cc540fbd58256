"""The implementations of one attention call that are measured, each from a Problem to a Run.

To add one: write its function and name it in `registry`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import xlnet_kernels as xk
from xlnet_kernels.backends import choose

from .harness import CannotRun, Run, tidy
from .problem import Problem

BASELINE = "plain SDPA, no positions"
SDPA_KERNELS = {"flash": "FLASH_ATTENTION", "cuDNN": "CUDNN_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}
TRANSFORMERS = "transformers eager"
TRANSFORMERS_NAMES = {
    "content_bias": "r_w_bias",
    "position_bias": "r_r_bias",
    "segment_bias": "r_s_bias",
    "segment_embed": "seg_embed",
}


@dataclass(frozen=True)
class Implementation:
    """`maps`: how many (B, H, L, M + K) matrices live at its peak, forward and backward, as measured; 0 if fused."""

    name: str
    prepare: Callable[[Problem], Run]
    maps: tuple[float, float] = (0, 0)
    compiled: bool = False
    checked: bool = True
    longest: int | None = None


def package_backend(name: str) -> Callable[[Problem], Run]:
    """One of this package's backends."""

    def prepare(problem: Problem) -> Run:
        try:
            choose(name, problem.query.device, problem.query.dtype, problem.query.shape[-1])
        except RuntimeError as error:
            raise CannotRun(error) from error
        leaves = {field: _leaf(getattr(problem, field)) for field in Problem.INPUTS}
        memory = (leaves["memory_key"], leaves["memory_value"]) if problem.memory_key.shape[2] else None
        segments = problem.segments(leaves["segment_embed"], leaves["segment_bias"])

        def forward() -> Tensor:
            return xk.rel_attention(
                leaves["query"], leaves["key"], leaves["value"], leaves["rel_key"],
                content_bias=leaves["content_bias"], position_bias=leaves["position_bias"], segments=segments,
                mask=problem.mask, query_positions=problem.query_positions, memory=memory, backend=name,
            )  # fmt: skip

        return Run(forward, leaves, problem.grad_out)

    return prepare


def transformers_eager(problem: Problem, compiled: bool = False) -> Run:
    """XLNetRelativeAttention.rel_attn_core with its einsums, its rel_shift and its mask arithmetic."""
    attention = transformers_attention(problem.query.shape[1], problem.query.shape[3]).to(problem.query)
    for field, name in TRANSFORMERS_NAMES.items():
        setattr(attention, name, torch.nn.Parameter(getattr(problem, field)))
    # Its layout is (length, batch, head, dim), and its position keys are projected once per sample.
    key, value = _all_keys(problem)
    rel_key = problem.rel_key.expand(problem.query.shape[0], -1, -1, -1)
    leaves = {"query": problem.query, "key": key, "value": value, "rel_key": rel_key}
    leaves = {name: _leaf(_length_first(tensor).contiguous()) for name, tensor in leaves.items()}
    leaves |= {field: getattr(attention, name) for field, name in TRANSFORMERS_NAMES.items()}
    segment_matrix, hidden = transformers_segments(problem), transformers_mask(problem.visible(), problem.query.dtype)
    core = _compile(_transformers_core) if compiled else _transformers_core

    def forward() -> Tensor:
        arguments = (leaves["query"], leaves["key"], leaves["value"], leaves["rel_key"])
        return core(attention, *arguments, segment_matrix, hidden)

    def standard(name: str, tensor: Tensor) -> Tensor:
        if name not in ("out", "query", "key", "value", "rel_key"):
            return tensor
        tensor = tensor.permute(1, 2, 0, 3)
        return tensor.sum(0) if name == "rel_key" else tensor

    return Run(forward, leaves, _length_first(problem.grad_out).contiguous(), standard)


def _transformers_core(attention, query, key, value, rel_key, segment_matrix, hidden) -> Tensor:
    return attention.rel_attn_core(query, key, value, rel_key, seg_mat=segment_matrix, attn_mask=hidden)


def transformers_attention(heads: int, width: int) -> torch.nn.Module:
    """Its attention layer without dropout, with weights as it initialises them."""
    try:
        from transformers import XLNetConfig
        from transformers.models.xlnet.modeling_xlnet import XLNetRelativeAttention
    except ImportError as error:
        raise CannotRun(f"transformers is not installed: {tidy(error)}") from error
    config = XLNetConfig(d_model=heads * width, n_head=heads, d_inner=4, n_layer=1, dropout=0.0)
    attention = XLNetRelativeAttention(config)
    for name, parameter in attention.named_parameters():
        if not name.startswith("layer_norm"):
            torch.nn.init.normal_(parameter, std=0.02)
    return attention


def transformers_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """(L, M + K, B, 1), 1 where a query may not attend."""
    return (~visible).permute(1, 2, 0)[..., None].to(dtype)


def transformers_segments(problem: Problem) -> Tensor:
    """(L, M + K, B, 2) one-hot: same segment, different one."""
    different = problem.query_ids.T[:, None] != problem.key_ids.T[None, :]
    return F.one_hot(different.long(), 2).to(problem.query)


def sdpa_with_bias(problem: Problem, compiled: bool = False) -> Run:
    """scaled_dot_product_attention with position and segment scores as a float mask, as users write it."""
    visible = problem.visible()[:, None]
    different = (problem.query_ids[:, None, :, None] != problem.key_ids[:, None, None, :]).contiguous()
    core = _compile(_sdpa_with_bias) if compiled else _sdpa_with_bias
    leaves = _whole_leaves(problem)
    return Run(lambda: core(**leaves, different=different, visible=visible), leaves, problem.grad_out)


def _sdpa_with_bias(
    query, key, value, rel_key, content_bias, position_bias, segment_embed, segment_bias, different, visible
) -> Tensor:
    by_row = (query + position_bias[:, None]) @ rel_key.mT
    by_kind = torch.einsum("bhld,shd->bhls", query + segment_bias[:, None], segment_embed)
    score = _rel_shift(by_row, key.shape[2]) + torch.where(different, by_kind[..., 1:], by_kind[..., :1])
    score = (score * query.shape[-1] ** -0.5).masked_fill(~visible, -torch.inf)
    return F.scaled_dot_product_attention(query + content_bias[:, None], key, value, attn_mask=score)


def _rel_shift(by_row: Tensor, keys: int) -> Tensor:
    """out[i, j] = by_row[i, j + L - i] (Dai et al. 2019, appendix B), without a gather."""
    batch, heads, length, rows = by_row.shape
    return by_row.reshape(batch, heads, rows, length)[:, :, 1:].reshape(batch, heads, length, rows - 1)[..., :keys]


def flex_attention(problem: Problem) -> Run:
    """FlexAttention: positions and segments in its score_mod, ranks in its mask_mod."""
    try:
        from torch.nn.attention.flex_attention import create_block_mask
    except ImportError as error:
        raise CannotRun("this torch has no FlexAttention") from error
    batch, _, length, _ = problem.query.shape
    mem_len, mask = problem.memory_key.shape[2], problem.mask

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (mask.key_rank[b, j] < mask.query_rank[b, i]) | (j == i + mem_len)

    block_mask = create_block_mask(sees, batch, None, length, mem_len + length, device=problem.query.device.type)
    core, leaves = _compile(_flex_core), _whole_leaves(problem)

    def forward() -> Tensor:
        inputs = leaves
        if not torch.is_grad_enabled():  # on the CPU it refuses inputs that could ask for a gradient
            inputs = {name: leaf.detach() for name, leaf in leaves.items()}
        query, scale = inputs["query"], inputs["query"].shape[-1] ** -0.5
        by_row = ((query + inputs["position_bias"][:, None]) * scale) @ inputs["rel_key"].mT
        with_bias = (query + inputs["segment_bias"][:, None]) * scale
        by_kind = torch.einsum("bhld,shd->bhls", with_bias, inputs["segment_embed"])
        query, ids = query + inputs["content_bias"][:, None], (problem.query_ids, problem.key_ids)
        return core(query, inputs["key"], inputs["value"], by_row, by_kind, *ids, block_mask)

    return Run(forward, leaves, problem.grad_out)


def _flex_core(query, key, value, by_row, by_kind, query_ids, key_ids, block_mask) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    length = query.shape[2]

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        different = (query_ids[b, i] != key_ids[b, j]).int()
        return score + by_row[b, h, i, length - i + j] + by_kind[b, h, i, different]

    return flex_attention(query, key, value, score_mod=score_mod, block_mask=block_mask)


def plain_sdpa(problem: Problem, kernel: str | None = None) -> Run:
    """Attention without positions, segments or mask: what no fused kernel can be faster than by much.

    `kernel` is one of SDPA_KERNELS; None leaves the choice to torch.
    """
    key, value = _all_keys(problem)
    leaves = {"query": _leaf(problem.query), "key": _leaf(key), "value": _leaf(value)}

    def forward() -> Tensor:
        if kernel is None:
            return F.scaled_dot_product_attention(*leaves.values())
        with sdpa_kernel(getattr(SDPBackend, SDPA_KERNELS[kernel])):
            return F.scaled_dot_product_attention(*leaves.values())

    return Run(forward, leaves, problem.grad_out)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()


def _length_first(tensor: Tensor) -> Tensor:
    return tensor.permute(2, 0, 1, 3)


def _all_keys(problem: Problem) -> tuple[Tensor, Tensor]:
    """Memory and current segment in one: without memory of its own, an implementation gets them concatenated."""
    if not problem.memory_key.shape[2]:
        return problem.key, problem.value
    pairs = ((problem.memory_key, problem.key), (problem.memory_value, problem.value))
    return tuple(torch.cat([old.transpose(1, 2), new.transpose(1, 2)], 1).transpose(1, 2) for old, new in pairs)


def _whole_leaves(problem: Problem) -> dict[str, Tensor]:
    leaves = {name: getattr(problem, name) for name in Problem.INPUTS if not name.startswith("memory")}
    leaves["key"], leaves["value"] = _all_keys(problem)
    return {name: _leaf(tensor) for name, tensor in leaves.items()}


@functools.cache
def _compile(function: Callable) -> Callable:
    """One graph per shape and direction, as for a training run of one shape."""
    torch._dynamo.config.cache_size_limit = 64
    return torch.compile(function, dynamic=False)


def registry(device: str = "cpu") -> dict[str, Implementation]:
    """All implementations by name, the package's own first. On a GPU, plain SDPA is there once for each kernel."""
    own = [
        Implementation(
            f"xlnet_kernels {name}",
            package_backend(name),
            maps=(7, 8) if name == "reference" else (0, 0),
            longest=512 if name == "reference" else None,
        )
        for name in xk.backends()
    ]
    peers = [
        Implementation(TRANSFORMERS, transformers_eager, maps=(5.5, 6)),
        Implementation("transformers compiled", functools.partial(transformers_eager, compiled=True), (4.5, 5.5), True),
        Implementation("SDPA + bias", sdpa_with_bias, maps=(5.5, 6.5)),
        Implementation("SDPA + bias compiled", functools.partial(sdpa_with_bias, compiled=True), (3.5, 4.5), True),
        Implementation("FlexAttention", flex_attention, maps=(4, 7), compiled=True),
    ]
    baselines = [Implementation(BASELINE, plain_sdpa, checked=False)]
    if device == "cuda":
        baselines = [
            Implementation(f"{BASELINE}, {kernel}", functools.partial(plain_sdpa, kernel=kernel), checked=False)
            for kernel in SDPA_KERNELS
        ]
    return {implementation.name: implementation for implementation in own + peers + baselines}
