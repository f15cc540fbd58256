"""Every head against transformers: logits, losses and gradients; and where transformers' are wrong."""

from __future__ import annotations

import pytest
import torch

from tests.model.twins import B, L, N, assert_same, make_inputs, make_mems, ours, twins

FULL = dict(output_hidden_states=True, output_attentions=True)


def _compare(pair, inputs, **labels):
    """Equal outputs, loss and gradients."""
    theirs, model = pair
    theirs.zero_grad()
    model.zero_grad()
    mems = make_mems(model, batch=inputs["input_ids"].numel() // L)
    wanted, found = theirs(**inputs, **labels, mems=mems, **FULL), model(**inputs, **labels, mems=mems, **FULL)
    for name in wanted:
        assert_same(getattr(found, name), getattr(wanted, name), 1e-4, name)
    short = model(**inputs, **labels, mems=mems)  # the last layer computes what the head reads
    for name in ("loss", "logits", "mems"):
        if hasattr(found, name):
            assert_same(getattr(short, name), getattr(found, name), 1e-4, name)
    gradients = torch.autograd.grad(short.loss, tuple(model.parameters()), allow_unused=True)
    for output in (wanted, found):
        output.loss.backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        if gradient is not None:
            assert_same(gradient, parameter.grad, 1e-4 * (1 + gradient.abs().max().item()))
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    for name, parameter in model.named_parameters():
        if gradients[name] is None:
            assert parameter.grad is None or not parameter.grad.any()
        else:
            assert_same(parameter.grad, gradients[name], 1e-4 * (1 + gradients[name].abs().max().item()), name)
    return found


def _content(*names: str):
    inputs = make_inputs()
    return {name: inputs[name] for name in ("input_ids", "attention_mask", "token_type_ids", *names)}


@pytest.mark.parametrize("tie", [True, False])
def test_language_model(tie):
    labels = torch.randint(50, (B, N))
    labels[0, 1] = -100
    found = _compare(twins("XLNetLMHeadModel", tie_word_embeddings=tie), make_inputs(), labels=labels)
    assert found.logits.shape == (B, N, 50)
    labels = torch.randint(50, (B, L))
    _compare(twins("XLNetLMHeadModel", tie_word_embeddings=tie), _content(), labels=labels)


def test_token_classification():
    labels = torch.randint(3, (B, L))
    labels[1, 2] = -100
    found = _compare(twins("XLNetForTokenClassification", num_labels=3), _content(), labels=labels)
    assert found.logits.shape == (B, L, 3)


@pytest.mark.parametrize("summary_type", ["last", "first", "mean"])
@pytest.mark.parametrize("summary_use_proj", [True, False])
def test_sequence_summary(summary_type, summary_use_proj):
    options = dict(summary_type=summary_type, summary_use_proj=summary_use_proj)
    _compare(twins("XLNetForSequenceClassification", **options), _content(), labels=torch.tensor([1, 0]))


@pytest.mark.parametrize("problem", ["regression", "single", "multi", "regression-multi"])
def test_sequence_classification(problem):
    if problem == "regression":
        pair, labels = twins("XLNetForSequenceClassification", num_labels=1), torch.randn(B)
    elif problem == "single":
        pair, labels = twins("XLNetForSequenceClassification", num_labels=3), torch.tensor([2, 0])
    elif problem == "multi":
        pair, labels = twins("XLNetForSequenceClassification", num_labels=3), torch.rand(B, 3)
    else:
        options = dict(num_labels=3, problem_type="regression")
        pair, labels = twins("XLNetForSequenceClassification", **options), torch.randn(B, 3)
    _compare(pair, _content(), labels=labels)
    assert pair[1].config.problem_type == ("regression" if "-" in problem else None)  # a call changes no configuration


def test_multiple_choice():
    choices = 3
    inputs = {name: torch.stack([x] * choices, 1) for name, x in _content().items()}
    inputs["input_ids"] = torch.randint(50, (B, choices, L))
    found = _compare(twins("XLNetForMultipleChoice"), inputs, labels=torch.tensor([2, 0]))
    assert found.logits.shape == (B, choices)
    model = ours("XLNetForMultipleChoice")
    embedded = model.transformer.word_embedding(inputs["input_ids"])
    assert_same(model(inputs_embeds=embedded).logits, model(inputs["input_ids"]).logits)


def test_simple_question_answering():
    positions = dict(start_positions=torch.tensor([1, L + 3]), end_positions=torch.tensor([4, L]))
    _compare(twins("XLNetForQuestionAnsweringSimple"), _content(), **positions)  # answers cut off do not count


def test_question_answering_loss():
    answers = dict(start_positions=torch.tensor([1, 3]), end_positions=torch.tensor([2, 5]))
    p_mask = torch.zeros(B, L)
    p_mask[:, 0] = 1
    pair = twins("XLNetForQuestionAnswering")
    _compare(pair, _content(), **answers)
    cls = dict(cls_index=torch.tensor([0, L - 1]), is_impossible=torch.tensor([0.0, 1.0]))
    found = _compare(pair, _content(), **answers, **cls, p_mask=p_mask)
    # whole numbers and a further dimension do as well
    answers = {name: x[:, None] for name, x in (answers | cls).items()} | dict(is_impossible=torch.tensor([0, 1]))
    again = pair[1](**_content() | {"input_ids": torch.zeros(B, L).long()}, **answers, p_mask=p_mask.bool())
    assert again.loss.isfinite() and found.loss.isfinite()


@pytest.mark.parametrize("masked", [False, True])
def test_question_answering_beam(masked):
    theirs, model = twins("XLNetForQuestionAnswering", start_n_top=3, end_n_top=2)
    given = dict(cls_index=torch.tensor([0, L - 1]))
    if masked:
        given["p_mask"] = torch.zeros(B, L)
        given["p_mask"][:, 0] = 1
    inputs = _content()
    with torch.no_grad():
        wanted, found = theirs(**inputs, **given), model(**inputs, **given)
    for name in ("start_top_index", "end_top_index"):
        assert torch.equal(getattr(found, name), getattr(wanted, name))
    for name in ("start_top_log_probs", "end_top_log_probs"):  # theirs are probabilities
        assert_same(getattr(found, name), getattr(wanted, name).log(), 1e-4)
    assert_same(found.cls_logits, wanted.cls_logits)
    assert found.loss is None and found.end_top_index.shape == (B, 6)


def test_question_answering_of_short_sequences():
    found = ours("XLNetForQuestionAnswering")(torch.randint(50, (B, 3)))  # shorter than the beam of 5
    assert found.start_top_index.shape == (B, 3) and found.end_top_index.shape == (B, 9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_masked_positions_never_answer_in_half_precision(dtype):
    model = ours("XLNetForQuestionAnswering").to(dtype)
    p_mask = torch.ones(B, L)
    p_mask[:, 2] = 0
    found = model(torch.randint(50, (B, L)), p_mask=p_mask)
    assert (found.start_top_index[:, 0] == 2).all() and (found.end_top_index[:, 0] == 2).all()
    assert not found.start_top_log_probs.isnan().any() and not found.cls_logits.isnan().any()


@pytest.mark.parametrize(
    "name, arguments, text",
    [
        ("XLNetLMHeadModel", dict(labels=torch.zeros(B, N).long()), r"labels must be a tensor of shape \(2, 7\), got"),
        ("XLNetLMHeadModel", dict(labels=torch.full((B, L), 50)), r"labels .* must lie in \[0, 50\), got .* 50 to 50"),
        ("XLNetLMHeadModel", dict(labels=torch.full((B, L), -1)), r"labels .* must lie in \[0, 50\), got .* -1 to -1"),
        ("XLNetLMHeadModel", dict(labels=torch.zeros(B, L)), "labels must hold integers, got torch.float32"),
        ("XLNetForTokenClassification", dict(labels=torch.full((B, L), 2)), r"labels .* must lie in \[0, 2\)"),
        ("XLNetForSequenceClassification", dict(labels=torch.tensor([0, 2])), r"labels .* must lie in \[0, 2\)"),
        (
            "XLNetForSequenceClassification",
            dict(labels=torch.rand(B, 3)),
            r"labels must be .* \(2, 2\), got .* \(2, 3\)",
        ),
        (
            "XLNetForQuestionAnsweringSimple",
            dict(start_positions=torch.tensor([-1, 0]), end_positions=torch.tensor([0, 0])),
            "start_positions must lie in",
        ),
        (
            "XLNetForQuestionAnswering",
            dict(start_positions=torch.tensor([0, 7]), end_positions=torch.tensor([0, 0])),
            r"start_positions must lie in \[0, 7\), got values from 0 to 7",
        ),
        ("XLNetForQuestionAnswering", dict(cls_index=torch.tensor([0.0, 1.0])), "cls_index must hold integers"),
        ("XLNetForQuestionAnswering", dict(p_mask=torch.zeros(B, 3)), r"p_mask must be a tensor of shape \(2, 7\)"),
        ("XLNetForMultipleChoice", dict(), r"input_ids must be \(B, C, L\), or inputs_embeds .*, got shape \(2, 7\)"),
    ],
)
def test_bad_input_is_named(name, arguments, text):
    with pytest.raises(ValueError, match=text):
        ours(name)(torch.zeros(B, L).long(), **arguments)


def test_multiple_choice_names_what_lacks_the_choices():
    with pytest.raises(ValueError, match=r"attention_mask must start with \(B, C\) = \(2, 3\), got shape \(2, 7\)"):
        ours("XLNetForMultipleChoice")(torch.zeros(B, 3, L).long(), attention_mask=torch.ones(B, L))
