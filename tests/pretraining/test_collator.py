"""Batches for Trainer: what they hold, that both forms say the same, what transformers' collator does otherwise."""

from __future__ import annotations

import pytest
import torch

import xlnet_kernels as xk
from xlnet_kernels.pretraining import (
    AutoregressiveLM,
    DataCollatorForPermutationLM,
    MaskedLM,
    PermutationLM,
    Vocabulary,
)

VOCABULARY = Vocabulary(size=50, sep=4, cls=3, pad=5, mask=6, others=(0, 1, 2))
SIZES = dict(vocab_size=50, d_model=32, n_layer=2, n_head=4, d_inner=64, dropout=0.0, use_mems_eval=False)


def rows() -> list[dict]:
    """Two pairs with SEP and CLS, of 24 and 13 tokens."""
    found = []
    for size in (24, 13):
        text = torch.randint(7, 50, (size,))
        text[[size // 2, size - 2, size - 1]] = torch.tensor([4, 4, 3])
        types = torch.tensor([0] * (size // 2 + 1) + [1] * (size - size // 2 - 2) + [2])
        found.append({"input_ids": text, "token_type_ids": types})
    return found


def test_a_batch_holds_targets_and_hides_padding():
    data = rows()
    batch = DataCollatorForPermutationLM(VOCABULARY, PermutationLM(num_predict=6))(data)
    ids, targets, labels = batch["input_ids"], batch["target_positions"], batch["labels"]
    assert ids[1].tolist() == [5] * 11 + data[1]["input_ids"].tolist()
    assert batch["token_type_ids"][1].tolist() == [3] * 11 + data[1]["token_type_ids"].tolist()
    assert torch.equal(ids.gather(1, targets), labels) and not torch.isin(labels, torch.arange(7)).any()
    assert all(len(set(row)) == 6 for row in targets.tolist())
    seen = batch["mask"].to_bool(stream="content")
    own = torch.eye(24, dtype=torch.bool)
    assert not (seen[1] & ~own)[:, :11].any() and (seen[0].sum(0) == 24).sum() >= 24 - 6 - 3
    # as many targets as there are tokens of text, and no label for the rest
    short = DataCollatorForPermutationLM(VOCABULARY, PermutationLM(num_predict=12))(data)["labels"]
    assert (short >= 0).sum(1).tolist() == [12, 10]


@pytest.mark.parametrize("objective", [PermutationLM(), MaskedLM()])
def test_targets_are_of_the_own_length(objective):
    """A sixth of each row, whatever it is beside."""
    batch = DataCollatorForPermutationLM(VOCABULARY, objective)([[7 + i % 40 for i in range(n)] for n in (80, 14, 8)])
    labels = batch["labels"]
    assert (labels >= 0).sum(1).tolist() == [80 // 6, 14 // 6, 8 // 6]
    places = batch["target_positions" if isinstance(objective, PermutationLM) else "output_rows"]
    text = torch.tensor([[7 + (i - 80 + n) % 40 for i in range(80)] for n in (80, 14, 8)])
    assert torch.equal(text.gather(1, places)[labels >= 0], labels[labels >= 0])


def test_a_short_row_keeps_context():
    """Also where `num_predict` asks for more targets than it has tokens."""
    collator = DataCollatorForPermutationLM(VOCABULARY, PermutationLM(num_predict=10))
    labels = collator([list(range(7, 31)), list(range(7, 13))])["labels"]
    assert (labels >= 0).sum(1).tolist() == [10, 5]


def test_rows_of_the_mapping_without_a_target_are_zeros():
    """So that an accelerated XLNet computes the targets' rows alone."""
    collator = DataCollatorForPermutationLM(VOCABULARY, PermutationLM(num_predict=12), dense=True)
    batch = collator(rows())
    assert (batch["labels"][1] < 0).sum() == 2
    assert torch.equal(batch["target_mapping"].sum(-1), (batch["labels"] >= 0).float())
    assert batch["target_mapping"].sum(-2).max() == 1


def test_torchs_generator_decides_what_is_random():
    collator, data, found = DataCollatorForPermutationLM(VOCABULARY), rows(), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(collator(data)["target_positions"])
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


@pytest.mark.parametrize("objective", [AutoregressiveLM(), MaskedLM()])
def test_other_objectives(objective):
    batch = DataCollatorForPermutationLM(VOCABULARY, objective)(rows())
    lm = xk.XLNetLMHeadModel(xk.XLNetConfig(**SIZES))
    assert lm(**batch).loss > 0 and batch["labels"].shape == (2, 24 if isinstance(objective, AutoregressiveLM) else 4)


def test_both_forms_say_the_same():
    """Our model with ranks, transformers' accelerated one and its own with maps: the same losses."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.XLNetLMHeadModel(transformers.XLNetConfig(**SIZES)).eval()
    ours = xk.XLNetLMHeadModel(xk.XLNetConfig(**SIZES)).eval()
    ours.load_state_dict(theirs.state_dict())
    data, batches = rows(), []
    for dense in (False, True):
        torch.manual_seed(3)
        batches.append(DataCollatorForPermutationLM(VOCABULARY, dense=dense)(data))
    wanted = ours(**batches[0]).loss
    assert torch.equal(batches[0]["labels"], batches[1]["labels"])
    torch.testing.assert_close(ours(**batches[1]).loss, wanted)
    torch.testing.assert_close(theirs(**batches[1]).loss, wanted, rtol=1e-4, atol=1e-5)
    xk.integrations.transformers.accelerate(theirs)
    torch.testing.assert_close(theirs(**batches[1]).loss, wanted, rtol=1e-4, atol=1e-5)


def test_what_transformers_collator_does_otherwise():
    """The deviations that the docstring lists, on its own batches."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    names = ["<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", *map(str, range(7, 50))]
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({name: i for i, name in enumerate(names)}, "<unk>"))
    roles = {f"{role}_token": f"<{role}>" for role in ("unk", "cls", "sep", "pad", "mask")}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=model, **roles)
    theirs = transformers.DataCollatorForPermutationLanguageModeling(tokenizer)
    data = [row["input_ids"] for row in rows()]
    batch = theirs([{"input_ids": row} for row in data])
    target = batch["labels"] >= 0
    # the targets' tokens are not in the input at all: none can see another one's
    assert target.any() and (batch["input_ids"][target] == VOCABULARY.mask).all()
    # SEP and CLS are visible to all, and see targets
    functional = torch.isin(batch["input_ids"], torch.tensor([VOCABULARY.sep, VOCABULARY.cls]))
    assert not batch["perm_mask"].transpose(1, 2)[functional].any()
    # so is padding, which nothing else hides
    padding = batch["input_ids"] == VOCABULARY.pad
    assert padding.any() and not batch["perm_mask"].transpose(1, 2)[padding].any() and "attention_mask" not in batch
    # a query row for each token
    assert torch.equal(batch["target_mapping"], torch.eye(24).expand(2, -1, -1))
    with pytest.raises(ValueError, match="be even"):
        theirs([{"input_ids": row[:13]} for row in data])

    ours = DataCollatorForPermutationLM(VOCABULARY, PermutationLM(num_predict=8))(rows())
    assert (ours["labels"] >= 0).all() and ours["target_positions"].shape == (2, 8)
    assert torch.equal(ours["input_ids"].gather(1, ours["target_positions"]), ours["labels"])
    # of two targets the later one sees the earlier one
    seen = ours["mask"].to_bool(stream="query")[0][ours["target_positions"][0]][:, ours["target_positions"][0]]
    assert torch.equal(seen | seen.T | torch.eye(8, dtype=torch.bool), torch.ones(8, 8, dtype=torch.bool))
    # and SEP and CLS are hidden from all tokens before them
    marks = torch.isin(ours["input_ids"][0], torch.tensor([VOCABULARY.sep, VOCABULARY.cls]))
    content = ours["mask"].to_bool(stream="query")[0]
    context = ~marks & ~torch.zeros(24, dtype=torch.bool).scatter(0, ours["target_positions"][0], True)
    assert not content[context][:, marks].any()


def test_trainer(tmp_path):
    """One curve from our model and transformers', accelerated or not; fed by `datasets` where it is there."""
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    state = transformers.XLNetLMHeadModel(transformers.XLNetConfig(**SIZES)).state_dict()
    data = [{"input_ids": [7 + 4 * (i % 9) + k % 4 for k in range(24)]} for i in range(32)]
    try:
        import datasets
    except ImportError:
        pass
    else:
        data = datasets.Dataset.from_list(data)
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=12,
        learning_rate=1e-2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=12,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        prediction_loss_only=True,
        seed=7,
    )
    curves = {}
    for kind in ("ours", "accelerated", "theirs"):
        own = kind == "ours"
        model = xk.XLNetLMHeadModel(xk.XLNetConfig(**SIZES)) if own else None
        model = model or transformers.XLNetLMHeadModel(transformers.XLNetConfig(**SIZES))
        model.load_state_dict(state)
        if kind == "accelerated":
            xk.integrations.transformers.accelerate(model)
        collator = DataCollatorForPermutationLM(VOCABULARY, dense=not own)
        trainer = transformers.Trainer(model, arguments, data_collator=collator, train_dataset=data, eval_dataset=data)
        trainer.train()
        history = trainer.state.log_history
        curves[kind] = [entry["loss"] for entry in history if "loss" in entry]
        assert len(curves[kind]) == 12 and sum("eval_loss" in entry for entry in history) == 1
        if own:
            model.save_pretrained(tmp_path / "saved")
    assert curves["ours"][-1] < curves["ours"][0] - 0.5
    assert curves["accelerated"] == pytest.approx(curves["theirs"], abs=1e-2)
    assert curves["ours"] == pytest.approx(curves["theirs"], abs=1e-2)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert not torch.equal(back["lm_loss.bias"], state["lm_loss.bias"])


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: DataCollatorForPermutationLM(VOCABULARY)([[]]), r"features\[0\] must be at least one integer"),
        (lambda: DataCollatorForPermutationLM(VOCABULARY)([[7], [50]]), r"features\[1\] .* in \[0, 50\)"),
        (lambda: DataCollatorForPermutationLM(VOCABULARY)([[0.5, 1.5]]), r"features\[0\] must be at least one integer"),
        (
            lambda: DataCollatorForPermutationLM(VOCABULARY)([{"input_ids": [7, 8], "token_type_ids": [0]}]),
            r"features\[0\] must have a token type for each of 2 ids",
        ),
        (lambda: DataCollatorForPermutationLM(VOCABULARY)([]), "features must hold at least one row"),
        (
            lambda: DataCollatorForPermutationLM(VOCABULARY)([[7]]),
            r"features\[0\] has one token: PermutationLM predicts a token from others",
        ),
        (lambda: DataCollatorForPermutationLM(VOCABULARY, MaskedLM(), dense=True), "dense is for PermutationLM"),
    ],
)
def test_what_does_not_fit_is_named(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("objective", [PermutationLM(), MaskedLM()])
def test_a_row_of_one_token_is_named(objective):
    with pytest.raises(ValueError, match=r"features\[1\] has one token: .*LM predicts a token from others"):
        DataCollatorForPermutationLM(VOCABULARY, objective)([[10, 11, 12], [10]])


def test_special_tokens_alone_cost_nothing():
    """A batch without targets has a loss of 0 and gradients of 0, so that training goes on."""
    batch = DataCollatorForPermutationLM(VOCABULARY)([[VOCABULARY.cls, VOCABULARY.sep] * 3])
    model = xk.XLNetLMHeadModel(xk.XLNetConfig(vocab_size=VOCABULARY.size, d_model=8, n_layer=1, n_head=2, d_inner=8))
    loss = model(**batch).loss
    loss.backward()
    assert loss == 0 and not any(p.grad.any() for p in model.parameters() if p.grad is not None)
