"""Fine-tune an XLNet on a table: CSV, JSON lines or a folder of `datasets`.

    python examples/finetune.py --checkpoint runs/pretrain --data train.csv --validation test.csv
    python examples/finetune.py --checkpoint runs/pretrain         paragraphs of Python's manual: of which topic?
    python examples/finetune.py --task answer --data train.jsonl   from scratch

Tasks and their columns (--text-column, --pair-column and --label-column name others):
    classification  text, a class; with --pair-column two texts
    regression      text, a number; likewise
    choice          text, choices (a list), the index of the right one
    tagging         words, tags: lists, or with spaces between
    answer          text, question, the part of the text that answers it

Prints the scores of the majority class and of a bag of words. Keeps the best model of all evaluations, and stops after
--patience evaluations without a better one. Writes a whole model folder, metrics.jsonl, the same for TensorBoard, and a
picture. Ctrl-C stops and writes; after that, or a kill, --resume continues exactly. Needs pip install '.[examples]'.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path

try:
    from rich.console import Console

    # find_spec, because importing it takes seconds.
    if importlib.util.find_spec("sklearn") is None:
        raise ImportError
except ImportError:
    raise SystemExit("finetune.py needs rich and scikit-learn: pip install '.[examples]'") from None

from parts import command, labels
from parts.command import number
from parts.folder import CHECKPOINTS, find, locked
from parts.resume import add_optimizer_options, add_resume_options, parse
from parts.table import Row, read_table, split

# Files in --output, written by training and by `Tuning.save`
WRITTEN = ("metrics.jsonl", "curves.png", "tensorboard/events.out.tfevents.*", "config.json", "model.safetensors")
WRITTEN += ("tokenizer.json", "tokenizer_config.json", "README.md", "results.json")


def make_parser() -> argparse.ArgumentParser:
    parser = command.make_parser(__doc__)
    add = parser.add_argument_group("task").add_argument
    add("--checkpoint", type=Path, metavar="FOLDER", help="a model, or --output of pretrain.py; default from scratch")
    add("--tokenizer", metavar="PATH", help="where there is no --checkpoint; default bytes")
    add("--task", choices=tuple(labels.READERS), default="classification", help="what the rows say")
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
    add_resume_options(add, "replace the model in --output")
    add("--eval-every", type=number(int, 1), default=50, metavar="STEPS", help="evaluate so often")
    add("--patience", type=number(int, 1), default=5, metavar="N", help="stop after N evaluations without a better one")
    command.add_place(parser)
    return parser


def read_rows(options: argparse.Namespace) -> tuple[labels.Columns, list[Row], list[Row]]:
    """The columns, and the rows for training and for testing, read before the slow import of torch.

    Raises:
        ValueError: an option or a row is invalid.
    """
    if options.checkpoint and options.tokenizer:
        raise ValueError("--tokenizer is for models from scratch: a checkpoint has its own")
    pairs = {"choice": "choices", "answer": "question"}
    pair = options.pair_column or pairs.get(options.task)
    if options.data is None:
        if options.task != "classification" or pair or options.validation:
            raise ValueError("--data is missing: the paragraphs of Python's manual are for classification alone")
        from parts import sample

        return labels.Columns(), *sample.topics()
    columns = labels.Columns(options.text_column, pair, options.label_column)
    names = [name for name in (columns.text, columns.pair, columns.label) if name]
    training = read_table(options.data, names)
    if options.validation:
        testing = read_table(options.validation, names, "--validation")
    else:
        training, testing = split(training, options.held_out, options.seed)
    labels.check(options.task, training, testing, columns)
    return columns, training, testing


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status.

    0; 1 if training failed or the majority or mean is not beaten; 2 for invalid options; 130 if interrupted.
    """
    console = Console(highlight=False)

    def work(stack: ExitStack) -> int:
        options, last = parse(make_parser(), sys.argv[1:] if arguments is None else arguments, CHECKPOINTS)
        begin = find(options.checkpoint) if options.checkpoint and not last else None
        rows = read_rows(options)
        stack.enter_context(locked(options.output))
        from parts.baseline import baselines
        from parts.tuning import describe, prepare, train

        tuning = prepare(options, last, *rows)
        if not last:
            inputs = {"--checkpoint": options.checkpoint, "the checkpoint": begin, "--tokenizer": options.tokenizer}
            inputs |= {"--data": options.data, "--validation": options.validation}
            command.check_output(options.output, options.overwrite, inputs)
        found = baselines(tuning.task, tuning.training, tuning.testing)
        console.print(f"{len(tuning.training):,} rows for training, {len(tuning.testing):,} for testing")
        for name, reached in found.items():
            console.print(f"{name}: {describe(reached)}", soft_wrap=True)
        if not last:
            command.clear(options.output, WRITTEN)
            shutil.rmtree(options.output / CHECKPOINTS, ignore_errors=True)
        try:
            reached, steps, whole = train(tuning, console)
        except FloatingPointError as error:
            print(f"finetune.py: {error}; the last checkpoint is as it was", file=sys.stderr)
            return 1
        tuning.save(found | {"this model": reached}, steps)
        console.print(f"this model: {describe(reached)}", soft_wrap=True)
        console.print(f"the best model and metrics are in {options.output}", soft_wrap=True)
        if not whole:
            console.print(f"stopped at step {steps} of {options.steps}; --resume goes on", soft_wrap=True)
            return 130
        shutil.rmtree(options.output / CHECKPOINTS, ignore_errors=True)
        least = min((x[tuning.task.metric] for x in found.values()), default=-1.0)
        return 0 if reached[tuning.task.metric] > least else 1

    with ExitStack() as stack:
        return command.refuse("finetune.py", lambda: work(stack))


if __name__ == "__main__":
    sys.exit(main())
