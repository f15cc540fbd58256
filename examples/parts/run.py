"""Pre-training run: model, optimiser, batches and memory, new or from a checkpoint."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import GenerationConfig

import xlnet_kernels as xk
from parts import card, checkpoint
from parts.checkpoint import Checkpoints
from parts.corpus import Corpus, prepare
from parts.folder import find, read_settings
from parts.inference import load_language_model, read_config
from parts.parallel import Processes, distribute
from parts.resume import to_keep
from parts.tokenizer import TextTokenizer, load_tokenizer
from parts.training import make_optimizer
from xlnet_kernels.pretraining import AutoregressiveLM, Batch, MaskedLM, PermutationLM, PretrainingBatches, batch_loader

FREE = frozenset({"eval_every"})  # options that --resume may change, besides those of every run


@dataclass
class Run:
    """State of a training run before its next step."""

    options: argparse.Namespace
    processes: Processes
    corpus: Corpus
    config: xk.XLNetConfig
    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler
    training: PretrainingBatches
    validation: PretrainingBatches
    mems: list[Tensor] | None
    step: int
    checkpoints: Checkpoints
    losses: dict[str, float] = field(default_factory=dict)

    def loss(self, batch: Batch, mems: list[Tensor] | None) -> tuple[Tensor, list[Tensor] | None]:
        """The loss of a batch, and the next memory."""
        batch = batch.to(self.processes.device)
        with torch.autocast(batch.input_ids.device.type, torch.bfloat16, enabled=self.options.dtype == "bfloat16"):
            output = self.model(**batch.inputs(mems))
        return output.loss, output.mems

    def new_mems(self) -> list[Tensor] | None:
        """Memory of the first batch: empty places, hidden by `Batch.inputs`, so that shapes never change."""
        if not self.options.mem_len:
            return None
        shape = (self.config.mem_len, self.training.batch_size, self.config.d_model)
        return [torch.zeros(shape, device=self.processes.device) for _ in range(self.config.n_layer)]

    @torch.no_grad()
    def evaluate(self) -> float:
        """Nats per target in the held-out text, on the same batches each time."""
        self.model.eval()
        mems, losses = self.new_mems(), []
        count = min(self.options.eval_batches, self.validation.steps_per_epoch)
        for batch in batch_loader(self.validation, stop=count):
            loss, mems = self.loss(batch, mems)
            losses.append(loss.item())
        self.model.train()
        return self.processes.mean(sum(losses) / count)[0]

    def save(self) -> None:
        options = to_keep(self.options, FREE)
        world = self.processes.world_size
        settings = {"step": self.step, "world_size": world, "options": options, "text": self.corpus.facts}
        self.checkpoints.save(
            self.step,
            self.model,
            lambda: xk.XLNetLMHeadModel(self.config),
            self.optimizer,
            {"mems": self.mems},
            settings,
            self.describe,
        )

    def describe(self, folder: Path) -> None:
        """Write the other files of a checkpoint: tokenizer, generation config and model card."""
        tokenizer, ends = self.corpus.tokenizer, ("bos_token_id", "eos_token_id", "pad_token_id")
        tokenizer.save(folder)
        ids = {name: value for name, value in tokenizer.config().items() if name in ends}
        GenerationConfig(**ids, do_sample=True, top_p=0.9).save_pretrained(folder)
        card.of_pretraining(self).save(folder / "README.md")


def make_run(options: argparse.Namespace, last: Path | None, ours: Processes) -> Run:
    """The run, ready for its next step.

    Raises:
        ValueError: an option is invalid.
    """
    settings = read_settings(last) if last else {"world_size": ours.world_size}
    if settings.get("world_size") != ours.world_size:
        wrote = settings.get("world_size")
        raise ValueError(f"--resume: {last} was written by {wrote} processes, not {ours.world_size}")
    if options.batch_size % ours.world_size:
        raise ValueError(f"--batch-size {options.batch_size} cannot be shared by {ours.world_size} processes")
    if options.d_model % options.heads:
        raise ValueError(f"--d-model {options.d_model} is no multiple of --heads {options.heads}")
    begin = find(options.checkpoint) if options.checkpoint and not last else None
    tokenizer = load_tokenizer(last or begin or options.tokenizer)
    corpus = _prepare_once(options, tokenizer, settings.get("text"), ours)
    batches = [make_batches(options, corpus, part, ours) for part in corpus.split(options.held_out)]

    # So that all processes begin with the same weights.
    torch.manual_seed(options.seed)
    if last:
        model = checkpoint.load_model(xk.XLNetLMHeadModel, last, options.backend, ours.device)
    elif begin:
        known = read_config(begin).to_dict()
        config = xk.XLNetConfig.from_dict(known | trained_as(options, corpus))
        if config.vocab_size != corpus.vocabulary.size:
            size = corpus.vocabulary.size
            raise ValueError(f"{begin} has a vocabulary of {config.vocab_size}, its tokenizer {size}")
        model = load_language_model(begin, config=config, backend=options.backend, device=ours.device).train()
    else:
        model = xk.XLNetLMHeadModel(make_config(options, corpus), options.backend).to(ours.device)
    config = model.config
    # Trained only with the permutation objective, because only the query stream uses it.
    model.transformer.mask_emb.requires_grad_(options.objective == "permutation")
    if options.compile:
        model.compile()
    torch.manual_seed(options.seed + ours.rank)  # different dropout in each process
    step = settings.get("step", 0)
    wrapped = distribute(model, options.parallel, ours.device)
    optimizer, scheduler = make_optimizer(wrapped if options.parallel == "fsdp2" else model, options, step)
    checkpoints = Checkpoints(options.output, options.keep, ours, options.async_save)
    run = Run(options, ours, corpus, config, wrapped, optimizer, scheduler, *batches, None, step, checkpoints)
    run.mems = run.new_mems()
    if last:
        if ours.world_size > 1:
            # An extra backward pass, because DDP orders gradients by their first arrival, and rounding of sums depends
            # on the order.
            run.loss(batches[0][0], run.mems)[0].backward()
            optimizer.zero_grad()
        own = checkpoint.load_training(last, wrapped, optimizer, ours)
        run.mems = own["mems"] and [memory.to(ours.device) for memory in own["mems"]]
    return run


def make_config(options: argparse.Namespace, corpus: Corpus) -> xk.XLNetConfig:
    """Configuration of a new model, from the options."""
    sizes = {
        "vocab_size": corpus.vocabulary.size,
        "d_model": options.d_model,
        "n_layer": options.layers,
        "n_head": options.heads,
        "d_inner": options.d_inner or 4 * options.d_model,
        "ff_activation": "gelu_new",
        # Scaled because 0.02 is for width 1024: with it, narrow models long predict only token frequencies.
        "initializer_range": options.initializer_range or 0.02 * (1024 / options.d_model) ** 0.5,
    }
    return xk.XLNetConfig.from_dict(sizes | trained_as(options, corpus))


def trained_as(options: argparse.Namespace, corpus: Corpus) -> dict[str, Any]:
    """Entries of config.json that depend on training; a left-to-right model needs no positions ahead."""
    memory = options.mem_len > 0
    entries = {"mem_len": options.mem_len, "use_mems_train": memory, "use_mems_eval": memory}
    entries |= {"dropout": options.dropout, "bi_data": options.bi_data, "objective": options.objective}
    return corpus.tokenizer.config() | entries | {"attn_type": "uni" if options.objective == "autoregressive" else "bi"}


def sizes_of(folder: Path) -> dict[str, Any]:
    """Options of pretrain.py that an initial model determines; --objective may differ.

    Raises:
        ValueError: config.json is missing or damaged.
    """
    config = read_config(folder)
    sizes = {"layers": config.n_layer, "d_model": config.d_model, "heads": config.n_head, "d_inner": config.d_inner}
    objective = config.extra.get("objective", "permutation")
    return sizes | {"initializer_range": config.initializer_range, "objective": objective}


def make_batches(options: argparse.Namespace, corpus: Corpus, text, ours: Processes) -> PretrainingBatches:
    if options.objective == "permutation":
        objective = PermutationLM(options.num_predict, options.perm_size)
    else:
        objective = MaskedLM(options.num_predict) if options.objective == "masked" else AutoregressiveLM()
    return PretrainingBatches(
        text,
        corpus.vocabulary,
        objective,
        options.batch_size // ours.world_size,
        options.seq_len,
        options.reuse_len,
        pairs=options.pairs,
        bi_data=options.bi_data,
        seed=options.seed,
        rank=ours.rank,
        world_size=ours.world_size,
    )


def _prepare_once(options: argparse.Namespace, tokenizer: TextTokenizer, known: dict | None, ours: Processes) -> Corpus:
    """Prepare the corpus: the first process writes the token file, the others read it."""
    where = (options.output / "tokens", options.text, tokenizer)
    corpus = prepare(*where, known) if ours.first else None
    facts = ours.share(corpus and corpus.facts)
    return corpus or prepare(*where, facts)
