"""Checkpoint for inference: model, tokenizer and training objective."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import xlnet_kernels as xk
from parts.folder import find
from parts.parallel import settle_place
from parts.tokenizer import TextTokenizer, load_tokenizer
from xlnet_kernels.pretraining import AutoregressiveLM, MaskedLM, PermutationLM

OBJECTIVES = {"permutation": PermutationLM, "autoregressive": AutoregressiveLM, "masked": MaskedLM}


@dataclass(frozen=True)
class Reader:
    """Language model in evaluation mode, with its tokenizer."""

    folder: Path
    model: xk.XLNetLMHeadModel
    tokenizer: TextTokenizer

    @property
    def objective(self) -> str:
        """The objective, written by pretrain.py in config.json; a public XLNet is a permutation LM."""
        return self.model.config.extra.get("objective", "permutation")

    @property
    def device(self) -> torch.device:
        return self.model.transformer.mask_emb.device


def read_config(folder: Path) -> xk.XLNetConfig:
    """The config.json of a language model's folder.

    Raises:
        ValueError: it is missing, damaged, or of another kind of model.
    """
    try:
        config = xk.XLNetConfig.from_file(folder)
    except FileNotFoundError as error:
        raise ValueError(f"{folder} is incomplete: {error}") from None
    kind = (config.extra.get("architectures") or ["XLNetLMHeadModel"])[0]
    if kind != "XLNetLMHeadModel":
        raise ValueError(f"{folder} holds an {kind}, and a language model is needed, such as --output of pretrain.py")
    return config


def load_language_model(folder: Path, **options: Any) -> xk.XLNetLMHeadModel:
    """`XLNetLMHeadModel.from_pretrained` for a command.

    Raises:
        ValueError: a file is missing or damaged, or the folder holds another kind of model.
    """
    read_config(folder)
    try:
        return xk.XLNetLMHeadModel.from_pretrained(folder, **options)
    except FileNotFoundError as error:
        raise ValueError(f"{folder} is incomplete: {error}") from None


def load_reader(options: argparse.Namespace) -> Reader:
    """The model of --checkpoint on --device.

    Raises:
        ValueError: it is missing or damaged, or its tokenizer does not fit.
    """
    settle_place(options)
    if options.threads:
        torch.set_num_threads(options.threads)
    folder = find(options.checkpoint)
    tokenizer = load_tokenizer(folder)
    model = load_language_model(folder, backend=options.backend, device=options.device)
    if model.config.vocab_size != tokenizer.vocabulary.size:
        size = tokenizer.vocabulary.size
        raise ValueError(f"{folder} has a vocabulary of {model.config.vocab_size}, its tokenizer {size}")
    return Reader(folder, model, tokenizer)
