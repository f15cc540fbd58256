"""Generation and filling in: cached steps equal full passes, prompts stay among themselves, draws can be repeated."""

from __future__ import annotations

import pytest
import torch

import xlnet_kernels as xk
from tests.model.twins import assert_same, ours

VOCABULARY = 50  # of model_cases
PROMPTS = [[7, 3, 9, 12, 40], [11], [5, 6, 7]]
GREEDY = dict(temperature=0, eos_token_id=())


@pytest.fixture(autouse=True)
def one_thread():
    """Steps are tiny: waking threads costs ten times the work where cores are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def lm():
    torch.manual_seed(0)
    return ours("XLNetLMHeadModel", eos_token_id=2, pad_token_id=5)


def recorded(model, call):
    """The result of `call`, and the logits (B, N, vocabulary) of each of its steps."""
    steps = []
    hook = model.lm_loss.register_forward_hook(lambda module, inputs, output: steps.append(output))
    result = call()
    hook.remove()
    return result, steps


def _full_pass(model, text, prompt_len, stream, causal):
    """Logits of the tokens behind the prompt, all in one call."""
    ids, length = text[None], len(text)
    mask = xk.RankMask.causal(1, length)
    if stream == "content":
        return model(ids, mask=mask, use_mems=False).logits[0, prompt_len - 1 : -1]
    if not causal:
        position = torch.arange(length)[None]
        mask = xk.RankMask.from_order(position, targets=position >= prompt_len)
    targets = torch.arange(prompt_len, length)[None]
    return model(ids, mask=mask, target_positions=targets, use_mems=False).logits[0]


@pytest.mark.parametrize(
    "stream,causal,options",
    [
        ("query", False, {}),
        ("query", True, {}),
        ("content", True, {}),
        ("query", False, dict(clamp_len=3)),
        ("query", False, dict(bi_data=True)),  # its reversed half is for pre-training: prompts run forward
        ("query", True, dict(attn_type="uni")),
        ("content", True, dict(attn_type="uni")),
    ],
    ids=str,
)
@torch.no_grad()
def test_cached_steps_equal_the_full_pass(stream, causal, options, backend):
    model = ours("XLNetLMHeadModel", backend, **options)

    def call():
        return model.generate(PROMPTS, 8, 4.0, seed=0, eos_token_id=(), stream=stream, causal_prompt=causal)

    texts, steps = recorded(model, call)
    for row, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True)):
        assert text[: len(prompt)].tolist() == prompt and len(text) == len(prompt) + 8
        found = torch.stack([logits[row].flatten() for logits in steps])
        assert_same(found, _full_pass(model, text, len(prompt), stream, causal))


@pytest.mark.parametrize("attn_type,stream,causal", [("bi", "query", False), ("uni", "content", True)])
def test_defaults_follow_the_kind_of_model(attn_type, stream, causal):
    model = ours("XLNetLMHeadModel", attn_type=attn_type)

    def logits(**options):
        return torch.cat(recorded(model, lambda: model.generate(PROMPTS[:1], 2, **GREEDY, **options))[1])

    default = logits()
    assert torch.equal(default, logits(stream=stream, causal_prompt=causal))
    other = dict(stream="query") if attn_type == "uni" else dict(causal_prompt=True)
    assert (default - logits(**other)).abs().max() > 0.02


def test_greedy_takes_the_best(lm):
    texts, steps = recorded(lm, lambda: lm.generate(PROMPTS, 8, temperature=0, eos_token_id=()))
    for step, logits in enumerate(steps):
        best = logits.argmax(-1).flatten().tolist()
        assert best == [text[len(prompt) + step] for prompt, text in zip(PROMPTS, texts, strict=True)]


@torch.no_grad()
def test_same_length_sees_as_far_as_stepping_with_memory():
    """With same_length every token sees mem_len keys and itself, in the prompt too."""
    model = ours("XLNetLMHeadModel", attn_type="uni", same_length=True, mem_len=3)
    (text,), steps = recorded(model, lambda: model.generate([PROMPTS[0]], 8, 4.0, seed=0, eos_token_id=()))
    mems, wanted = None, []
    for token in text[:-1]:
        mask = xk.RankMask.causal(1, 1, mem_len=0 if mems is None else mems[0].shape[0])
        model.config.same_length = False  # memory of mem_len keys is the window
        output = model(token[None, None], mems=mems, mask=mask, use_mems=True)
        mems = output.mems
        wanted.append(output.logits[0])
    assert mems[0].shape[0] == 3
    assert_same(torch.cat(steps)[:, 0], torch.cat(wanted[len(PROMPTS[0]) - 1 :]))


@pytest.mark.parametrize("sampling", [dict(temperature=0), dict(temperature=0.8, top_k=20, top_p=0.9)], ids=str)
@pytest.mark.parametrize("stream", ["query", "content"])
def test_prompts_do_not_depend_on_each_other(lm, stream, sampling):
    options = dict(stream=stream, eos_token_id=3, **sampling)
    together = lm.double().generate(PROMPTS, 12, seed=7, **options)
    for row, (prompt, text) in enumerate(zip(PROMPTS, together, strict=True)):
        assert torch.equal(lm.generate([prompt], 12, seed=7 + row, **options)[0], text)
    lm.float()


def test_forms_of_prompts(lm):
    wanted = lm.generate(PROMPTS, 4, **GREEDY)
    tensors = lm.generate([torch.tensor(prompt) for prompt in PROMPTS], 4, **GREEDY)
    assert all(torch.equal(a, b) for a, b in zip(wanted, tensors, strict=True))
    padded = torch.full((3, 7), VOCABULARY - 1)
    for row, prompt in zip(padded, PROMPTS, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    found = lm.generate(padded, 4, **GREEDY, lengths=torch.tensor([5, 1, 3]))
    assert found.shape == (3, 9) and found.dtype == torch.int64
    for row, text in zip(found, wanted, strict=True):
        assert torch.equal(row[: len(text)], text) and (row[len(text) :] == 5).all()
    same = lm.generate(torch.tensor([PROMPTS[0]] * 2, dtype=torch.int32), 4, **GREEDY)
    assert same.shape == (2, 9) and torch.equal(same[0], wanted[0]) and torch.equal(same[1], wanted[0])


def test_texts_end_where_a_stop_token_comes(lm):
    free = lm.generate(PROMPTS, 12, **GREEDY)
    stop = int(free[0][len(PROMPTS[0]) + 3])
    stopped = lm.generate(PROMPTS, 12, temperature=0, eos_token_id=stop)
    for prompt, text, whole in zip(PROMPTS, stopped, free, strict=True):
        new = whole[len(prompt) :].tolist()
        end = new.index(stop) + 1 if stop in new else len(new)
        assert text.tolist() == prompt + new[:end]
    assert len(stopped[0]) < len(free[0])
    lm.config.eos_token_id = stop
    assert torch.equal(lm.generate(PROMPTS[:1], 12, temperature=0)[0], stopped[0])
    assert torch.equal(lm.generate(PROMPTS[:1], 12, temperature=0, eos_token_id=(stop, 0))[0], stopped[0])
    tensor = lm.generate(torch.tensor([PROMPTS[0]]), 12, temperature=0)
    assert torch.equal(tensor[0], stopped[0])  # no wider than the longest text
    lm.config.eos_token_id = 2


def test_a_step_computes_its_own_rows_only(lm):
    shapes = []
    hook = lm.transformer.layer[1].ff.register_forward_hook(lambda *args: shapes.append(tuple(args[1][0].shape[:2])))
    lm.generate(PROMPTS, 4, **GREEDY)
    lm.generate(PROMPTS, 4, **GREEDY, stream="content")
    ids, missing = _blanks()
    lm.fill(ids, missing)
    hook.remove()
    # The prompts and a query row each, then a content row and a query row for each token; known tokens, then the same.
    assert shapes == [(3, 6)] + [(3, 2)] * 3 + [(3, 5)] + [(3, 1)] * 3 + [(2, 8)] + [(2, 2)] * 3


def test_seeds(lm):
    def draw(**options):
        return torch.stack(lm.generate([PROMPTS[0]] * 2, 12, temperature=2.0, eos_token_id=(), **options))

    first = draw(seed=3)
    assert torch.equal(first, draw(seed=3))
    assert not torch.equal(first, draw(seed=4)) and torch.equal(first[1], draw(seed=4)[0])
    assert not torch.equal(first[0], first[1])  # equal prompts, texts of their own
    torch.manual_seed(1)
    unseeded = draw()
    assert not torch.equal(unseeded, draw())
    torch.manual_seed(1)
    assert torch.equal(unseeded, draw())


def test_dropout_is_off_and_modes_stay():
    model = ours("XLNetLMHeadModel", dropout=0.5).train()
    model.transformer.layer[1].eval()
    texts = [model.generate(PROMPTS, 6, **GREEDY) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*texts, strict=True))
    assert model.training and model.transformer.layer[0].ff.dropout.training
    assert not model.transformer.layer[1].ff.dropout.training


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    model = ours("XLNetLMHeadModel").to(dtype)
    assert len(model.generate(PROMPTS, 3, seed=0, eos_token_id=())[0]) == 8
    with torch.autocast("cpu", dtype):
        assert len(ours("XLNetLMHeadModel").generate(PROMPTS, 3, seed=0, eos_token_id=())[0]) == 8


LENGTH = 9


def _blanks(batch=2):
    ids, missing = torch.randint(VOCABULARY, (batch, LENGTH)), torch.zeros(batch, LENGTH, dtype=torch.bool)
    missing[0, [1, 4, 5, 8]] = True
    missing[1, [0, 3]] = True
    return ids, missing


ORDERS = {
    "left-to-right": "left-to-right",
    "given": torch.tensor([[0, 9, 0, 0, 2, 5, 0, 0, 3], [4, 0, 0, 1, 0, 0, 0, 0, 0]]),
    "several at once": torch.tensor([[0, 1, 0, 0, 1, 0, 0, 0, 1], [4, 0, 0, 4, 0, 0, 0, 0, 0]]),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("extras", [False, True], ids=["", "segments and padding"])
@pytest.mark.parametrize("options", [{}, dict(attn_type="uni"), dict(bi_data=True)], ids=str)
@torch.no_grad()
def test_filling_equals_the_full_pass(order, extras, options, backend):
    """Every token is the best of a permutation LM whose factorisation order is the order of filling in."""
    model, (ids, missing) = ours("XLNetLMHeadModel", backend, **options), _blanks()
    extra = {}
    if extras:
        extra["token_type_ids"] = torch.randint(3, ids.shape)
        extra["attention_mask"] = torch.ones_like(ids)
        extra["attention_mask"][:, 6:8] = 0
    filled, steps = recorded(model, lambda: model.fill(ids, missing, ORDERS[order], 4.0, seed=0, **extra))
    assert torch.equal(filled[~missing], ids[~missing])

    when = ORDERS[order] if isinstance(ORDERS[order], torch.Tensor) else torch.arange(LENGTH).expand(2, -1)
    model.config.bi_data = False  # text runs forward
    mask, everywhere = xk.RankMask.from_order(when, missing), torch.arange(LENGTH).expand(2, -1)
    wanted = model(filled, mask=mask, target_positions=everywhere, use_mems=False, **extra).logits
    for row in range(2):
        for logits, step in zip(steps, when[row][missing[row]].unique(), strict=False):  # this row may be done earlier
            now = (when[row] == step) & missing[row]
            assert_same(logits[row, : now.sum()], wanted[row, now])


@torch.no_grad()
def test_the_most_confident_comes_first(lm):
    ids, missing = _blanks()
    filled = lm.fill(ids, missing, "confident", temperature=0)
    order, left = torch.zeros_like(ids), missing.clone()
    targets = torch.arange(LENGTH).expand(2, -1)
    for step in range(4):
        order[left] = LENGTH  # what is left ranks last; nothing sees it
        mask = xk.RankMask.from_order(order, missing)
        probability, token = lm(filled, mask=mask, target_positions=targets).logits.softmax(-1).max(-1)
        for row in range(2):
            if left[row].any():
                best = probability[row].masked_fill(~left[row], -1).argmax()
                assert filled[row, best] == token[row, best]
                order[row, best], left[row, best] = step, False
    assert not left.any()


@pytest.mark.parametrize("order", ["left-to-right", "random", "confident", ORDERS["several at once"]], ids=str)
def test_placeholders_are_not_seen(lm, order):
    ids, missing = _blanks()
    wanted = lm.fill(ids, missing, order, temperature=1.0, seed=1)
    for placeholder in (0, VOCABULARY - 1, -100):
        assert torch.equal(lm.fill(ids.masked_fill(missing, placeholder), missing, order, seed=1), wanted)


@pytest.mark.parametrize("order", ["left-to-right", "random", "confident"])
def test_filled_rows_do_not_depend_on_each_other(lm, order):
    ids, missing = _blanks()
    together = lm.double().fill(ids, missing, order, seed=5)
    for row in range(2):
        alone = lm.fill(ids[row : row + 1], missing[row : row + 1], order, seed=5 + row)
        assert torch.equal(alone[0], together[row])
    lm.float()


def test_fill_extremes(lm):
    ids, missing = _blanks()
    assert torch.equal(lm.fill(ids, torch.zeros_like(missing)), ids)
    everything = lm.fill(ids, torch.ones_like(missing), "random", seed=0)
    assert everything.shape == ids.shape and everything.min() >= 0
    assert lm.fill(ids[:0], missing[:0]).shape == (0, LENGTH)
    assert lm.fill(ids[:, :0], missing[:, :0], "confident").shape == (2, 0)


def test_random_orders_differ(lm):
    ids, missing = _blanks()
    first = [recorded(lm, lambda s=seed: lm.fill(ids, missing, "random", seed=s))[1][0] for seed in range(8)]
    assert len({round(float(logits[0].sum()), 2) for logits in first}) > 1  # another position comes first


def test_filling_behind_a_prompt_is_generating(lm):
    prompt = PROMPTS[0]
    ids = torch.tensor([prompt + [0] * 6])
    missing = torch.arange(11)[None] >= len(prompt)
    wanted = torch.tensor([lm.generate([prompt], 6, **GREEDY)[0].tolist()])
    assert torch.equal(lm.fill(ids, missing, temperature=0), wanted)


def test_memory_is_linear():
    """No intermediate tensor of a long fill has as many elements as an L x L map of one head."""
    length, largest = 1024, 0
    model, ids = ours("XLNetLMHeadModel"), torch.randint(VOCABULARY, (1, length))
    missing = torch.zeros_like(ids, dtype=torch.bool)
    missing[:, [100, 900]] = True

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            for x in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(x, torch.Tensor):
                    largest = max(largest, x.numel())
            return result

    if not xk.backends()["cpu"].available:
        pytest.skip("the reference keeps every map")
    with Watch():
        model.fill(ids, missing, seed=0)
    assert 2 * length * model.config.d_model <= largest < length**2


def test_a_watcher_sees_every_token_and_ends_texts(lm):
    seen = []

    def watch(texts):
        seen.append([text.tolist() for text in texts])
        return [len(text) - len(prompt) == 3 for text, prompt in zip(texts, PROMPTS[:2], strict=True)][:1] + [False]

    options = dict(temperature=1.0, seed=3, eos_token_id=())
    whole = [text.tolist() for text in lm.generate(PROMPTS[:2], 6, **options)]
    found = [text.tolist() for text in lm.generate(PROMPTS[:2], 6, **options, watch=watch)]
    assert found == [whole[0][: len(PROMPTS[0]) + 3], whole[1]]
    assert seen[0] == [text[: len(prompt) + 1] for text, prompt in zip(whole, PROMPTS, strict=False)]
    assert len(seen) == 6 and seen[-1] == found
    assert lm.generate(PROMPTS[:2], 6, **options, watch=lambda texts: None)[0].tolist() == whole[0]


def test_a_watcher_sees_gaps_close(lm):
    ids, missing, seen = torch.tensor([[7, 0, 9, 0, 11]]), torch.tensor([[False, True, False, True, False]]), []
    found = lm.fill(ids, missing, "confident", 0, watch=lambda tokens, left: seen.append((tokens, left)))
    assert [int(left.sum()) for _, left in seen] == [1, 0]
    tokens, left = seen[0]
    assert torch.equal(tokens[~left], found[~left]) and torch.equal(seen[1][0], found)
