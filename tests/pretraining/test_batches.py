"""Batches of a text whose tokens are their own positions, so that each says where it came from."""

from __future__ import annotations

import multiprocessing
from dataclasses import fields

import numpy as np
import pytest
import torch

from xlnet_kernels import RankMask
from xlnet_kernels.pretraining import (
    AutoregressiveLM,
    MaskedLM,
    PermutationLM,
    PretrainingBatches,
    TokenFile,
    Vocabulary,
    batch_loader,
    with_memory,
    write_tokens,
)

T, B, L, REUSE = 2000, 4, 40, 16
DOCUMENTS = [700, 305, 595, 400]
VOCABULARY = Vocabulary(size=T + 4, sep=T, cls=T + 1, pad=T + 2, mask=T + 3)
OBJECTIVES = [PermutationLM(), AutoregressiveLM(), MaskedLM()]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> TokenFile:
    path = tmp_path_factory.mktemp("tokens") / "text"
    write_tokens(path, np.split(np.arange(T), np.cumsum(DOCUMENTS)[:-1]), VOCABULARY.size)
    return TokenFile(path)


def make(text, objective=OBJECTIVES[1], batch_size=B, seq_len=L, reuse_len=REUSE, **options) -> PretrainingBatches:
    if not options.get("pairs", True):
        reuse_len = None
    return PretrainingBatches(text, VOCABULARY, objective, batch_size, seq_len, reuse_len, **options)


def tensors(batch) -> list[torch.Tensor]:
    found = [batch.mask.query_rank, batch.mask.key_rank]
    found += [getattr(batch, field.name) for field in fields(batch)]
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]


def assert_same(found, wanted) -> None:
    assert len(tensors(found)) == len(tensors(wanted))
    assert all(torch.equal(f, w) for f, w in zip(tensors(found), tensors(wanted), strict=True))


@pytest.mark.parametrize("bi_data", [False, True])
def test_pairs_are_running_text_a_sep_b_sep_cls(text, bi_data):
    batches, labels = make(text, bi_data=bi_data), []
    for k in range(20):
        batch = batches[k]
        assert batch.input_ids.shape == batch.token_type_ids.shape == (B, L)
        for row in range(B):
            ids, types = batch.input_ids[row].tolist(), batch.token_type_ids[row].tolist()
            step = -1 if bi_data and row >= B // 2 else 1
            first = ids.index(T)
            a, b = ids[:first], ids[first + 1 : -2]
            assert ids[-2:] == [T, T + 1] and first > REUSE and len(b) > 0
            assert types == [0] * (first + 1) + [1] * (len(b) + 1) + [2]
            assert a == list(range(a[0], a[0] + step * len(a), step)) and len(a) + len(b) == L - 3
            assert b == list(range(b[0], b[0] + step * len(b), step))
            labels.append(batch.is_next[row].item())
            if labels[-1]:
                assert b[0] == a[-1] + step
            else:  # shares no token with the text that A is part of
                own = range(a[0], a[0] + step * (L - 3), step)
                assert not set(own) & set(b)
    assert 25 < sum(labels) < 55  # half of 80


@pytest.mark.parametrize("bi_data", [False, True])
def test_a_b_from_elsewhere_is_any_text_beside_the_example(text, bi_data):
    # the shortest text there may be: 120 tokens, so that every place is met
    batches, gaps = make(text.part(0, 3 * L), batch_size=2 if bi_data else 1, bi_data=bi_data), set()
    for k in range(400):
        batch = batches[k]
        for row in (batch.is_next == 0).nonzero()[:, 0]:
            ids = batch.input_ids[row].tolist()
            # first and last of the L - 3 tokens that A is part of
            begin, end = (ids[0] - (L - 4), ids[0]) if bi_data and row else (ids[0], ids[0] + L - 4)
            b = ids[ids.index(T) + 1 : -2]
            assert max(b) < begin or min(b) > end
            gaps.add(max(b) - begin if max(b) < begin else min(b) - end)
    assert {-1, 1} <= gaps  # as near as can be


