"""accelerate and restore: a transformers XLNet computes the same with our attention, and is itself again afterwards."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import transformers
from torch import nn

import xlnet_kernels as xk
from tests.model.twins import B, L, M, N, assert_same, assert_same_outputs, make_inputs, make_mems, theirs
from xlnet_kernels import attention
from xlnet_kernels.integrations import adapter

accelerate, restore = xk.integrations.transformers.accelerate, xk.integrations.transformers.restore
pytestmark = pytest.mark.filterwarnings("ignore:xlnet_kernels", "ignore:.*deprecated")
EVERYTHING = ("mems", "hidden_states", "attentions")
LABELS = {
    "XLNetModel": {},
    "XLNetLMHeadModel": dict(labels=torch.arange(B * L).view(B, L)),
    "XLNetForSequenceClassification": dict(labels=torch.arange(B)),
    "XLNetForTokenClassification": dict(labels=torch.arange(B * L).view(B, L) % 2),
    "XLNetForMultipleChoice": dict(labels=torch.arange(B) % 2),
    "XLNetForQuestionAnsweringSimple": dict(start_positions=torch.arange(B), end_positions=torch.arange(B) + 2),
    "XLNetForQuestionAnswering": dict(start_positions=torch.arange(B), end_positions=torch.arange(B) + 2),
}


def pair(name: str = "XLNetLMHeadModel", backend: str | None = None, **options):
    """transformers' model, and a copy of it that is accelerated."""
    model = theirs(name, **options)
    return model, accelerate(copy.deepcopy(model), backend)


def gradients(model, loss) -> dict[str, torch.Tensor | None]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True))


def assert_same_gradients(found, wanted) -> None:
    """Relative to the largest element, and to one rounding of the largest of all: some are sums that cancel."""
    sizes = {name: gradient.abs().max().item() for name, gradient in wanted.items() if gradient is not None}
    rounding = torch.finfo(torch.float32).eps * max(sizes.values()) + 1e-7
    for name, gradient in wanted.items():
        assert (found[name] is None) == (gradient is None), name
        if gradient is not None:
            assert_same(found[name], gradient, 2e-5 * sizes[name] + rounding, name)


def fully_masked_inputs() -> dict[str, torch.Tensor]:
    """In both sequences the first target sees nothing; in one of them it is padding that hides the rest."""
    inputs = make_inputs()
    inputs["target_mapping"] = nn.functional.one_hot(torch.tensor([[2, 0, 5], [2, 4, 6]]), L).float()
    inputs["perm_mask"][:, 2] = 1
    inputs["perm_mask"][0, 2, 0] = 0
    return inputs


@pytest.mark.parametrize("given", ["content", "both streams", "fully masked rows", "soft mapping", "empty targets"])
@pytest.mark.parametrize("options", [{}, dict(bi_data=True, clamp_len=3, mem_len=8, reuse_len=4)], ids=str)
def test_outputs_memory_and_gradients_are_those_of_transformers(options, given, backend):
    model, fast = pair(backend=backend, **options)
    inputs = fully_masked_inputs() if given == "fully masked rows" else make_inputs()
    if given == "content":
        del inputs["perm_mask"], inputs["target_mapping"]
    elif given == "soft mapping":
        inputs["target_mapping"] = torch.rand(B, N, L)
    elif given == "empty targets":
        inputs["target_mapping"][:, 1] = 0
    for memory in (None, make_mems(model)):
        calls = [x(**inputs, mems=memory, output_hidden_states=True) for x in (model, fast)]
        assert_same_outputs(calls[1], calls[0], ("logits", *EVERYTHING))
        weights = torch.randn_like(calls[0].logits)
        wanted, found = (gradients(x, (y.logits * weights).sum()) for x, y in zip((model, fast), calls, strict=True))
        assert_same_gradients(found, wanted)


@pytest.mark.parametrize("options", [dict(), dict(same_length=True), dict(clamp_len=2)], ids=str)
@pytest.mark.parametrize("memory", [0, M])
def test_unidirectional_model_one_sequence_at_a_time(options, memory):
    """transformers refuses masks of a unidirectional batch; accelerated it takes them."""
    model, fast = pair(attn_type="uni", **options)
    inputs = fully_masked_inputs() | dict(mems=make_mems(model, memory) if memory else None)
    found = fast(**inputs, output_attentions=True)
    for b in range(B):
        one = {name: x[b : b + 1] for name, x in inputs.items() if name != "mems"}
        one["mems"] = None if not memory else [x[:, b : b + 1] for x in inputs["mems"]]
        wanted = model(**one, output_attentions=True)
        assert_same(found.logits[b : b + 1], wanted.logits)
        assert_same([[y[b : b + 1] for y in x] for x in found.attentions], wanted.attentions)
        both = (gradients(x, x(**one).logits.square().sum()) for x in (fast, model))
        # Keys ahead of a fully masked row get the position scores of other rows in transformers.
        assert_same_gradients(
            *({n: x for n, x in grads.items() if not n.endswith((".r", "r_r_bias"))} for grads in both)
        )
    with pytest.raises(RuntimeError):
        model(**inputs)


