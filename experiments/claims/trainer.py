"""Comparison of this package's objectives and loop with transformers' XLNet, trained by its Trainer and collator.

Both have the same text, tokenizer, rows of tokens in a batch, share of targets and architecture, the same initial scale
of the weights, optimiser and schedule, and no memory. transformers' DataCollatorForPermutationLanguageModeling writes
MASK over the targets and computes a query row for every token (DataCollatorForPermutationLM lists all differences).

- "transformers, Trainer": the given number of steps;
- "permutation", "masked", "autoregressive": ours, at equal tokens;
- "permutation, half the time", "permutation, the same time": as many steps as fit into that share of Trainer's time.

Time is processor time of one thread, in training only. `held_out` is a common loss of all models but the
autoregressive: held-out targets drawn by transformers' collator, each predicted only from the tokens that are not
targets. For transformers it is the training loss. This package's models see less than in training, where targets see
earlier targets. `own` is the held-out loss of a run's own objective.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import transformers
from torch import Tensor, nn

import xlnet_kernels as xk
from lib.claims import THEIRS
from parts.run import Run, make_config
from xlnet_kernels.pretraining import TokenFile, batch_loader

from .workshop import OBJECTIVES, Clock, Workshop, train

HALF, SAME = "permutation, half the time", "permutation, the same time"
TIMED = 6  # steps to measure the time of a step


class Targets(NamedTuple):
    """Held-out sequences and their targets: transformers' batches, and the equivalent for this package's models."""

    theirs: dict[str, Tensor]
    tokens: Tensor
    positions: Tensor  # (B, N)
    labels: Tensor  # (B, N), -100 where a sequence has fewer
    hidden: Tensor  # (B, L) bool


def measure(workshop: Workshop) -> Iterator[dict]:
    """A row for each way and seed."""
    options = workshop.options
    for seed in options.seeds:
        run = workshop.new_run("permutation", seed, steps=options.trainer_steps)
        held_out = draw_targets(run, workshop)
        theirs = train_theirs(run, workshop, held_out)
        yield theirs
        budgets = {HALF: theirs["cpu_seconds"] / 2, SAME: theirs["cpu_seconds"]}
        per_step = seconds_per_step(run)
        for name in (*OBJECTIVES, *budgets):
            objective = name.partition(",")[0]
            steps = max(1, round(budgets[name] / per_step)) if name in budgets else options.trainer_steps
            run = workshop.new_run(objective, seed, steps=steps)
            yield train_ours(name, run, held_out, options) | {"seed": seed}


def train_ours(name: str, run: Run, held_out: list[Targets], options: argparse.Namespace) -> dict:
    """A training run's row."""
    course: list[list[float]] = []
    objective = run.options.objective
    loss = {"permutation": of_permutation, "masked": of_masked}.get(objective)
    mask_id = run.corpus.vocabulary.mask

    def on_step(step: int, clock: Clock) -> None:
        if loss and (step % options.trainer_every == 0 or step == run.options.steps):
            with clock.stopped():
                course.append([step, round(clock.seconds(), 2), round(mean(run.model, held_out, loss, mask_id), 4)])

    facts = train(run, on_step)
    row = {"section": "trainer", "implementation": name, "steps": run.options.steps} | facts | {"course": course}
    return row | ({"held_out": course[-1][2]} if course else {}) | {"own": round(run.evaluate(), 4)}


def train_theirs(run: Run, workshop: Workshop, held_out: list[Targets]) -> dict:
    """Train with transformers' Trainer; optimiser and schedule are those of `run`."""
    options, ours = workshop.options, run.options
    warnings.filterwarnings("ignore", module="transformers")
    torch.manual_seed(ours.seed)
    model = transformers.XLNetLMHeadModel(their_config(run))
    rows = [{"input_ids": row} for row in cut(run.training.text, ours.seq_len)]
    course: list[list[float]] = []

    class Watch(transformers.TrainerCallback):
        def on_train_begin(self, *_, **__) -> None:
            self.clock = Clock()

        def on_step_end(self, arguments, state, control, **_) -> None:
            if state.global_step % options.trainer_every == 0 or state.global_step == ours.steps:
                with self.clock.stopped():
                    loss = mean(model, held_out, of_theirs, 0)
                    model.train()
                    course.append([state.global_step, round(self.clock.seconds(), 2), round(loss, 4)])

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            max_steps=ours.steps,
            per_device_train_batch_size=ours.batch_size,
            learning_rate=ours.lr,
            lr_scheduler_type="cosine",
            warmup_steps=max(1, round(ours.steps * ours.warmup)),
            weight_decay=ours.weight_decay,
            adam_epsilon=1e-6,
            max_grad_norm=ours.clip,
            seed=ours.seed,
            use_cpu=True,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        collator = their_collator(workshop)
        given = {"data_collator": collator, "train_dataset": rows, "callbacks": [Watch()]}
        trainer = transformers.Trainer(model, arguments, **given)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    row = {"section": "trainer", "implementation": THEIRS, "steps": ours.steps, "seed": ours.seed}
    row |= {"parameters": sum(parameter.numel() for parameter in model.parameters())}
    row |= {"tokens": ours.steps * ours.batch_size * ours.seq_len, "cpu_seconds": course[-1][1]}
    return row | {"course": course, "held_out": course[-1][2], "own": course[-1][2]}


