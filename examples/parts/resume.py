"""Options of training, and --resume: settings taken from the checkpoint, and refused changes."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parts import folder as folders
from parts.command import number

# Options that a resumed run may change, because they change no number, or only rounding.
FREE = {"output", "resume", "overwrite", "save_every", "keep", "async_save", "eval_batches", "stop_at", "workers"}
FREE |= {"device", "backend", "threads", "compile", "parallel"}


def add_optimizer_options(
    parser: argparse.ArgumentParser, *, steps: int, lr: float, layer_decay: float, batch: str = "sequences per step"
) -> None:
    """Add the optimiser's options; `batch` is the help of --batch-size."""
    add = parser.add_argument_group("optimiser").add_argument
    add(
        "--steps",
        type=number(int, 1),
        default=steps,
        help="batches in all, over which the schedule stretches; --resume takes another number",
    )
    add("--lr", type=number(float, 0), default=lr, help="highest learning rate")
    add("--warmup", type=number(float, 0, 1), default=0.1, help="share of the steps in which it rises")
    add("--decay", choices=("linear", "cosine"), default="cosine", help="how it then falls to zero")
    add("--layer-decay", type=number(float, 0), default=layer_decay, help="update of a layer relative to the next one")
    add("--weight-decay", type=number(float, 0), default=0.01, help="of matrices")
    add("--clip", type=number(float, 0), default=1.0, help="longest gradient; longer ones are scaled down")
    add("--dropout", type=number(float, 0, 1), default=0.0, help="everywhere in the model")
    add("--batch-size", type=number(int, 1), default=16, help=batch)
    add("--seed", type=number(int, 0), default=0, help="decides all that is random")


def add_resume_options(add: Callable[..., Any], overwrites: str) -> None:
    """Add --resume, --overwrite, --save-every and --async-save."""
    add("--resume", action="store_true", help="go on from the last checkpoint, with its settings")
    add("--overwrite", action="store_true", help=overwrites)
    add("--save-every", type=number(int, 1), default=100, metavar="STEPS", help="write a checkpoint so often")
    copies = "train on while a checkpoint is written; takes host memory for a copy of weights and optimiser"
    add("--async-save", action="store_true", help=copies)


def parse(
    parser: argparse.ArgumentParser, arguments: list[str], folder: str = "", free: frozenset[str] = frozenset()
) -> tuple[argparse.Namespace, Path | None]:
    """The options, and the checkpoint to resume from; its settings then become the options.

    Args:
        folder: of checkpoints, within --output.
        free: names of further options that may change, besides `FREE`.

    Raises:
        ValueError: options contradict the checkpoint, a checkpoint would be lost, or there is none to resume from.
    """
    options = parser.parse_args(arguments)
    last = folders.latest(options.output / folder)
    if not options.resume:
        if last and not options.overwrite:
            raise ValueError(f"{options.output} holds a checkpoint: --resume goes on from it, --overwrite removes it")
        return options, None
    if options.overwrite:
        raise ValueError("--resume and --overwrite contradict each other")
    if last is None:
        raise ValueError(f"--resume: there is no checkpoint in {options.output}")
    settings = folders.read_settings(last)["options"]
    parser.set_defaults(**settings)
    options = parser.parse_args(arguments)
    now = to_keep(options, free)
    changed = [name for name, value in settings.items() if name != "steps" and now.get(name) != value]
    if changed:
        found = ", ".join(f"--{n.replace('_', '-')} is {settings[n]}, not {now.get(n)}" for n in changed)
        raise ValueError(f"--resume: in {last} {found}")
    if options.steps < folders.step_of(last):
        raise ValueError(f"--steps {options.steps}: {last} has made more already")
    return options, last


def to_keep(options: argparse.Namespace, free: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The options stored in a checkpoint, for JSON."""
    kept = {name: value for name, value in vars(options).items() if name not in FREE | free}
    return {name: str(value) if isinstance(value, Path) else value for name, value in kept.items()}