def test_float64_agrees_to_its_precision():
    model, fast = pair(attn_type="uni", clamp_len=4)
    ids, mems = make_inputs()["input_ids"], [x.double() for x in make_mems(model)]
    wanted, found = (x.double()(ids, mems=mems) for x in (model, fast))
    assert_same_outputs(found, wanted, ("logits", "mems"), atol=1e-11)


@pytest.mark.parametrize("given", ["content", "fully masked rows", "soft mapping"])
def test_attention_maps(given):
    model, fast = pair()
    inputs = fully_masked_inputs()
    if given == "content":
        del inputs["target_mapping"]
    elif given == "soft mapping":
        inputs["target_mapping"] = torch.rand(B, N, L)
    wanted, found = (x(**inputs, output_attentions=True, output_hidden_states=True) for x in (model, fast))
    assert_same_outputs(found, wanted, ("logits", *EVERYTHING))


@pytest.mark.parametrize("name", LABELS)
def test_every_head(name):
    model, fast = pair(name)
    inputs = make_inputs()
    for unwanted in ("perm_mask", "target_mapping"):
        del inputs[unwanted]
    if name == "XLNetForMultipleChoice":
        inputs = {key: torch.stack([x, x.flip(0)], 1) for key, x in inputs.items()}
    wanted, found = (x(**inputs, **LABELS[name]).to_tuple() for x in (model, fast))
    assert_same(found, wanted)
    assert_same_gradients(gradients(fast, found[0].sum()), gradients(model, wanted[0].sum()))
    assert_same(fast(**inputs, return_dict=False), model(**inputs, return_dict=False))


def test_embeddings_instead_of_ids_and_memory_without_asking():
    model, fast = pair("XLNetModel")
    inputs = make_inputs()
    inputs["inputs_embeds"] = torch.randn(*inputs.pop("input_ids").shape, 32)
    inputs["input_mask"] = 1 - inputs.pop("attention_mask")
    mems = make_mems(model)
    for use_mems in (True, False):
        wanted, found = (x(**inputs, mems=mems, use_mems=use_mems) for x in (model, fast))
        assert_same_outputs(found, wanted, ("last_hidden_state", "mems"))


def test_every_layer_calls_the_operator_for_the_predicted_rows_alone(monkeypatch, backend):
    calls = []

    def counted(query, key, *others, **options):
        calls.append((query.shape[2], type(options["mask"]), options["backend"]))
        return xk.rel_attention(query, key, *others, **options)

    monkeypatch.setattr(attention, "rel_attention", counted)
    model, fast = pair(backend=backend)
    inputs = make_inputs()
    model(**inputs)
    assert not calls
    fast(**inputs)
    fast(**inputs | dict(target_mapping=torch.rand(B, N, L)))
    fast(inputs["input_ids"], inputs["attention_mask"])  # no L x L mask is made where none is given
    wanted = [(L + N, torch.Tensor, backend), (L + L, torch.Tensor, backend), (L, xk.RankMask, backend)]
    wanted = [call for call in wanted for _ in fast.transformer.layer]
    wanted[1] = (N, torch.Tensor, backend)  # the last layer's content rows are not read
    assert calls == wanted


@pytest.mark.parametrize("given", ["", "fully masked rows", "empty targets"])
@pytest.mark.parametrize("memory", [0, M])
def test_the_last_layer_without_content_rows_changes_nothing(given, memory, backend):
    model, fast = pair(backend=backend)
    inputs = fully_masked_inputs() if given == "fully masked rows" else make_inputs()
    if given == "empty targets":
        inputs["target_mapping"][:, 1] = 0
    inputs["mems"] = make_mems(model, memory) if memory else None
    calls = [x(**inputs) for x in (model, fast)]
    assert_same_outputs(calls[1], calls[0], ("logits", "mems"))
    weights = torch.randn_like(calls[0].logits)
    wanted, found = (gradients(x, (y.logits * weights).sum()) for x, y in zip((model, fast), calls, strict=True))
    assert_same_gradients(found, wanted)


@pytest.mark.parametrize("how", [dict(), dict(num_beams=3), dict(do_sample=True, use_mems=True)], ids=str)
def test_generate(how):
    model, fast = pair()
    texts = []
    for x in (model, fast):
        torch.manual_seed(3)
        texts.append(x.generate(torch.arange(8).view(2, 4), max_new_tokens=5, **how))
    assert torch.equal(*texts)


def test_training_gives_the_same_losses():
    model, fast = pair()
    inputs, losses = make_inputs(), []
    labels = inputs["input_ids"].gather(1, inputs["target_mapping"].argmax(-1))
    for x in (model, fast):
        optimizer = torch.optim.AdamW(x.train().parameters(), 1e-3)
        for _ in range(5):
            optimizer.zero_grad()
            losses.append(x(**inputs, labels=labels).loss)
            losses[-1].backward()
            optimizer.step()
    assert losses[4] < losses[0]
    assert_same(losses[5:], losses[:5], 1e-3)


