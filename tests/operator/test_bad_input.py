"""Bad input gets an error that names the argument, what came and what was needed, before anything is computed."""

from __future__ import annotations

import math

import pytest
import torch

import xlnet_kernels as xk
from tests.cases import make

B, H, L, K, M, D = 2, 3, 5, 6, 4, 8


def good() -> dict:
    """Arguments that are right, in every part."""
    x = make(B, H, L, K, M, D).leaves
    segments = xk.Segments(torch.zeros(B, L).int(), torch.zeros(B, M + K).int(), x["segment_embed"], x["segment_bias"])
    return {name: x[name] for name in ("query", "key", "value", "rel_key", "content_bias", "position_bias")} | {
        "segments": segments,
        "mask": xk.RankMask(torch.ones(B, L).int(), torch.zeros(B, M + K).int()),
        "query_positions": torch.arange(L).expand(B, -1),
        "memory": (x["memory_key"], x["memory_value"]),
    }


def zeros(*shape: int, **kind) -> torch.Tensor:
    return torch.zeros(shape, **kind)


def ids(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def segments(query=(B, L), key=(B, M + K), embed=(2, H, D), bias=(H, D), **kind) -> xk.Segments:
    return xk.Segments(ids(*query), ids(*key), zeros(*embed, **kind), None if bias is None else zeros(*bias, **kind))


def rank_mask(query=(B, L), key=(B, M + K)) -> xk.RankMask:
    return xk.RankMask(ids(*query), ids(*key))


HALF = dict(dtype=torch.bfloat16)
META = dict(device="meta")
MEMORY = zeros(B, H, M, D)

BAD = {
    # ranks
    "query-rank": (dict(query=zeros(H, L, D)), r"query must have 4 dimensions, got shape \(3, 5, 8\)"),
    "query-none": (dict(query=None), "query must be a tensor, got NoneType"),
    "key-rank": (dict(key=zeros(B, K, D)), r"key must have 4 dimensions, got shape \(2, 6, 8\)"),
    "value-rank": (dict(value=zeros(K, D)), "value must have 4 dimensions"),
    "key-none": (dict(key=None), "key must be a tensor, got NoneType"),
    "value-none": (dict(value=None), "value must be a tensor, got NoneType"),
    "rel-key-rank": (dict(rel_key=zeros(16, D)), r"rel_key must be \(H, P, D\) or .* got shape \(16, 8\)"),
    "rel-key-none": (dict(rel_key=None), "rel_key must be .* got NoneType"),
    "bias-rank": (dict(content_bias=zeros(H * D)), "content_bias must have 2 dimensions"),
    "positions-rank": (dict(query_positions=ids(L)), "query_positions must have 2 dimensions"),
    "no-width": (dict(query=zeros(B, H, L, 0)), "query must have a head_dim D of at least 1"),
    "deterministic": (dict(deterministic="x"), "deterministic must be a bool or None, got 'x'"),
    "dropout-none": (dict(dropout_p=None), r"dropout_p must be in \[0, 1\), got None"),
    "backend-list": (dict(backend=["cpu"]), r"backend must be None or one of .* got \['cpu'\]"),
    # sizes
    "key-heads": (dict(key=zeros(B, H + 1, K, D)), r"key must have shape \(2, 3, 6, 8\), got \(2, 4, 6, 8\)"),
    "key-batch": (dict(key=zeros(B + 1, H, K, D)), "key must have shape"),
    "key-width": (dict(key=zeros(B, H, K, D + 1)), "key must have shape"),
    "value-length": (dict(value=zeros(B, H, K + 1, D)), r"value must have shape \(2, 3, 6, 8\)"),
    "value-width": (dict(value=zeros(B, H, K, D + 8)), "value must have shape"),
    "rel-key-rows": (dict(rel_key=zeros(H, 15, D)), "rel_key has 15 rows from distance 10 on.* it needs 16 .* or 11"),
    "rel-key-rows-for-max-distance": (
        dict(max_distance=8),
        r"rel_key must have 1 to 14 rows from max_distance=8 .* -5, got shape \(3, 16, 8\), 16 rows$",
    ),
    "rel-key-without-rows": (dict(rel_key=zeros(H, 0, D), max_distance=8), r"1 to 14 rows .* got shape \(3, 0, 8\)"),
    "rel-key-without-rows-of-the-size-that-ends-at-0": (
        dict(rel_key=zeros(H, 0, D), max_distance=-1),
        r"1 to 5 rows .* got shape \(3, 0, 8\)",
    ),
    "rel-key-of-a-conformer": (dict(rel_key=zeros(H, 15, D)), "15 rows .* Conformer's .* give max_distance=9"),
    "window-of-a-conformer": (
        dict(rel_key=zeros(H, 15, D), max_distance=2),
        "1 to 8 rows .* 15 rows; of a Conformer's table, .* M . K - 1 = 9, give the rows of the window, from 7 on",
    ),
    "window-without-max-distance": (
        dict(rel_key=zeros(H, 4, D)),
        "rel_key has 4 rows from distance 10 on.* 16 .* or 11 .* a window of distances needs max_distance",
    ),
    "rel-key-heads": (dict(rel_key=zeros(H + 1, 16, D)), r"rel_key must have shape \(3, 16, 8\)"),
    "rel-key-batch": (
        dict(rel_key=zeros(1, H, 16, D)),
        r"rel_key must have shape \(2, 3, 16, 8\), got \(1, 3, 16, 8\)",
    ),
    "rel-key-flat": (
        dict(rel_key=zeros(16, H * D)),
        r"got shape \(16, 24\): give rel_key.unflatten\(1, \(3, 8\)\).transpose\(0, 1\)",
    ),
    "value-sparse": (dict(value=zeros(B, H, K, D).to_sparse()), r"value must be a dense tensor.*value.to_dense\(\)"),
    "content-bias": (dict(content_bias=zeros(H + 1, D)), r"content_bias must have shape \(3, 8\), got \(4, 8\)"),
    "position-bias": (dict(position_bias=zeros(H, D + 1)), "position_bias must have shape"),
    "memory-heads": (dict(memory=(zeros(B, H + 1, M, D), MEMORY)), r"memory\[0\] must have shape \(2, 3, 4, 8\)"),
    "memory-value-length": (
        dict(memory=(MEMORY, zeros(B, H, M + 1, D))),
        r"memory\[1\] must have shape \(2, 3, 4, 8\)",
    ),
    "memory-one-tensor": (dict(memory=MEMORY), r"memory must be a pair .* got Tensor"),
    "memory-three": (dict(memory=(MEMORY,) * 3), "memory must be a pair"),
    "memory-none": (dict(memory=(MEMORY, None)), r"memory\[1\] must be a tensor, got NoneType"),
    "segments-query": (dict(segments=segments(query=(B, L + 1))), r"segments.query_ids must have shape \(2, 5\)"),
    "segments-key": (
        dict(segments=segments(key=(B, K))),
        r"segments.key_ids must have shape \(2, M . K = 10\), got \(2, 6\)",
    ),
    "segments-embed": (dict(segments=segments(embed=(3, H, D))), r"segments.embed must have shape \(2, 3, 8\)"),
    "segments-bias": (dict(segments=segments(bias=(H, D + 1))), "segments.bias must have shape"),
    "segments-type": (dict(segments=ids(B, L)), "segments must be xlnet_kernels.Segments or None, got Tensor"),
    "mask-rows": (dict(mask=rank_mask((B, L + 1))), r"mask.query_rank must have shape \(2 or 1, 5\), got \(2, 6\)"),
    "mask-keys": (
        dict(mask=rank_mask(key=(B, K))),
        r"mask.key_rank must have shape \(2 or 1, M . K = 10\), got \(2, 6\)",
    ),
    "mask-batch": (
        dict(mask=rank_mask((3, L), (3, M + K))),
        r"mask.query_rank must have shape \(2 or 1, 5\), got \(3, 5\)",
    ),
    "mask-dense-size": (
        dict(mask=zeros(B, 1, L, K).bool()),
        r"mask must broadcast to .*\(2, 3, 5, 10\), got \(2, 1, 5, 6\)",
    ),
    "mask-dense-rank": (dict(mask=zeros(1, B, H, L, M + K).bool()), "mask must broadcast to"),
    "mask-batch-for-heads": (dict(mask=zeros(B, L, M + K).bool()), "mask must broadcast to"),
    "positions-size": (dict(query_positions=ids(B, L + 1)), r"query_positions must have shape \(2, 5\), got \(2, 6\)"),
    "more-rows-than-keys": (
        dict(query=zeros(B, H, K + 1, D), query_positions=None),
        "query has 7 rows but key only 6: .* query_positions",
    ),
    # dtypes
    "query-integer": (dict(query=zeros(B, H, L, D).int()), "query must be float16, .* got torch.int32"),
    "query-complex": (dict(query=zeros(B, H, L, D) * 1j), "query must be float16, .* got torch.complex64"),
    "key-dtype": (dict(key=zeros(B, H, K, D, **HALF)), "key must be torch.float32 as query is, got torch.bfloat16"),
    "value-dtype": (dict(value=zeros(B, H, K, D, dtype=torch.float64)), "value must be torch.float32"),
    "rel-key-dtype": (dict(rel_key=zeros(H, 16, D, **HALF)), "rel_key must be torch.float32"),
    "bias-dtype": (dict(position_bias=zeros(H, D, **HALF)), "position_bias must be torch.float32"),
    "memory-dtype": (dict(memory=(MEMORY, MEMORY.bfloat16())), r"memory\[1\] must be torch.float32"),
    "segments-dtype": (dict(segments=segments(**HALF)), "segments.embed must be torch.float32"),
    "mask-float": (
        dict(mask=zeros(L, M + K)),
        "mask must be .* bool .* got torch.float32: give mask == 0, of one",
    ),
    "mask-integers": (dict(mask=ids(L, M + K)), r"mask must be .* got torch.int32: give mask.bool\(\), if 1 = see"),
    "mask-padding": (dict(mask=zeros(B, M + K).bool()), r"may be padding of 2 sequences.*RankMask.padding\(attention_"),
    "mask-list": (dict(mask=[True]), "mask must be a RankMask or a bool tensor .* got list"),
    "positions-float": (
        dict(query_positions=zeros(B, L)),
        "query_positions must hold int32 or int64, got torch.float32",
    ),
    # devices
    "key-device": (dict(key=zeros(B, H, K, D, **META)), "key must be on query's device cpu, got meta"),
    "rel-key-device": (dict(rel_key=zeros(H, 16, D, **META)), "rel_key must be on query's device"),
    "mask-device": (dict(mask=zeros(L, M + K, **META).bool()), "mask must be on query's device"),
    "rank-mask-device": (dict(mask=rank_mask().to("meta")), "mask.query_rank must be on query's device"),
    "key-ranks-device": (
        dict(mask=xk.RankMask(ids(B, L), ids(B, M + K).to("meta"))),
        "mask.key_rank must be on query's device",
    ),
    "floor-device": (
        dict(mask=xk.RankMask(ids(B, L), ids(B, M + K), ids(B, L).to("meta"))),
        "mask.query_floor must be on query's device",
    ),
    "sees-self-device": (
        dict(mask=xk.RankMask(ids(B, L), ids(B, M + K), None, ids(B, L).bool().to("meta"))),
        "mask.sees_self must be on query's device",
    ),
    "positions-device": (dict(query_positions=ids(B, L).to("meta")), "query_positions must be on query's device"),
    # values
    "positions-high": (
        dict(query_positions=torch.tensor([[0, 1, 2, 3, 6]] * B)),
        r"query_positions must lie in \[0, 6\), got values from 0 to 6",
    ),
    "positions-low": (dict(query_positions=torch.tensor([[-1, 1, 2, 3, 4]] * B)), "query_positions .* from -1 to 4"),
    "dropout-one": (dict(dropout_p=1.0), r"dropout_p must be in \[0, 1\), got 1.0"),
    "dropout-negative": (dict(dropout_p=-0.1), "dropout_p must be in"),
    "dropout-nan": (dict(dropout_p=math.nan), "dropout_p must be in .* got nan"),
    "dropout-tensor": (dict(dropout_p="0.1"), "dropout_p must be in .* got '0.1'"),
    "scale-nan": (dict(scale=math.nan), "scale must be a finite number, got nan"),
    "scale-infinite": (dict(scale=math.inf), "scale must be a finite number, got inf"),
    "scale-text": (dict(scale="1"), "scale must be a finite number, got '1'"),
    "max-distance-small": (dict(max_distance=-6), r"max_distance must be at least -\(K - 1\) = -5, .* got -6"),
    "max-distance-large": (dict(max_distance=2**30), r"max_distance must be an integer below 2\^30, got 1073741824"),
    "max-distance-float": (dict(max_distance=10.0), "max_distance must be an integer .* got 10.0"),
    "backend-unknown": (dict(backend="cudnn"), "backend must be None or one of .* got 'cudnn'"),
}


def test_the_good_arguments_are_good(backend):
    assert xk.rel_attention(**good(), backend=backend).shape == (B, H, L, D)


@pytest.mark.parametrize("case", BAD)
def test_named(case):
    change, text = BAD[case]
    with pytest.raises(ValueError, match=text):
        xk.rel_attention(**(good() | change))


def test_heads_after_length_are_named():
    x = zeros(B, L, H, D)
    with pytest.raises(ValueError, match=r"rel_key has 3 heads and .* 5: .*of \(B, L, H, D\) give query.transpose\(1"):
        xk.rel_attention(x, x, x, zeros(H, 2 * L, D))


def test_masks_that_would_broadcast_by_accident_are_refused():
    """(B, L) padding where B = L, and (B, L, K) where B = H; with all dimensions spelled out they are served."""
    x = zeros(L, L, L, D)
    rel_key = zeros(L, 2 * L, D)
    square, cube = torch.ones(L, L).bool(), torch.ones(L, L, L).bool()
    with pytest.raises(ValueError, match=r"mask of shape \(5, 5\) may be padding of 5 sequences"):
        xk.rel_attention(x, x, x, rel_key, mask=square)
    with pytest.raises(ValueError, match=r"may be of 5 sequences or of 5 heads: give mask\[:, None\]"):
        xk.rel_attention(x, x, x, rel_key, mask=cube)
    for mask in (square[None, None], cube[None], cube[:, None]):
        assert xk.rel_attention(x, x, x, rel_key, mask=mask).shape == x.shape
    assert xk.rel_attention(x[:1], x[:1], x[:1], rel_key, mask=square).shape == (1, L, L, D)
    with pytest.raises(ValueError, match="may be padding of 5 sequences"):
        xk.TwoStreamAttention(8, 1)(zeros(L, L, 8), mask=square)


@pytest.mark.parametrize("name", [name for name, state in xk.backends().items() if not state.available])
def test_unavailable_backend_says_why(name):
    with pytest.raises(RuntimeError) as error:
        xk.rel_attention(**good(), backend=name)
    assert f'backend="{name}"' in str(error.value) and xk.backends()[name].reason in str(error.value)


def test_backend_for_another_device_says_so():
    arguments = make(biases=False, segments=False).map(lambda leaf: leaf.to("meta")).leaves
    if xk.backends()["cpu"].available:
        with pytest.raises(RuntimeError, match='backend="cpu" .* serves cpu tensors, query is on meta'):
            xk.rel_attention(**arguments, backend="cpu")


def test_nothing_is_drawn_or_written_when_a_call_is_refused():
    arguments = good()
    before = {name: x.clone() for name, x in arguments.items() if isinstance(x, torch.Tensor)}
    state = torch.get_rng_state()
    for change in (dict(dropout_p=0.5, backend="cudnn"), dict(dropout_p=0.5, mask=zeros(1, K).bool())):
        with pytest.raises(ValueError):
            xk.rel_attention(**(arguments | change))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(arguments[name], x) for name, x in before.items())


