"""Targets and factorisation orders against the rules they are made by."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from xlnet_kernels import RankMask
from xlnet_kernels.pretraining import block_order, permutation_ranks, sample_spans, span_targets
from xlnet_kernels.pretraining.orders import share_targets

PARTS = (8, 12)
L = sum(PARTS)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def written_rule(order: np.ndarray, targets: np.ndarray, functional: np.ndarray, size: int) -> np.ndarray:
    """perm_mask (True = may not see) of one part, as the original's data pipeline is described."""
    masked_or_functional = targets | functional
    rev = np.where(masked_or_functional, order, -1)
    self_rev = np.where(targets, rev, rev + 1)
    hidden = np.zeros((size, size), bool)
    for i in range(size):
        for j in range(size):
            hidden[i, j] = self_rev[i] <= rev[j] and masked_or_functional[j]
    return hidden


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("perm_size", [4, 100], ids=["blocks", "whole"])
def test_ranks_are_the_rule_of_the_original_code(seed, perm_size):
    random = rng(seed)
    functional = random.random(L) < 0.2
    targets = (random.random(L) < 0.4) & ~functional
    order = np.concatenate([block_order(random, size, perm_size) for size in PARTS])
    hidden = np.zeros((L, L), bool)
    hidden[: PARTS[0], PARTS[0] :] = True  # the first part cannot see the second, the second sees all of the first
    for part in (slice(0, PARTS[0]), slice(PARTS[0], L)):
        size = part.stop - part.start
        hidden[part, part] = written_rule(order[part], targets[part], functional[part], size)
    ranks = permutation_ranks(order, targets, functional, PARTS)
    mask = RankMask(*(torch.from_numpy(rank)[None] for rank in ranks))
    assert torch.equal(mask.to_bool("query")[0], torch.from_numpy(~hidden))
    # the content stream: the same, and everyone sees itself
    assert torch.equal(mask.to_bool("content")[0], torch.from_numpy(~hidden | np.eye(L, dtype=bool)))


def test_no_target_sees_itself_or_a_later_one():
    targets, none = rng(3).random(L) < 0.5, np.zeros(L, bool)
    order = block_order(rng(3), L, L)
    query_rank, key_rank = permutation_ranks(order, targets, none, (L,))
    sees = key_rank[None, :] < query_rank[:, None]
    assert np.array_equal(sees[np.ix_(targets, targets)], order[targets][None, :] < order[targets][:, None])
    assert sees[:, ~targets].all() and not sees[np.ix_(~targets, targets)].any()


def test_padding_is_seen_by_no_one():
    padding = np.arange(L) >= L - 3
    none = np.zeros(L, bool)
    query_rank, key_rank = permutation_ranks(block_order(rng(), L, L), none, none, PARTS, padding)
    assert not (key_rank[None, padding] < query_rank[:, None]).any()
    assert (key_rank[None, ~padding] < query_rank[PARTS[0] :, None]).all()


def test_orders_are_blocks_with_one_permutation():
    order = block_order(rng(), 12, 4).reshape(3, 4)
    assert sorted(order[0]) == list(range(4)) and (order == order[0] + 4 * np.arange(3)[:, None]).all()
    assert order[0].tolist() != [0, 1, 2, 3]


@pytest.mark.parametrize("length, perm_size", [(10, 4), (5, 8), (1, 1), (7, 1)])
def test_orders_of_any_length_reach_each_position_once(length, perm_size):
    order = block_order(rng(), length, perm_size)
    assert sorted(order) == list(range(length))
    assert (order // perm_size == np.arange(length) // perm_size).all()


def test_orders_are_uniform():
    # 3! = 6 orders, 600 draws: each 100 times, standard deviation 9
    found = [tuple(block_order(rng(seed), 3, 3)) for seed in range(600)]
    counts = [found.count(order) for order in set(found)]
    assert len(counts) == 6 and min(counts) > 60


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_predict", [0, 1, 43, 85, 150, 189])
def test_targets_are_as_many_as_asked_for_and_never_special(seed, num_predict):
    candidates = np.ones(256, bool)
    candidates[rng(seed).permutation(256)[:67]] = False  # leaves 189
    targets = span_targets(rng(seed), candidates, num_predict)
    assert targets.sum() == num_predict and not (targets & ~candidates).any()


def test_more_targets_than_candidates_is_an_error():
    with pytest.raises(ValueError, match="may be targets, 3 of 5, got 4"):
        span_targets(rng(), np.array([1, 1, 0, 1, 0], bool), 4)


def test_spans_are_ngrams_with_chance_one_over_n():
    sizes = np.concatenate([np.diff(sample_spans(rng(seed), 5000)).ravel() for seed in range(20)])
    share = np.bincount(sizes, minlength=6)[1:] / len(sizes)
    harmonic = 1 / np.arange(1, 6)
    # 20 * 5000 tokens / (7 * 2.19) = 6500 spans: standard deviations of at most 0.006
    assert len(sizes) > 6000 and np.abs(share - harmonic / harmonic.sum()).max() < 0.02


@pytest.mark.parametrize("alpha, beta", [(6, 1), (3, 1), (7, 2)])
def test_spans_lie_in_a_context_of_their_own(alpha, beta):
    for seed in range(20):
        spans = sample_spans(rng(seed), 2000, alpha=alpha, beta=beta)
        grams = np.diff(spans).ravel()
        # the n-gram and its n * alpha / beta tokens follow each other without a gap: what is to the left of an n-gram
        # and right of the one before is part of both contexts
        window = grams + grams * alpha // beta
        begin = np.cumsum(window) - window
        assert (begin <= spans[:, 0]).all() and (spans[:, 1] <= begin + window).all()
        assert len(spans) > 1 and spans[-1, 1] <= 2000


def test_default_spans_cover_one_token_in_seven():
    covered = np.mean([np.diff(sample_spans(rng(seed), 5000)).sum() / 5000 for seed in range(20)])
    assert abs(covered - 1 / 7) < 0.003


def test_targets_are_spread_evenly():
    # with few targets, spans to be left out are chosen at random: the second half gets as many as the first
    found = np.mean([span_targets(rng(seed), np.ones(400, bool), 20) for seed in range(200)], 0)
    assert abs(found[:200].sum() - found[200:].sum()) < 1.5


def test_spans_begin_where_words_do():
    starts = np.arange(300) % 4 == 1
    spans = sample_spans(rng(), 300, starts=starts)
    assert len(spans) > 5 and starts[spans[:, 0]].all() and (spans[1:, 0] >= spans[:-1, 1]).all()


def test_no_span_where_no_word_begins():
    assert len(sample_spans(rng(), 50, starts=np.zeros(50, bool))) == 0
    assert span_targets(rng(), np.ones(50, bool), 8, starts=np.zeros(50, bool)).sum() == 8


@pytest.mark.parametrize(
    "num_predict, room, wanted",
    [
        (85, (256, 253), [43, 42]),
        (10, (8, 9), [4, 6]),
        (16, (8, 8), [8, 8]),
        (16, (5, 12), [5, 11]),
        (9, (3, 3), [3, 3]),
    ],
)
def test_parts_share_the_targets(num_predict, room, wanted):
    parts = (256, 256) if room[0] == 256 else PARTS
    candidates = np.concatenate([np.arange(size) < count for size, count in zip(parts, room, strict=True)])
    assert share_targets(num_predict, candidates, parts) == wanted
