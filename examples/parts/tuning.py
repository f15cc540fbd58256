"""Fine-tuning: the model with a new head, its training, and the results."""

from __future__ import annotations

import argparse
import copy
import hashlib
import itertools
import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

import xlnet_kernels as xk
from parts import card
from parts.checkpoint import Checkpoints, load_model, load_training
from parts.folder import CHECKPOINTS, find, read_settings, step_of
from parts.labels import Columns
from parts.parallel import Processes, settle_place
from parts.resume import to_keep
from parts.scores import Metrics as Scores
from parts.table import Row
from parts.tasks import TASKS, Task
from parts.tokenizer import TextTokenizer, load_tokenizer
from parts.training import (
    Metrics,
    check_finite,
    make_exact,
    make_optimizer,
    memory_used,
    progress_bar,
    stop_signals,
    update,
)

PIPELINES = {  # names in transformers
    "classification": "text-classification",
    "regression": "text-classification",
    "choice": "multiple-choice",
    "tagging": "token-classification",
    "answer": "question-answering",
}
# from scratch
SMALL = dict(d_model=128, n_layer=4, n_head=4, d_inner=512, ff_activation="gelu_new", initializer_range=0.0566)


@dataclass
class Reached:
    """Progress of training: the best metrics and their model, and the number of later evaluations."""

    best: Scores | None = None
    state: dict[str, torch.Tensor] | None = None
    since: int = 0


