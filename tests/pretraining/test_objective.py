"""The three objectives on the real model, against what their definitions say, one dense pass per prediction."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from xlnet_kernels.model import XLNetConfig, XLNetLMHeadModel
from xlnet_kernels.pretraining import (
    AutoregressiveLM,
    MaskedLM,
    PermutationLM,
    PretrainingBatches,
    TokenFile,
    Vocabulary,
    joint_log_prob,
    write_tokens,
)

WORDS = ["New", "York", "is", "a", "city", ".", "<sep>", "<cls>", "<pad>", "<mask>"]
VOCABULARY = Vocabulary(len(WORDS), *range(6, 10))
OBJECTIVES = {
    "permutation": PermutationLM(),
    "autoregressive": AutoregressiveLM(),
    "backward": AutoregressiveLM(backward=True),
    "masked": MaskedLM(),
}
every_objective = pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)


@pytest.fixture(scope="module")
def model() -> XLNetLMHeadModel:
    """Weights large enough that every token matters."""
    torch.manual_seed(0)
    config = XLNetConfig(vocab_size=len(WORDS), d_model=16, n_layer=2, n_head=2, d_inner=32, dropout=0.0)
    lm = XLNetLMHeadModel(config, backend="reference").double().eval()
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.normal_(std=0.6)
    return lm


def sentence(text: str) -> torch.Tensor:
    return torch.tensor([[WORDS.index(word) for word in text.split()]])


IDS = sentence(". New York is a city")
NEW, YORK = 1, 2
TARGETS = torch.tensor([[NEW, YORK]])


def one_pass(model, ids: torch.Tensor, position: int, sees: torch.Tensor) -> torch.Tensor:
    """log p (V,) of the query stream at `position`; `sees` (L, L) bool, True = row may see."""
    perm_mask = (~sees).double()[None]
    mapping = F.one_hot(torch.tensor([[position]]), ids.shape[1]).double()
    return model(ids, perm_mask=perm_mask, target_mapping=mapping).logits[0, 0].log_softmax(-1)


@pytest.mark.parametrize("order", [(NEW, YORK), (YORK, NEW), (4, NEW, 2)])
def test_permutation_lm_is_the_chain_rule(model, order):
    length = IDS.shape[1]
    context = torch.tensor([position not in order for position in range(length)])
    expected = []
    for step, position in enumerate(order):
        # rows see the context, and targets the targets before them; what is not yet known holds another token
        sees = context.expand(length, -1).clone()
        for later, earlier in product(range(len(order)), repeat=2):
            sees[order[later], order[earlier]] = earlier < later
        ids = IDS.clone()
        ids[0, list(order[step:])] = 5 - ids[0, list(order[step:])]
        expected.append(one_pass(model, ids, position, sees)[IDS[0, position]])
    found, total = joint_log_prob(model, PermutationLM(), VOCABULARY, IDS, torch.tensor([order]))
    torch.testing.assert_close(found[0], torch.stack(expected))
    torch.testing.assert_close(total[0], sum(expected))


def test_masked_lm_predicts_each_on_its_own(model):
    ids = sentence(". <mask> <mask> is a city")
    expected = model(ids).logits[0, [NEW, YORK]].log_softmax(-1)[[0, 1], [0, 1]]
    found, total = joint_log_prob(model, MaskedLM(), VOCABULARY, IDS, TARGETS)
    torch.testing.assert_close(found[0], expected)
    torch.testing.assert_close(total[0], expected.sum())


@pytest.mark.parametrize("backward", [False, True])
def test_autoregressive_lm_predicts_from_one_side(model, backward):
    expected = []
    for position in (NEW, YORK):
        # a sequence that ends (begins) before the target, of which every row sees its side alone
        ids = IDS[:, position + 1 :] if backward else IDS[:, :position]
        length = ids.shape[1]
        sees = torch.ones(length, length, dtype=torch.bool)
        hidden = (~(sees.triu() if backward else sees.tril())).double()[None]
        row = model(ids, perm_mask=hidden).logits[0, 0 if backward else -1]
        expected.append(row.log_softmax(-1)[IDS[0, position]])
    found, total = joint_log_prob(model, AutoregressiveLM(backward), VOCABULARY, IDS, TARGETS)
    torch.testing.assert_close(found[0], torch.stack(expected))
    torch.testing.assert_close(total[0], sum(expected))


def test_new_york_is_a_city(model):
    # what each objective's p(New, York | is a city) depends on: the other target, and the words to the right
    def log_probs(objective, text):
        return joint_log_prob(model, objective, VOCABULARY, sentence(text), TARGETS)[0][0]

    for objective, york_knows_new, knows_right_context in (
        (PermutationLM(), True, True),
        (MaskedLM(), False, True),
        (AutoregressiveLM(), True, False),
    ):
        new, york = log_probs(objective, ". New York is a city")
        other = log_probs(objective, ". city York is a city")  # another first target
        assert bool(other[1] != york) == york_knows_new
        right = log_probs(objective, ". New York is a .")
        assert bool(right[0] != new) == bool(right[1] != york) == knows_right_context
        assert log_probs(objective, ". New city is a city")[0] == new  # the second target never tells the first


@every_objective
def test_probabilities_of_all_targets_add_up_to_one(model, objective):
    pairs = torch.tensor(list(product(range(len(WORDS)), repeat=2)))
    ids = IDS.repeat(len(pairs), 1)
    ids[:, [NEW, YORK]] = pairs
    _, totals = joint_log_prob(model, objective, VOCABULARY, ids, TARGETS.expand(len(pairs), -1))
    torch.testing.assert_close(totals.exp().sum(), torch.tensor(1.0, dtype=torch.float64))


def test_token_types_count(model):
    types = torch.tensor([[0, 0, 0, 1, 1, 1]])
    with_types = joint_log_prob(model, PermutationLM(), VOCABULARY, IDS, TARGETS, types)[1]
    assert with_types != joint_log_prob(model, PermutationLM(), VOCABULARY, IDS, TARGETS)[1]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> TokenFile:
    path = tmp_path_factory.mktemp("tokens") / "text"
    ids = np.random.default_rng(0).integers(6, size=600)
    write_tokens(path, np.split(ids, [72]), len(WORDS))
    return TokenFile(path)


@every_objective
def test_the_loss_is_the_mean_over_real_targets(model, text, objective):
    batch = PretrainingBatches(text, VOCABULARY, objective, 2, 30)[1]
    visible = batch.mask.to_bool("query")
    options = {}
    if batch.target_positions is not None:
        options["target_mapping"] = F.one_hot(batch.target_positions, 30).double()
    plain = model(batch.input_ids, token_type_ids=batch.token_type_ids, perm_mask=(~visible).double(), **options)
    log_probs, real = plain.logits.log_softmax(-1), batch.labels >= 0
    if batch.output_rows is not None:
        log_probs = log_probs.gather(1, batch.output_rows[:, :, None].expand(-1, -1, log_probs.shape[2]))
    expected = -log_probs.gather(2, batch.labels.clamp(0)[:, :, None])[:, :, 0][real].mean()
    assert 5 <= real.sum() <= 2 * 30
    torch.testing.assert_close(model(**batch.inputs()).loss, expected)


def test_slots_without_a_target_do_not_count(model, tmp_path):
    tokens = np.where(np.random.default_rng(0).random(600) < 0.15, 0, 6)
    write_tokens(tmp_path / "text", [tokens], len(WORDS))
    batch = PretrainingBatches(TokenFile(tmp_path / "text"), VOCABULARY, PermutationLM(12), 2, 30)[0]
    assert (batch.labels == -100).any() and (batch.labels >= 0).any()
    inputs = batch.inputs()
    elsewhere = torch.where(batch.labels < 0, torch.full_like(batch.target_positions, 7), batch.target_positions)
    moved = inputs | {"target_positions": elsewhere}
    torch.testing.assert_close(model(**moved).loss, model(**inputs).loss)


def test_memory_continues_the_text_up_to_where_its_context_begins(model, text):
    # six sequences with memory equal one pass over all their text; the document that begins with the first row's fourth
    # (token 72) sees nothing before it
    batches = PretrainingBatches(text, VOCABULARY, AutoregressiveLM(), 2, 24, pairs=False)
    parts = [batches[k] for k in range(6)]
    assert [part.context_len.tolist() for part in parts[:4]] == [[0, 0], [24, 24], [48, 48], [0, 72]]
    mems, logits = None, []
    for part in parts:
        output = model(**part.inputs(mems), use_mems=True)
        mems = output.mems
        logits.append(output.logits)
    assert mems[0].shape[0] == 6 * 24  # mem_len None keeps all
    found = torch.cat(logits, 1)
    ids, types = (torch.cat([getattr(part, name) for part in parts], 1) for name in ("input_ids", "token_type_ids"))
    for row, begin, end in ((0, 0, 72), (0, 72, 144), (1, 0, 144)):
        alone = ids[row : row + 1, begin:end]
        sees = torch.ones(end - begin, end - begin, dtype=torch.bool).tril()
        wanted = model(alone, token_type_ids=types[:1, begin:end], perm_mask=(~sees).double()[None]).logits
        torch.testing.assert_close(found[row, begin:end], wanted[0])


def test_only_running_text_is_remembered(model, text):
    batches = PretrainingBatches(text, VOCABULARY, PermutationLM(), 2, 30, 12)
    output = model(**batches[0].inputs(), use_mems=True)
    assert [tuple(mem.shape) for mem in output.mems] == [(12, 2, 16)] * 2
    assert torch.equal(output.mems[0].transpose(0, 1), model.transformer.word_embedding(batches[0].input_ids[:, :12]))
    # the same rows after no memory, hidden memory, and memory of their own context
    batch = batches[2]
    hidden = type(batch)(**{**vars(batch), "context_len": torch.tensor([0, 24])})
    alone, partly, whole = (
        model(**inputs).logits
        for inputs in (
            batch.inputs(),
            hidden.inputs(output.mems),
            batch.inputs(output.mems),
        )
    )
    torch.testing.assert_close(partly[0], alone[0])
    torch.testing.assert_close(partly[1], whole[1])
    assert not torch.allclose(whole[0], alone[0])


@pytest.mark.parametrize("objective", [PermutationLM(), AutoregressiveLM(), MaskedLM()])
def test_memory_tells_nothing_of_the_text_to_come(model, text, objective):
    # the segments after the running text are what the next sequence is about to predict
    inputs = PretrainingBatches(text, VOCABULARY, objective, 2, 30, 12)[0].inputs()
    changed = inputs | {"input_ids": F.pad(inputs["input_ids"][:, :12], (0, 18), value=3)}
    for found, wanted in zip(model(**changed, use_mems=True).mems, model(**inputs, use_mems=True).mems, strict=True):
        assert torch.equal(found, wanted)


@every_objective
def test_gradients_reach_the_model(model, text, objective):
    batch = PretrainingBatches(text, VOCABULARY, objective, 2, 30)[0]
    weight = model.transformer.layer[0].rel_attn.q
    (gradient,) = torch.autograd.grad(model(**batch.inputs()).loss, weight)
    assert gradient.abs().max() > 0


@pytest.mark.parametrize(
    "objective, ids, targets, text",
    [
        ("permutation", IDS, [[6]], r"targets must lie in \[0, 6\), got values from 6 to 6"),
        ("permutation", IDS, [[-1]], r"targets must lie in \[0, 6\)"),
        ("masked", IDS, [[2, 2]], r"targets must differ within a sequence, got \[\[2, 2\]\]"),
        ("autoregressive", IDS, [[0, 1]], "targets must have a token before them"),
        ("backward", IDS, [[5]], "targets must have a token after them"),
        ("masked", IDS, [[1], [2]], r"targets must have shape \(1, at least 1\), got \(2, 1\)"),
        ("masked", IDS, [[]], "targets must hold int32 or int64"),
        ("masked", IDS, [1], "targets must be a 2-dimensional tensor"),
        ("masked", IDS.double(), [[1]], "input_ids must hold int32 or int64, got torch.float64"),
    ],
)
def test_bad_targets_are_named(model, objective, ids, targets, text):
    with pytest.raises(ValueError, match=text):
        joint_log_prob(model, OBJECTIVES[objective], VOCABULARY, ids, torch.tensor(targets))