@pytest.mark.parametrize("pairs", [False, True])
def test_consecutive_batches_continue_each_other(text, pairs):
    batches = make(text, pairs=pairs, bi_data=True)
    advance = REUSE if pairs else L
    signs = torch.tensor([1, 1, -1, -1])
    for k in range(batches.steps_per_epoch - 1):
        step = batches[k + 1].input_ids[:, 0] - batches[k].input_ids[:, 0]
        assert batches[k].reuse_len == advance and torch.equal(step, signs * advance)


def test_rows_have_streams_of_their_own(text):
    forward = [batch.input_ids for batch in map(make(text, pairs=False).__getitem__, range(12))]
    seen = [set(torch.cat([ids[row] for ids in forward]).tolist()) for row in range(B)]
    assert len(set.union(*seen)) == sum(map(len, seen)) == B * L * 12  # no token is read twice
    both = make(text, pairs=False, bi_data=True)
    first = both[0].input_ids[:, 0].tolist()
    assert first == [0, T // 2, T // 2 - 1, T - 1]  # the same halves of the text from either end


def test_an_epoch_reads_the_whole_text(text):
    batches = make(text, pairs=False, batch_size=1)
    # 2000 tokens, one more than 40 for each sequence: (2000 - 41) // 40 + 1
    assert batches.steps_per_epoch == 49
    seen = torch.cat([batches[k].input_ids[0] for k in range(49)])
    assert torch.equal(seen, torch.arange(49 * 40))


def test_a_new_epoch_is_a_new_context_and_other_data(text):
    batches = make(text, PermutationLM())
    starts = {batches[epoch * batches.steps_per_epoch].input_ids[0, 0].item() for epoch in range(20)}
    assert 0 in starts and 1 < len(starts) and max(starts) < REUSE
    again = batches[batches.steps_per_epoch]
    assert again.new_context.all() and not batches[batches.steps_per_epoch - 1].new_context.any()
    assert not torch.equal(again.mask.query_rank, batches[0].mask.query_rank)


@pytest.mark.parametrize("bi_data", [False, True])
@pytest.mark.parametrize("pairs", [False, True])
def test_context_reaches_back_to_the_begin_of_document_and_epoch(text, pairs, bi_data):
    batches, bounds = make(text, pairs=pairs, bi_data=bi_data), np.cumsum([0, *DOCUMENTS])
    advance, short = REUSE if pairs else L, 0
    for k in range(2 * batches.steps_per_epoch):
        batch = batches[k]
        for row in range(B):
            first, read = batch.input_ids[row, 0].item(), (k % batches.steps_per_epoch) * advance
            document = np.searchsorted(bounds, first, side="right") - 1
            before = first - bounds[document]
            if bi_data and row >= B // 2:
                before = bounds[document + 1] - 1 - first
            assert batch.context_len[row] == min(before, read)
            short += before < read
        assert torch.equal(batch.new_context, batch.context_len == 0)
    assert short > 20  # documents do end within streams


def test_a_document_that_begins_with_a_sequence_is_a_new_context(tmp_path):
    write_tokens(tmp_path / "text", np.split(np.arange(T), [3 * REUSE]), VOCABULARY.size)
    batches = make(TokenFile(tmp_path / "text"))
    assert [batches[k].context_len[0].item() for k in range(6)] == [0, 16, 32, 0, 16, 32]
    assert [batches[k].new_context[0].item() for k in range(6)] == [True, False, False, True, False, False]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: type(objective).__name__)
@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_any_number_of_workers_gives_the_same_batches_and_so_does_resuming(text, objective, num_workers):
    batches = make(text, objective, bi_data=True, seed=7)
    state = torch.get_rng_state()
    whole = list(batch_loader(batches, 0, 7, num_workers=num_workers))
    resumed = list(batch_loader(make(text, objective, bi_data=True, seed=7), 3, 7, num_workers=num_workers))
    assert torch.equal(torch.get_rng_state(), state)  # dropout does not depend on the loader
    assert len(whole) == 7 and len(resumed) == 4
    for k, batch in enumerate(whole):
        assert_same(batch, batches[k])
    for k, batch in enumerate(resumed):
        assert_same(batch, whole[k + 3])