@dataclass
class Tuning:
    """State of a fine-tuning."""

    options: argparse.Namespace
    task: Task
    tokenizer: TextTokenizer
    model: torch.nn.Module
    training: list[Row]
    testing: list[Row]
    last: Path | None = None  # the checkpoint to resume from

    def __post_init__(self) -> None:
        # All of them at once, to find an invalid row before anything is written.
        self.examples, self.others = (
            [self.task.example(row) for row in rows] for rows in (self.training, self.testing)
        )

    @torch.no_grad()
    def evaluate(self) -> Scores:
        """The metrics on the testing rows."""
        self.model.eval()
        count, predictions = 4 * self.options.batch_size, []
        for begin in range(0, len(self.others), count):
            examples = self.others[begin : begin + count]
            inputs = {name: x.to(self.options.device) for name, x in self.task.batch(examples).items()}
            predictions += self.task.predict(self.model(**inputs), examples)
        self.model.train()
        return self.task.measure(predictions, self.testing)

    def batches(self) -> Iterator[list]:
        """The examples of each step, epoch after epoch, in a new order each."""
        rng, order, size = np.random.default_rng(self.options.seed), np.empty(0, np.int64), self.options.batch_size
        while True:
            while len(order) < size:
                order = np.concatenate([order, rng.permutation(len(self.training))])
            chosen, order = order[:size], order[size:]
            yield [self.examples[i] for i in chosen]

    def rows(self) -> str:
        """Hash of all rows."""
        return hashlib.sha256(repr((self.training, self.testing)).encode()).hexdigest()

    def save(self, found: dict[str, Scores], steps: int) -> None:
        """Write the model folder, with a card of the results."""
        options, output = self.options, self.options.output
        self.model.save_pretrained(output)
        self.tokenizer.save(output)
        data = "paragraphs of Python's manual, by topic" if options.data is None else f"`{options.data.name}`"
        before = "scratch" if options.checkpoint is None else f"`{options.checkpoint.name}`"
        rows = {
            "task": f"{options.task}: {data}, {len(self.training):,} rows, tested on {len(self.testing):,} others",
            "classes": ", ".join(self.task.labels) or "none",
            "training": f"from {before}, {steps:,} steps of {options.batch_size} rows, seed {options.seed}",
        }
        rows |= {name: ", ".join(f"{metric} {value:.3f}" for metric, value in x.items()) for name, x in found.items()}
        card.make("XLNet, fine-tuned", rows, self.task.model, PIPELINES[options.task]).save(output / "README.md")
        (output / "results.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def make_model(options: argparse.Namespace, task: Task, tokenizer: TextTokenizer, last: Path | None) -> torch.nn.Module:
    """The model of `last`, or else the checkpoint's encoder with a new head, or a small model from scratch.

    Raises:
        ValueError: the checkpoint is damaged, or has another vocabulary.
    """
    head = {"dropout": options.dropout, "use_mems_eval": False, "use_mems_train": False, "bi_data": False}
    torch.manual_seed(options.seed)
    if last:
        return load_model(task.model, last, options.backend, torch.device(options.device))
    if options.checkpoint is None:
        entries = {"vocab_size": tokenizer.vocabulary.size} | SMALL | tokenizer.config() | head | task.config()
        return task.model(xk.XLNetConfig.from_dict(entries), options.backend).train()
    folder = find(options.checkpoint)
    entries = xk.XLNetConfig.from_file(folder).to_dict()
    entries = {name: x for name, x in entries.items() if name not in ("id2label", "label2id", "objective")}
    config = xk.XLNetConfig.from_dict(entries | head | task.config())
    if config.vocab_size != tokenizer.vocabulary.size:
        raise ValueError(f"{folder} has a vocabulary of {config.vocab_size}, its tokenizer {tokenizer.vocabulary.size}")
    return task.model.from_pretrained(folder, config=config, backend=options.backend, new_head=True).train()


def prepare(
    options: argparse.Namespace, last: Path | None, columns: Columns, training: list[Row], testing: list[Row]
) -> Tuning:
    """Classes, tokenizer and model for rows checked by `labels.check`; those of `last` to resume.

    Raises:
        ValueError: an option or a row is invalid.
    """
    make_exact(options.threads)
    settle_place(options)
    tokenizer = load_tokenizer(last or (find(options.checkpoint) if options.checkpoint else options.tokenizer))
    task = TASKS[options.task](tokenizer.fast, columns, options.seq_len)
    task.read_labels(training)
    model = make_model(options, task, tokenizer, last).to(options.device)
    tuning = Tuning(options, task, tokenizer, model, training, testing, last)
    if last and read_settings(last).get("rows") != tuning.rows():
        raise ValueError(f"--resume: {options.data or 'the manual'} has changed since {last} was written")
    return tuning


def train(tuning: Tuning, console: Console) -> tuple[Scores, int, bool]:
    """Train until the steps, the patience or the user ends it; the model is then the best of all evaluations.

    Returns:
        Its metrics, the number of steps, and whether training was completed.

    Raises:
        FloatingPointError: the loss or the gradient is not finite; checkpoints are unchanged.
    """
    options, task, model, reached = tuning.options, tuning.task, tuning.model, Reached()
    device = torch.device(options.device)
    step = done = step_of(tuning.last) if tuning.last else 0
    optimizer, scheduler = make_optimizer(model, options, done)
    alone = Processes(0, 1, device)
    checkpoints = Checkpoints(options.output / CHECKPOINTS, 1, alone, options.async_save)
    ended = done == options.steps
    if tuning.last:
        reached = Reached(**load_training(tuning.last, model, optimizer, alone)["reached"])

    def save() -> None:
        own = {"reached": vars(reached)}
        settings = {"step": step, "options": to_keep(options), "rows": tuning.rows()}
        make = partial(task.model, model.config)
        checkpoints.save(step, model, make, optimizer, own, settings, tuning.tokenizer.save)

    with ExitStack() as stack:
        stopped = stack.enter_context(stop_signals())
        metrics = stack.enter_context(Metrics(options.output / "metrics.jsonl", done))
        bar = stack.enter_context(progress_bar(console))
        shown = bar.add_task("", total=options.steps, completed=done, status="")
        for step, examples in enumerate(itertools.islice(tuning.batches(), done, options.steps), done + 1):
            batch = task.batch(examples)
            loss = model(**{name: x.to(device) for name, x in batch.items()}).loss
            rate = scheduler.get_last_lr()[-1]
            norm = update(model, optimizer, scheduler, loss, options.clip)
            check_finite(step, loss.item(), norm, checkpoints.finish)
            metrics.write(step=step, loss=loss.item(), lr=rate, gradient=norm)
            bar.update(shown, completed=step, status=f"loss {loss.item():.3f}  {memory_used(device)}")
            due = step == options.steps or step % options.eval_every == 0
            stop = stopped()
            if stop and step < options.steps:
                console.print("stopping: writing a checkpoint")
            if stop and not due:
                save()  # skips an evaluation that an uninterrupted run would not make
            if stop or due:
                found = tuning.evaluate()
                metrics.write(step=step, **{f"validation_{name}": value for name, value in found.items()})
                console.print(f"step {step}: loss {loss.item():.3f}, {describe(found)}", soft_wrap=True)
                reached.since += 1
                if reached.best is None or found[task.metric] > reached.best[task.metric]:
                    reached.best = {name: float(value) for name, value in found.items()}
                    reached.state, reached.since = copy.deepcopy(model.state_dict()), 0
            ended = step == options.steps or due and reached.since == options.patience
            if not ended and (due and stop or step % options.save_every == 0 and not stop):
                save()
            if ended or stop:
                break
        checkpoints.finish()
    model.load_state_dict(reached.state)
    return reached.best, step, ended


def describe(found: Scores) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in found.items())