def seconds_per_step(run: Run) -> float:
    """Processor seconds of a step of `run`, with unchanged weights; the first steps are not counted."""
    times, clock = [], Clock()
    for batch in batch_loader(run.training, 0, 2 * TIMED):
        before = clock.seconds()
        run.loss(batch, None)[0].backward()
        nn.utils.clip_grad_norm_(run.model.parameters(), run.options.clip)
        run.optimizer.zero_grad()
        times.append(clock.seconds() - before)
    return sum(times[TIMED:]) / TIMED


def their_config(run: Run) -> transformers.XLNetConfig:
    """transformers' configuration of the same model."""
    names = ("vocab_size", "d_model", "n_layer", "n_head", "d_inner", "ff_activation", "dropout", "initializer_range")
    sizes = make_config(run.options, run.corpus).to_dict()
    return transformers.XLNetConfig(**{n: sizes[n] for n in names}, use_mems_train=False, use_mems_eval=False)


def their_collator(workshop: Workshop) -> Callable:
    """transformers' collator, with this package's share of targets."""
    share = workshop.options.num_predict / workshop.options.seq_len
    fast = workshop.tokenizer.fast
    return transformers.DataCollatorForPermutationLanguageModeling(fast, plm_probability=share, max_span_length=5)


def cut(text: TokenFile, length: int) -> list[list[int]]:
    """Rows of tokens, the rest of the text left out."""
    ids = text.read(0, len(text))
    return ids[: len(ids) // length * length].reshape(-1, length).tolist()


def draw_targets(run: Run, workshop: Workshop) -> list[Targets]:
    """Held-out targets, equal for all models."""
    rows, collator, found = cut(run.validation.text, run.options.seq_len), their_collator(workshop), []
    torch.manual_seed(0)
    for at in range(0, min(len(rows), workshop.options.held_out_rows), run.options.batch_size):
        tokens = torch.tensor(rows[at : at + run.options.batch_size])
        theirs = collator([{"input_ids": row} for row in tokens.tolist()])
        hidden = theirs["labels"] != -100
        count = int(hidden.sum(1).max())
        positions = (~hidden).long().argsort(stable=True, dim=1)[:, :count]
        labels = theirs["labels"].gather(1, positions)
        found.append(Targets(dict(theirs), tokens, positions.where(labels >= 0, 0), labels, hidden))
    return found


@torch.no_grad()
def mean(model: nn.Module, held_out: list[Targets], loss: Callable, mask_id: int) -> float:
    """Mean loss in nats per target."""
    model.eval()
    total = sum(loss(model, targets, mask_id).item() * int(targets.hidden.sum()) for targets in held_out)
    model.train()
    return total / sum(int(targets.hidden.sum()) for targets in held_out)


def of_theirs(model: nn.Module, targets: Targets, mask_id: int) -> Tensor:
    return model(**targets.theirs).loss


def of_permutation(model: nn.Module, targets: Targets, mask_id: int) -> Tensor:
    """Loss with all targets at one step of the order, so that no target sees another."""
    mask = xk.RankMask.from_order(torch.zeros_like(targets.tokens), targets.hidden)
    return model(targets.tokens, mask=mask, target_positions=targets.positions, labels=targets.labels).loss


def of_masked(model: nn.Module, targets: Targets, mask_id: int) -> Tensor:
    tokens = targets.tokens.masked_fill(targets.hidden, mask_id)
    return model(tokens, output_rows=targets.positions, labels=targets.labels).loss
