"""transformers' Trainer with our models: it drops the same columns, and predictions are those of its own models."""

from __future__ import annotations

import re

import pytest
import torch
import transformers

from tests import ROOT
from tests.model.twins import assert_same, ours, twins

pytestmark = pytest.mark.filterwarnings("ignore")
LABELS = {
    "XLNetForSequenceClassification": lambda i, ids: dict(labels=i % 3),
    "XLNetForTokenClassification": lambda i, ids: dict(labels=[i % 3] * 9),
    "XLNetLMHeadModel": lambda i, ids: dict(labels=ids),
    "XLNetForQuestionAnsweringSimple": lambda i, ids: dict(start_positions=1, end_positions=2),
    "XLNetForQuestionAnswering": lambda i, ids: dict(start_positions=1, end_positions=2),
}


def rows(name: str) -> list[dict]:
    """Six texts of 9 tokens, the first two of them padding in some, with a column that is no argument."""
    data = []
    for i, ids in enumerate(torch.randint(7, 50, (6, 9)).tolist()):
        mask = [i % 2, 1, 1, 1, 1, 1, 1, 1, 1]
        data.append(dict(input_ids=ids, attention_mask=mask, token_type_ids=[0] * 9, text="a") | LABELS[name](i, ids))
    return data


def shapes(x) -> object:
    return [shapes(y) for y in x] if isinstance(x, (tuple, list)) else x.shape


def make_trainer(model, data: list[dict], folder, seen: list, make=transformers.Trainer, **options):
    """Memory is returned in evaluation, and must not be among the predictions."""
    options = dict(report_to=[], use_cpu=True, disable_tqdm=True, per_device_eval_batch_size=4) | options
    arguments = transformers.TrainingArguments(str(folder), **options)

    def count(predictions) -> dict:
        seen.append(predictions)
        return {"count": len(predictions.predictions)}

    return make(model, arguments, train_dataset=data, eval_dataset=data, compute_metrics=count)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("name", LABELS)
def test_training_evaluation_and_prediction(name, smoothing, tmp_path, one_thread):
    if smoothing and "Question" in name:
        pytest.skip("Trainer smooths labels of one kind, and answers have two")
    data, found = rows(name), []
    for model in twins(name, num_labels=2 if "Question" in name else 3):
        seen: list = []
        trainer = make_trainer(
            model, data, tmp_path, seen, max_steps=2, save_strategy="no", label_smoothing_factor=smoothing
        )
        trainer.train()
        metrics, predicted = trainer.evaluate(), trainer.predict(data)
        assert len(seen) == 2 and metrics["eval_count"] == len(predicted.predictions)
        found.append((metrics["eval_loss"], shapes(predicted.predictions), shapes(predicted.label_ids)))
    wanted, own = found
    # Trainer shifts labels that it smooths for language models; of theirs it also counts the label that drops out.
    share = 8 / 9 if smoothing and "LMHead" in name else 1
    assert own[0] * share == pytest.approx(wanted[0], rel=1e-4) and own[1:] == wanted[1:]


def test_tied_models_are_saved_and_resumed_as_the_page_says(tmp_path, one_thread):
    page = (ROOT / "docs/how-to/model.md").read_text()
    (recipe,) = re.findall(r"```python\n(import transformers\n.*?)```", page, re.DOTALL)
    names: dict = {}
    exec(recipe, names)
    data, weights = rows("XLNetLMHeadModel"), []
    start = ours("XLNetLMHeadModel").state_dict()
    for resume in (False, True):
        model = ours("XLNetLMHeadModel")
        model.load_state_dict(start)
        trainer = make_trainer(model, data, tmp_path, [], names["XLNetTrainer"], max_steps=4, save_steps=2)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2") if resume else None)
        assert trainer.state.global_step == 4
        weights.append(model.transformer.word_embedding.weight)
        assert model.lm_loss.weight is weights[-1]
    assert_same(weights[1], weights[0], 1e-5)
    saved = type(model).from_pretrained(tmp_path / "checkpoint-4")
    assert_same(saved.lm_loss.weight, weights[1])
