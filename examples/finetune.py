"""Fine-tunes an XLNet on a table: CSV, JSON lines or a folder of `datasets`.

    python examples/finetune.py --checkpoint runs/pretrain --data train.csv --validation test.csv
    python examples/finetune.py --checkpoint runs/pretrain         paragraphs of Python's manual: of which topic?
    python examples/finetune.py --task answer --data train.jsonl   from scratch

Tasks and their columns (--text-column, --pair-column and --label-column name others):
    classification  text, a class; with --pair-column two texts
    regression      text, a number; likewise
    choice          text, choices (a list), the index of the right one
    tagging         words, tags: lists, or with spaces between
    answer          text, question, the part of the text that answers it

Prints what naming the majority and a bag of words reach, keeps the best model of all evaluations and stops when
--patience of them bring nothing. Writes a whole model folder, metrics.jsonl, the same for TensorBoard, and a picture.
Ctrl-C stops and writes. Needs pip install '.[examples]'.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

try:
    import sklearn  # noqa: F401  # what needs it comes late: baselines and metrics
    from rich.console import Console
except ImportError:
    raise SystemExit("finetune.py needs rich and scikit-learn: pip install '.[examples]'") from None

import xlnet_kernels as xk
from parts import card, command, sample
from parts.baseline import baselines
from parts.checkpoint import find
from parts.command import number
from parts.parallel import check_place
from parts.scores import Metrics as Scores
from parts.table import Row, read_table, split
from parts.tasks import TASKS, Columns, Task
from parts.tokenizer import TextTokenizer, load_tokenizer
from parts.training import (
    Metrics,
    add_optimizer_options,
    make_exact,
    make_optimizer,
    memory_used,
    progress_bar,
    stop_signals,
    update,
)

PIPELINES = {  # transformers' names
    "classification": "text-classification",
    "regression": "text-classification",
    "choice": "multiple-choice",
    "tagging": "token-classification",
    "answer": "question-answering",
}
# into --output, by training and by `Tuning.save`
WRITTEN = ("metrics.jsonl", "curves.png", "tensorboard/events.out.tfevents.*", "config.json", "model.safetensors")
WRITTEN += ("tokenizer.json", "tokenizer_config.json", "README.md", "results.json")
# from scratch
SMALL = dict(d_model=128, n_layer=4, n_head=4, d_inner=512, ff_activation="gelu_new", initializer_range=0.0566)


def make_parser() -> argparse.ArgumentParser:
    parser = command.make_parser(__doc__)
    add = parser.add_argument_group("task").add_argument
    add("--checkpoint", type=Path, metavar="FOLDER", help="a model, or --output of pretrain.py; default from scratch")
    add("--tokenizer", metavar="PATH", help="where there is no --checkpoint; default bytes")
    add("--task", choices=tuple(TASKS), default="classification", help="what the rows say")
    add("--data", type=Path, metavar="PATH", help=".csv, .tsv, .jsonl or folder; default paragraphs of Python's manual")
    add("--validation", type=Path, metavar="PATH", help="rows to test on; default a share of --data")
    add("--held-out", type=number(float, 0, 1), default=0.2, help="that share, chosen at random")
    add("--text-column", default="text", metavar="NAME", help="column of the text")
    add("--pair-column", metavar="NAME", help="column of a second text, of the choices, or of the question")
    add("--label-column", default="label", metavar="NAME", help="column of the label")
    add("--seq-len", type=number(int, 8), default=128, help="tokens; longer texts are cut")
    add_optimizer_options(parser, steps=400, lr=1e-3, layer_decay=0.9)
    add = parser.add_argument_group("run").add_argument
    add("--output", type=Path, default=Path("runs/finetune"), help="folder of the model")
    add("--overwrite", action="store_true", help="replace the model in --output")
    add("--eval-every", type=number(int, 1), default=50, metavar="STEPS", help="evaluate so often")
    add("--patience", type=number(int, 1), default=5, metavar="N", help="stop after N evaluations without a better one")
    command.add_place(parser)
    return parser


@dataclass
class Tuning:
    """All that training needs."""

    options: argparse.Namespace
    task: Task
    tokenizer: TextTokenizer
    model: torch.nn.Module
    training: list[Row]
    testing: list[Row]

    def __post_init__(self) -> None:
        # All of them at once, so that a row that does not fit is found before anything is written.
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

    def save(self, found: dict[str, Scores], steps: int) -> None:
        """Writes the model folder, with a card of what was reached."""
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


def make_model(options: argparse.Namespace, task: Task, tokenizer: TextTokenizer) -> torch.nn.Module:
    """The checkpoint's encoder with a new head, or a small model from scratch.

    Raises:
        ValueError: the checkpoint is damaged, or another vocabulary's.
    """
    head = {"dropout": options.dropout, "use_mems_eval": False, "use_mems_train": False, "bi_data": False}
    torch.manual_seed(options.seed)
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


def prepare(options: argparse.Namespace) -> Tuning:
    """Rows, classes, tokenizer and model.

    Raises:
        ValueError: something does not fit.
    """
    check_place(options.device, options.backend)
    if options.checkpoint and options.tokenizer:
        raise ValueError("--tokenizer is for models from scratch: a checkpoint has its own")
    tokenizer = load_tokenizer(find(options.checkpoint) if options.checkpoint else options.tokenizer)
    pairs = {"choice": "choices", "answer": "question"}
    pair = options.pair_column or pairs.get(options.task)
    if options.data is None:
        if options.task != "classification" or pair or options.validation:
            raise ValueError("--data is missing: the paragraphs of Python's manual are for classification alone")
        columns, (training, testing) = Columns(), sample.topics()
    else:
        columns = Columns(options.text_column, pair, options.label_column)
        names = [name for name in (columns.text, columns.pair, columns.label) if name]
        training = read_table(options.data, names)
        if options.validation:
            testing = read_table(options.validation, names)
        else:
            training, testing = split(training, options.held_out, options.seed)
    task = TASKS[options.task](tokenizer.fast, columns, options.seq_len)
    task.read_labels(training)
    model = make_model(options, task, tokenizer).to(options.device)
    return Tuning(options, task, tokenizer, model, training, testing)


def train(tuning: Tuning, console: Console) -> tuple[Scores, int, bool]:
    """Trains until the steps, the patience or the user end it; the model is then the best of all evaluations.

    Returns:
        Its metrics, the steps that were taken, and whether training came to an end by itself.
    """
    options, task, model = tuning.options, tuning.task, tuning.model
    optimizer, scheduler = make_optimizer(model, options)
    rng, best, state, since = np.random.default_rng(options.seed), None, None, 0
    device, order = torch.device(options.device), np.empty(0, np.int64)
    with ExitStack() as stack:
        stopped = stack.enter_context(stop_signals())
        metrics = stack.enter_context(Metrics(options.output / "metrics.jsonl"))
        bar = stack.enter_context(progress_bar(console))
        shown = bar.add_task("", total=options.steps, status="")
        for step in range(1, options.steps + 1):
            while len(order) < options.batch_size:  # epoch after epoch, each in an order of its own
                order = np.concatenate([order, rng.permutation(len(tuning.training))])
            chosen, order = order[: options.batch_size], order[options.batch_size :]
            batch = task.batch([tuning.examples[i] for i in chosen])
            loss = model(**{name: x.to(device) for name, x in batch.items()}).loss
            rate = scheduler.get_last_lr()[-1]
            norm = update(model, optimizer, scheduler, loss, options.clip)
            metrics.write(step=step, loss=loss.item(), lr=rate, gradient=norm)
            bar.update(shown, completed=step, status=f"loss {loss.item():.3f}  {memory_used(device)}")
            stop = stopped()
            if stop or step == options.steps or step % options.eval_every == 0:
                found = tuning.evaluate()
                metrics.write(step=step, **{f"validation_{name}": value for name, value in found.items()})
                console.print(f"step {step}: loss {loss.item():.3f}, {describe(found)}", soft_wrap=True)
                since += 1
                if best is None or found[task.metric] > best[task.metric]:
                    best, state, since = found, copy.deepcopy(model.state_dict()), 0
                if stop or since == options.patience:
                    break
    model.load_state_dict(state)
    return best, step, not stop


def describe(found: Scores) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in found.items())


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0; 1 where the majority or mean is not beaten; 2 where options do not fit; 130 where interrupted."""
    options, console = make_parser().parse_args(arguments), Console(highlight=False)

    def work() -> int:
        make_exact(options.threads)
        tuning = prepare(options)
        checkpoint = options.checkpoint and find(options.checkpoint)
        inputs = {"--checkpoint": options.checkpoint, "the checkpoint": checkpoint, "--tokenizer": options.tokenizer}
        inputs |= {"--data": options.data, "--validation": options.validation}
        command.check_output(options.output, options.overwrite, inputs)
        found = baselines(tuning.task, tuning.training, tuning.testing)
        console.print(f"{len(tuning.training):,} rows for training, {len(tuning.testing):,} for testing")
        for name, reached in found.items():
            console.print(f"{name}: {describe(reached)}", soft_wrap=True)
        command.clear(options.output, WRITTEN)
        reached, steps, whole = train(tuning, console)
        tuning.save(found | {"this model": reached}, steps)
        console.print(f"this model: {describe(reached)}", soft_wrap=True)
        if not whole:
            return 130
        least = min((x[tuning.task.metric] for x in found.values()), default=-1.0)
        return 0 if reached[tuning.task.metric] > least else 1

    return command.refuse("finetune.py", work)


if __name__ == "__main__":
    sys.exit(main())