def test_without_end_the_loader_goes_on(text):
    batches = make(text)
    loader = iter(batch_loader(batches, batches.steps_per_epoch - 1))
    assert_same(next(loader), batches[batches.steps_per_epoch - 1])
    assert_same(next(loader), batches[batches.steps_per_epoch])


def test_spawned_workers_open_the_file_themselves(text):
    spawned = batch_loader(
        make(text), 2, 3, num_workers=1, multiprocessing_context=multiprocessing.get_context("spawn")
    )
    assert_same(next(iter(spawned)), make(text)[2])


@pytest.mark.parametrize("bi_data", [False, True])
def test_processes_share_the_rows_of_one_big_batch(text, bi_data):
    whole = make(text, PermutationLM(), batch_size=8, bi_data=bi_data)
    shards = [make(text, PermutationLM(), batch_size=4, bi_data=bi_data, rank=rank, world_size=2) for rank in (0, 1)]
    rows = [[0, 1, 4, 5], [2, 3, 6, 7]] if bi_data else [[0, 1, 2, 3], [4, 5, 6, 7]]
    for k in (0, 5, whole.steps_per_epoch + 1):
        for shard, index in zip(shards, rows, strict=True):
            batch = whole[k]
            for found, wanted in zip(tensors(shard[k]), tensors(batch), strict=True):
                assert torch.equal(found, wanted[index])


def test_seeds_differ(text):
    one, two = (make(text, PermutationLM(), seed=seed)[0] for seed in (0, 1))
    assert torch.equal(one.input_ids[:, :REUSE], two.input_ids[:, :REUSE])
    assert not torch.equal(one.target_positions, two.target_positions)