@pytest.mark.parametrize("query, text", [(ids(3), "2-dimensional"), (zeros(1, 3), "hold integers"), (None, "NoneType")])
def test_segments_names_its_ids(query, text):
    with pytest.raises(ValueError, match=f"query_ids must .*{text}"):
        xk.Segments(query, ids(1, 3), zeros(2, H, D))


@pytest.mark.parametrize(
    "make_mask, text",
    [
        (lambda: xk.RankMask.from_order(zeros(2, 6)), "steps must hold integers, got torch.float32"),
        (lambda: xk.RankMask.from_order(ids(2, 6) > 0), "steps must hold integers, got torch.bool"),
        (lambda: xk.RankMask.from_order(ids(2, 6), [0]), "targets must be a 2-dimensional tensor .* got list"),
        (lambda: xk.RankMask.from_order(ids(2, 6), mem_len=-2), "mem_len must be an integer of at least 0, got -2"),
        (lambda: xk.RankMask.from_order(), "give steps .* or the sequence of visits"),
        (lambda: xk.RankMask.from_order(ids(2, 6), sequence=ids(2, 6)), "give steps .* or the sequence of visits"),
        (lambda: xk.RankMask.from_order(sequence=ids(2, 6)), "sequence must hold each of 0 .. 5 once in every row"),
        (lambda: xk.RankMask.padding(), r"give padding .* or attention_mask \(1 = token\)"),
        (
            lambda: xk.RankMask.padding(attention_mask=zeros(2, 6)),
            "attention_mask must hold integers, got",
        ),
        (lambda: xk.RankMask.padding(zeros(2, 6)), "padding must be a bool tensor, got torch.float32"),
        (
            lambda: xk.RankMask.causal(2, 6, padding=zeros(2, 5).bool()),
            r"padding must be a bool tensor of shape \(2, 6\)",
        ),
        (lambda: xk.RankMask.local(2, 6, -1, 2), "left must be an integer of at least 0, got -1"),
        (lambda: xk.RankMask.local(2, 6, None, 2.0), "right must be an integer of at least 0, got 2.0"),
        (lambda: xk.RankMask.chunked(2, 6, 0), "chunk must be an integer of at least 1, got 0"),
        (lambda: xk.RankMask.chunked(2, 6, 3, -1), "left_chunks must be an integer of at least 0, got -1"),
        (lambda: xk.RankMask.packed(zeros(2, 6)), "document_ids must hold integers, got torch.float32"),
        (
            lambda: xk.RankMask.packed(ids(2, 6), padding=zeros(2, 5).bool()),
            r"padding must be a bool tensor of shape \(2, 6\)",
        ),
        (lambda: xk.RankMask.causal(2, -1), "length must be an integer of at least 0, got -1"),
        (lambda: xk.RankMask.causal(2, 6, window=0), "window must be an integer of at least 1, got 0"),
    ],
)
def test_mask_makers_name_their_arguments(make_mask, text):
    with pytest.raises(ValueError, match=text):
        make_mask()


def test_order_beyond_int32_is_clamped_and_not_wrapped():
    mask = xk.RankMask.from_order(torch.tensor([[2**40, 1, 2**31]]))
    assert mask.query_rank.tolist() == [[2**31 - 1, 1, 2**31 - 1]]


def test_segment_ids_that_would_collide_in_int32_are_refused():
    with pytest.raises(ValueError, match=r"key_ids must lie in \[-2147483648, 2147483648\), got .* 4294967296"):
        xk.Segments(ids(1, 1), torch.tensor([[2**32]]), zeros(2, H, D))


@pytest.mark.parametrize("arguments, text", [((dict(segments=(1, 2)), "segments")), (dict(memory=5), "memory")])
def test_autocast_reads_nothing_before_the_checks(arguments, text):
    with torch.autocast("cpu"), pytest.raises(ValueError, match=f"{text} must be"):
        xk.rel_attention(**(good() | arguments))