def test_trainer(tmp_path):
    pytest.importorskip("accelerate")
    data = [dict(input_ids=torch.randint(50, (L,)), labels=torch.tensor(i % 2)) for i in range(8)]
    losses = []
    for x in pair("XLNetForSequenceClassification"):
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=4, logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, save_steps=4
        )
        trainer = transformers.Trainer(x, arguments, train_dataset=data)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(losses[0]) == 4
    assert losses[1] == pytest.approx(losses[0], abs=1e-3)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing(use_reentrant):
    """Dropout falls on the same elements when a layer is computed again."""
    model, fast = pair(dropout=0.3)
    inputs = fully_masked_inputs()
    with pytest.raises(ValueError, match="checkpointing"):
        model.gradient_checkpointing_enable()
    torch.manual_seed(1)
    expected = gradients(fast.train(), fast(**inputs).logits.square().sum())
    fast.gradient_checkpointing_enable(dict(use_reentrant=use_reentrant))
    calls = []
    fast.transformer.layer[0].ff.register_forward_hook(lambda *_: calls.append(1))
    torch.manual_seed(1)
    fast(**inputs).logits.square().sum().backward()
    assert len(calls) > 2  # one for each stream, and again in the backward pass
    assert_same_gradients({name: x.grad for name, x in fast.named_parameters()}, expected)
    restore(fast)
    assert not fast.is_gradient_checkpointing
    assert not any("gradient_checkpointing" in vars(x) for x in fast.modules())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", ["to", "from_pretrained", "autocast"])
def test_two_streams_in_16_bits(how, dtype, tmp_path):
    """from_pretrained(dtype=...) leaves bare parameters in 32 bits."""
    model, fast = pair()
    if how == "to":
        fast = fast.to(dtype)
    elif how == "from_pretrained":
        fast.save_pretrained(tmp_path)
        fast = accelerate(type(model).from_pretrained(tmp_path, dtype=dtype))
        assert fast.transformer.mask_emb.dtype != fast.lm_loss.weight.dtype == dtype
    for inputs in (make_inputs(), fully_masked_inputs()):
        wanted = model(**inputs).logits
        with torch.autocast("cpu", dtype, enabled=how == "autocast"):
            found = fast(**inputs).logits
        assert found.dtype == dtype
        assert (found - wanted).norm() < 0.03 * wanted.norm()  # measured 0.011 and 0.0015
    found.float().square().mean().backward()
    assert all(x.grad.isfinite().all() for x in fast.parameters() if x.grad is not None)


def test_bool_masks():
    model, fast = pair()
    inputs = fully_masked_inputs()
    changed = {name: inputs[name].bool() for name in ("attention_mask", "perm_mask", "target_mapping")}
    assert_same(fast(**inputs | changed).logits, model(**inputs).logits)


def test_compiled_in_one_graph():
    _, fast = pair("XLNetModel", n_layer=1)
    inputs = fully_masked_inputs()
    found = torch.compile(fast, backend="eager", fullgraph=True)(**inputs)
    assert_same_outputs(found, fast(**inputs), ("last_hidden_state",))


def test_what_the_operator_cannot_say_is_left_to_transformers():
    """Targets beyond the text, and attention layers called with masks of their own."""
    model, fast = pair("XLNetModel")
    ids = make_inputs()["input_ids"]
    mapping = nn.functional.one_hot(torch.tensor([[L], [L]]), L + 1).float()
    wanted, found = (x(ids, target_mapping=mapping).last_hidden_state for x in (model, fast))
    assert_same(found, wanted, 0)
    h, r = torch.randn(L, B, 32), torch.randn(2 * L, B, 32)
    wanted, found = (x.layer[0].rel_attn(h, None, None, None, r, None)[0] for x in (model, fast))
    assert_same(found, wanted, 0)


def test_what_costs_more_is_said_once():
    _, fast = pair()
    inputs = make_inputs() | dict(target_mapping=torch.rand(B, N, L))
    adapter._warn.cache_clear()
    with pytest.warns(UserWarning, match="one-hot"):
        fast(**inputs)
    with pytest.warns(UserWarning, match="reference backend"):
        fast(**inputs, output_attentions=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast(**inputs)
        fast(**inputs, output_attentions=True)


@pytest.mark.parametrize(
    "change, text",
    [
        (dict(input_ids=None), "neither"),
        (dict(inputs_embeds=torch.zeros(B, L, 32)), "both"),
        (dict(input_mask=torch.zeros(B, L)), "attention_mask .* and input_mask"),
        (dict(attention_mask=torch.ones(B, L + 1)), r"attention_mask must be a tensor of shape \(2, 7\)"),
        (dict(perm_mask=torch.zeros(B, L)), "perm_mask must be a tensor of shape"),
        (dict(target_mapping=torch.zeros(B + 1, N, L)), "target_mapping must be a tensor of shape"),
        (dict(token_type_ids=torch.zeros(B, L)), "token_type_ids must hold integers"),
    ],
    ids=str,
)
def test_wrong_inputs_are_refused(change, text):
    _, fast = pair(bi_data=True)
    with pytest.raises(ValueError, match=text):
        fast(**make_inputs() | change)
    with pytest.raises(ValueError, match="bi_data needs an even batch"):
        fast(**make_inputs(batch=3))