def test_permutation_batches_predict_what_was_asked_for(text):
    for num_predict, reuse_len in ((11, 20), (6, 16), (None, 20)):
        for pairs in (True, False):
            batch = make(text, PermutationLM(num_predict), reuse_len=reuse_len, pairs=pairs, bi_data=True)[3]
            assert batch.target_positions.shape == (B, num_predict or L // 6)
            assert torch.equal(batch.labels, batch.input_ids.gather(1, batch.target_positions))
            assert (batch.labels < T).all()  # SEP and CLS are no targets
            assert (batch.target_positions.diff(dim=1) > 0).all()
            first = (batch.target_positions < reuse_len).sum(1)
            assert not pairs or (first == -(-batch.labels.shape[1] * reuse_len // L)).all()


def test_full_size_predicts_85_of_512(tmp_path):
    write_tokens(tmp_path / "text", [np.arange(T)], VOCABULARY.size)
    batch = make(TokenFile(tmp_path / "text"), PermutationLM(), batch_size=1, seq_len=512, reuse_len=256)[0]
    assert batch.labels.shape == (1, 85) and (batch.labels >= 0).all() and 6 <= 512 / 85 <= 7


def test_the_query_stream_of_the_first_part_sees_nothing_of_the_second(text):
    sees = make(text, PermutationLM(perm_size=8))[0].mask.to_bool("query")
    assert not sees[:, :REUSE, REUSE:].any() and sees[:, REUSE:, :REUSE].all()


def test_targets_fall_short_only_where_text_does(tmp_path):
    # a text of little but special tokens: slots without a target are ignored
    tokens = np.where(np.arange(T) % 10, T + 3, np.arange(T))
    write_tokens(tmp_path / "text", [tokens], VOCABULARY.size)
    batch = make(TokenFile(tmp_path / "text"), PermutationLM(20))[0]
    ordinary = (batch.input_ids < T).sum(1)
    assert ((batch.labels >= 0).sum(1) == ordinary).all() and (ordinary < 20).all()
    assert (batch.labels[batch.labels < 0] == -100).all()


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_autoregressive_batches_predict_the_neighbour(text, backward, pairs):
    batch = make(text, AutoregressiveLM(backward), pairs=pairs)[2]
    assert batch.target_positions is None
    if backward:
        wanted = torch.nn.functional.pad(batch.input_ids[:, :-1], (1, 0), value=-100)
    else:
        wanted = torch.nn.functional.pad(batch.input_ids[:, 1:], (0, 1), value=-100)
        if not pairs:
            wanted[:, -1] = batch.input_ids[:, -1] + 1  # the first token of the next batch
    assert torch.equal(batch.labels, wanted.masked_fill(wanted >= T, -100))
    causal = torch.ones(L, L, dtype=torch.bool).tril(-1)
    assert torch.equal(batch.mask.to_bool("query"), (causal.T if backward else causal).expand(B, -1, -1))
    assert backward == bool(batch.new_context.all())  # memory lies on the side that is predicted


def test_masked_batches_hide_targets_four_times_in_five(text):
    true = make(text, AutoregressiveLM(), seq_len=400, reuse_len=200, batch_size=1)
    batches = make(text, MaskedLM(100), seq_len=400, reuse_len=200, batch_size=1)
    kinds = np.zeros(3)
    for k in range(9):
        batch, ids = batches[k], true[k].input_ids
        targets = torch.zeros_like(ids, dtype=torch.bool).scatter(1, batch.output_rows, True)
        assert targets.sum() == 100 and torch.equal(batch.labels[0], ids[targets]) and (ids[targets] < T).all()
        assert torch.equal(batch.input_ids[~targets], ids[~targets])
        sees = batch.mask.to_bool("query")
        assert sees[:, 200:].all() and sees[:, :, :200].all() and not sees[:, :200, 200:].any()
        assert batch.target_positions is None
        hidden = batch.input_ids[targets]
        kinds += [(hidden == T + 3).sum(), (hidden == ids[targets]).sum(), (hidden < T).sum()]
    # 900 targets: standard deviations of 0.013 and 0.01
    assert abs(kinds[0] / 900 - 0.8) < 0.05 and abs(kinds[1] / 900 - 0.1) < 0.04 and kinds[0] + kinds[2] == 900


def test_permutation_and_masked_lm_differ_in_the_input_only(text):
    permutation, masked = make(text, PermutationLM())[1], make(text, MaskedLM())[1]
    hidden = masked.input_ids != permutation.input_ids
    assert torch.equal(masked.labels, permutation.labels)
    assert torch.equal(masked.output_rows, permutation.target_positions)
    assert hidden.any() and hidden.sum() == hidden.gather(1, masked.output_rows).sum()


def test_words_are_predicted_from_their_begin_on_in_both_directions(text):
    starts = np.arange(VOCABULARY.size) % 5 == 0
    vocabulary = Vocabulary(VOCABULARY.size, T, T + 1, T + 2, T + 3, word_starts=starts)
    batches = PretrainingBatches(text, vocabulary, PermutationLM(8), 2, 200, pairs=False, bi_data=True)
    for k in range(3):
        for row in batches[k].labels.tolist():
            # the 8 targets are spans alone (200 tokens hold more), and each span has its first token at a word's begin
            tokens = sorted(row)
            assert all(token % 5 == 0 or token - 1 in tokens for token in tokens)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: type(objective).__name__)
def test_other_special_tokens_of_the_text_are_context(objective):
    vocabulary = Vocabulary(30, 20, 21, 22, 23, others=(5,))
    example = objective.example(np.arange(20), vocabulary, (20,), np.random.default_rng(0))
    assert 5 not in example.labels
    if not isinstance(objective, AutoregressiveLM):
        assert (example.key_rank[5] < example.query_rank).all()


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: type(objective).__name__)
def test_padding_is_neither_seen_nor_predicted(objective):
    ids = np.concatenate([np.arange(12), np.full(4, VOCABULARY.pad)])
    example = objective.example(ids, VOCABULARY, (16,), np.random.default_rng(0))
    assert not (example.key_rank[None, 12:] < example.query_rank[:, None]).any()
    assert (example.labels < 12).all() and (example.labels >= 0).any()


def test_memory_of_another_context_is_hidden(text):
    mask = with_memory(RankMask.causal(3, 2), 4, torch.tensor([0, 3, 9]))
    assert mask.to_bool()[:, :, :4].int().tolist() == [[[0] * 4] * 2, [[0, 1, 1, 1]] * 2, [[1] * 4] * 2]
    assert torch.equal(mask.to_bool()[:, :, 4:], RankMask.causal(3, 2).to_bool())
    assert torch.equal(with_memory(RankMask.causal(1, 2), 4, torch.tensor([0, 3, 9])).to_bool(), mask.to_bool())
    with pytest.raises(ValueError, match="mask has a query_floor"):
        with_memory(RankMask.causal(3, 2, window=2), 4, torch.tensor([0, 3, 9]))
    batch = make(text)[1]
    mems = [torch.zeros(20, B, 8)]
    inputs = batch.inputs(mems)
    assert inputs["mems"] is mems
    sees, near = inputs["mask"].to_bool("query")[:, :, :20], torch.arange(20, 0, -1) <= batch.context_len[:, None]
    assert batch.context_len.tolist() == [16, 16, 11, 16]  # of 20; a document begins at 1005
    assert torch.equal(sees, near[:, None].expand(-1, L, -1))
    assert torch.equal(inputs["mask"].to_bool("query")[:, :, 20:], batch.mask.to_bool("query"))
    assert batch.inputs()["mask"] is batch.mask and batch.inputs()["mems"] is None
    with pytest.raises(ValueError, match=r"mems must be \(M, B = 4, d_model\) each, got shape \(20, 3, 8\)"):
        batch.inputs([torch.zeros(20, 3, 8)])


def test_batches_move(text):
    batch = make(text, PermutationLM())[0]
    moved = batch.to("meta")
    assert all(tensor.device.type == "meta" for tensor in tensors(moved))
    assert_same(batch.to("cpu"), batch)
    assert make(text)[0].to("meta").target_positions is None


@pytest.mark.parametrize(
    "change, message",
    [
        ({"reuse_len": 36}, r"reuse_len must be in \[1, seq_len - 5\].* seq_len is 40, reuse_len 36"),
        ({"reuse_len": 0}, "reuse_len must be in"),
        ({"seq_len": 5, "reuse_len": None}, "reuse_len must be in"),
        ({"objective": PermutationLM(37)}, "num_predict must leave context: .* must be below 37, got 37"),
        ({"objective": MaskedLM(40), "pairs": False}, "num_predict must leave context: .* must be below 40, got 40"),
        ({"objective": AutoregressiveLM(), "pairs": False, "seq_len": 1}, "seq_len must be at least 2"),
        ({"batch_size": 60}, "text is too short: 60 streams of sequences of 40 tokens need at least 2220, it has 2000"),
        ({"batch_size": 1, "seq_len": 700, "reuse_len": 20}, "text is too short: .* at least 2100"),
        ({"batch_size": 3, "bi_data": True}, "batch_size must be even with bi_data"),
        ({"batch_size": 0}, "batch_size must be an integer of at least 1, got 0"),
        ({"seed": -1}, "seed must be an integer of at least 0"),
        ({"rank": 2, "world_size": 2}, "rank must lie in"),
    ],
)
def test_bad_arguments_are_named(text, change, message):
    with pytest.raises(ValueError, match=message):
        make(text, **change)


def test_reuse_len_is_for_pairs(text):
    with pytest.raises(ValueError, match="reuse_len is for pairs"):
        PretrainingBatches(text, VOCABULARY, OBJECTIVES[0], B, L, 16, pairs=False)


def test_a_text_of_another_vocabulary_is_refused(text):
    with pytest.raises(ValueError, match="text has a vocabulary of 2004 ids, more than the 100"):
        PretrainingBatches(text, Vocabulary(100, 0, 1, 2, 3), OBJECTIVES[0], B, L)


def test_batches_are_numbered_from_0(text):
    with pytest.raises(IndexError, match="numbered from 0, got -1"):
        make(text)[-1]


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: PermutationLM(num_predict=0), "num_predict must be a positive integer, got 0"),
        (lambda: PermutationLM(perm_size=2.5), "perm_size must be a positive integer, got 2.5"),
        (lambda: MaskedLM(max_gram=0), "max_gram must be a positive integer, got 0"),
        (lambda: MaskedLM(mask_rate=0.8, random_rate=0.3), "shares of at most 1 together, got 0.8 and 0.3"),
    ],
)
def test_bad_objectives_are_named(make, text):
    with pytest.raises(ValueError, match=text):
        make()
