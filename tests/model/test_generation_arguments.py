"""Arguments of generation: sampling of tokens, and bad arguments."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.model.twins import ours
from xlnet_kernels.model.sampling import Sampler

VOCABULARY, LENGTH = 50, 9  # the first is model_cases'


@pytest.fixture(scope="module")
def lm():
    return ours("XLNetLMHeadModel")


@pytest.mark.parametrize(
    "options,wanted",
    [
        (dict(temperature=1.0), [0.1, 0.2, 0.3, 0.4]),
        (dict(temperature=0.5), [1 / 30, 4 / 30, 9 / 30, 16 / 30]),
        (dict(top_k=2), [0, 0, 3 / 7, 4 / 7]),
        (dict(top_k=9), [0.1, 0.2, 0.3, 0.4]),
        (dict(top_p=0.69), [0, 0, 3 / 7, 4 / 7]),
        (dict(top_p=0.71), [0, 2 / 9, 3 / 9, 4 / 9]),
        (dict(top_p=1e-6), [0, 0, 0, 1]),
        (dict(top_p=1.0), [0.1, 0.2, 0.3, 0.4]),
        (dict(top_k=3, top_p=0.7), [0, 0, 3 / 7, 4 / 7]),  # p is of what the k best have: 7/9 from two
    ],
    ids=str,
)
def test_tokens_are_drawn_from_the_distribution(options, wanted):
    draws = 4000
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log().expand(1, draws, 4)
    tokens = Sampler(1, seed=0, **options)(logits, [draws])
    share = torch.bincount(tokens[0], minlength=4) / draws
    # Four standard deviations of a share of one half; nothing at all where the share is zero.
    assert (share - torch.tensor(wanted)).abs().max() < 4 * 0.5 / draws**0.5
    assert not share[torch.tensor(wanted) == 0].any()


def test_do_sample_is_a_word_for_the_temperature(lm):
    greedy = lm.generate([[7, 8]], 6, temperature=0, eos_token_id=())[0].tolist()
    drawn = lm.generate([[7, 8]], 6, temperature=2.0, seed=1, eos_token_id=())[0].tolist()
    assert greedy != drawn
    for temperature in (0, 2.0):
        found = lm.generate([[7, 8]], 6, temperature=temperature, do_sample=False, seed=1, eos_token_id=())
        assert found[0].tolist() == greedy
    assert lm.generate([[7, 8]], 6, temperature=2.0, do_sample=True, seed=1, eos_token_id=())[0].tolist() == drawn


def test_numbers_of_numpy_are_numbers(lm):
    plain = dict(max_new_tokens=4, temperature=0.5, top_k=3, top_p=0.5, seed=1, eos_token_id=2, causal_prompt=True)
    given = {name: np.asarray(value)[()] for name, value in plain.items()}
    assert all(type(value).__module__ == "numpy" for value in given.values())
    wanted = lm.generate([[7, 8]], **plain)[0].tolist()
    assert lm.generate([[7, 8]], **given)[0].tolist() == wanted
    assert lm.generate([[7, 8]], **given | {"eos_token_id": [np.int64(2)]})[0].tolist() == wanted


@pytest.mark.parametrize(
    "prompts,options,message",
    [
        ([[1, VOCABULARY]], {}, r"prompt_ids\[0\] must lie in \[0, 50\), got values from 1 to 50"),
        ([[1], [-1]], {}, r"prompt_ids\[1\] must lie in"),
        ([[1]], {"eos_token_id": 2.0}, r"eos_token_id must be one or several integers in \[0, 50\), got 2.0"),
        ([[1], []], {}, "prompt_ids must have at least one token in each prompt, got none in prompt 1"),
        ([], {}, "prompt_ids must hold at least one prompt"),
        (torch.zeros(0, 3).long(), {}, "prompt_ids must hold at least one prompt"),
        (torch.zeros(1, 0).long(), {}, "prompt_ids must have at least one token"),
        (
            torch.zeros(3, dtype=torch.int64),
            {},
            r"prompt_ids must be a tensor \(B, L\) or a list of prompts, got \(3,\)",
        ),
        (torch.zeros(1, 3), {}, "prompt_ids must hold integers, got torch.float32"),
        ([[1.5]], {}, "prompt_ids must hold integers"),
        (
            [[1]],
            dict(do_sample=True, temperature=0),
            "do_sample must be True .temperature above 0., False or None, got",
        ),
        ([[1]], dict(do_sample="yes"), "do_sample must be"),
        ([1, 2], {}, r"prompt_ids\[0\] must be a list of integers"),
        (["text"], {}, r"prompt_ids\[0\] must be a list of integers"),
        ("text", {}, "prompt_ids must be a tensor .* got str"),
        ([[[1]]], {}, r"prompt_ids\[0\] must be 1-dimensional"),
        ([[1]], dict(lengths=[1]), "lengths are for prompt_ids"),
        (torch.ones(2, 3).long(), dict(lengths=[1]), r"lengths must be 2 integers in \[1, 3\], got \[1\]"),
        (torch.ones(2, 3).long(), dict(lengths=[1, 4]), "lengths must be 2 integers"),
        (torch.ones(2, 3).long(), dict(lengths=[0, 3]), "lengths must be 2 integers"),
        ([[1]], dict(max_new_tokens=0), "max_new_tokens must be an integer of at least 1, got 0"),
        ([[1]], dict(max_new_tokens=2.0), "max_new_tokens must be an integer"),
        ([[1]], dict(temperature=-0.1), "temperature must be a finite number of at least 0, got -0.1"),
        ([[1]], dict(temperature=float("nan")), "temperature must be a finite number"),
        ([[1]], dict(temperature=None), "temperature must be a finite number"),
        ([[1]], dict(top_k=0), "top_k must be an integer of at least 1 or None, got 0"),
        ([[1]], dict(top_p=0), r"top_p must be in \(0, 1\] or None, got 0"),
        ([[1]], dict(top_p=1.01), r"top_p must be in \(0, 1\]"),
        ([[1]], dict(seed=-1), "seed must be an integer in"),
        ([[1]], dict(seed=0.5), "seed must be an integer in"),
        ([[1]], dict(eos_token_id=VOCABULARY), r"eos_token_id must be one or several integers in \[0, 50\), got 50"),
        ([[1]], dict(eos_token_id=[-1]), "eos_token_id must be"),
        ([[1]], dict(stream="both"), 'stream must be "query", "content" or None, got \'both\''),
        ([[1]], dict(causal_prompt=1), "causal_prompt must be a bool, got 1"),
    ],
)
def test_bad_arguments_of_generate(lm, prompts, options, message):
    with pytest.raises(ValueError, match=message):
        lm.generate(prompts, **dict(max_new_tokens=2) | options)


@pytest.mark.parametrize(
    "change,message",
    [
        (dict(input_ids=[[1]]), "input_ids must be a tensor"),
        (dict(input_ids=torch.zeros(2, LENGTH)), "input_ids must hold integers"),
        (dict(input_ids=torch.full((2, LENGTH), VOCABULARY)), r"input_ids must lie in \[0, 50\)"),
        (dict(input_ids=torch.full((2, LENGTH), -1)), r"input_ids must lie in \[0, 50\)"),
        (dict(missing=torch.zeros(2, 3, dtype=torch.bool)), r"missing must be a tensor of shape \(2, 9\), got shape"),
        (dict(missing=torch.zeros(2, LENGTH)), "missing must be bool"),
        (dict(order="backwards"), 'order must be "left-to-right", "random", "confident" or integers'),
        (dict(order=torch.zeros(2, 3).long()), "order must be a tensor of shape"),
        (dict(order=torch.zeros(2, LENGTH)), "order must hold integers"),
        (dict(attention_mask=torch.ones(2, 3)), "attention_mask must be a tensor of shape"),
        (dict(attention_mask=torch.zeros(2, LENGTH)), "missing must be False where attention_mask"),
        (dict(token_type_ids=torch.zeros(2, LENGTH)), "token_type_ids must hold integers"),
        (dict(temperature=-1), "temperature must be"),
        (dict(top_p=2.0), "top_p must be"),
    ],
)
def test_bad_arguments_of_fill(lm, change, message):
    ids, missing = torch.randint(VOCABULARY, (2, LENGTH)), torch.eye(2, LENGTH) > 0
    with pytest.raises(ValueError, match=message):
        lm.fill(**dict(input_ids=ids, missing=missing) | change)
