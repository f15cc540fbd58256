"""A checkpoint for reading and writing: model, tokenizer, and how it was trained to predict."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch

import xlnet_kernels as xk
from parts.checkpoint import find
from parts.parallel import check_place
from parts.tokenizer import TextTokenizer, load_tokenizer
from xlnet_kernels.pretraining import AutoregressiveLM, MaskedLM, PermutationLM

OBJECTIVES = {"permutation": PermutationLM, "autoregressive": AutoregressiveLM, "masked": MaskedLM}


@dataclass(frozen=True)
class Reader:
    """A language model in evaluation mode."""

    folder: Path
    model: xk.XLNetLMHeadModel
    tokenizer: TextTokenizer

    @property
    def objective(self) -> str:
        """What pretrain.py left in config.json; a public XLNet is a permutation LM."""
        return self.model.config.extra.get("objective", "permutation")

    @property
    def device(self) -> torch.device:
        return self.model.transformer.mask_emb.device


def load_reader(options: argparse.Namespace) -> Reader:
    """The model of --checkpoint on --device.

    Raises:
        ValueError: it is not there, damaged, or its tokenizer is not its own.
    """
    check_place(options.device, options.backend)
    if options.threads:
        torch.set_num_threads(options.threads)
    folder = find(options.checkpoint)
    tokenizer = load_tokenizer(folder)
    model = xk.XLNetLMHeadModel.from_pretrained(folder, backend=options.backend, device=options.device)
    if model.config.vocab_size != tokenizer.vocabulary.size:
        size = tokenizer.vocabulary.size
        raise ValueError(f"{folder} has a vocabulary of {model.config.vocab_size}, its tokenizer {size}")
    return Reader(folder, model, tokenizer)
