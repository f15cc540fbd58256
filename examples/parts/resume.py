"""Options of a run that may have begun before: what --resume takes from the checkpoint, and what it refuses."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parts import checkpoint
from parts.command import number

# What a resumed run may choose anew: it changes no number, or only how they are rounded.
FREE = {"output", "resume", "overwrite", "save_every", "keep", "async_save", "eval_batches", "stop_at", "workers"}
FREE |= {"device", "backend", "threads", "compile", "parallel"}


def add_resume_options(add: Callable[..., Any], overwrites: str) -> None:
    """--resume, --overwrite, --save-every, --async-save."""
    add("--resume", action="store_true", help="go on from the last checkpoint, with its settings")
    add("--overwrite", action="store_true", help=overwrites)
    add("--save-every", type=number(int, 1), default=100, metavar="STEPS", help="write a checkpoint so often")
    copies = "train on while a checkpoint is written; takes host memory for a copy of weights and optimiser"
    add("--async-save", action="store_true", help=copies)


def parse(
    parser: argparse.ArgumentParser, arguments: list[str], folder: str = "", free: frozenset[str] = frozenset()
) -> tuple[argparse.Namespace, Path | None]:
    """The options, and the checkpoint to resume from, whose settings they are then.

    Args:
        folder: of checkpoints, within --output.
        free: names of options beside `FREE` that may change.

    Raises:
        ValueError: options contradict the checkpoint, or there is one that would be lost, or none to resume from.
    """
    options = parser.parse_args(arguments)
    last = checkpoint.latest(options.output / folder)
    if not options.resume:
        if last and not options.overwrite:
            raise ValueError(f"{options.output} holds a checkpoint: --resume goes on from it, --overwrite removes it")
        return options, None
    if options.overwrite:
        raise ValueError("--resume and --overwrite contradict each other")
    if last is None:
        raise ValueError(f"--resume: there is no checkpoint in {options.output}")
    settings = checkpoint.read_settings(last)["options"]
    parser.set_defaults(**settings)
    options = parser.parse_args(arguments)
    now = to_keep(options, free)
    changed = [name for name, value in settings.items() if now.get(name) != value]
    if changed:
        found = ", ".join(f"--{n.replace('_', '-')} is {settings[n]}, not {now.get(n)}" for n in changed)
        raise ValueError(f"--resume: in {last} {found}")
    return options, last


def to_keep(options: argparse.Namespace, free: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The options that a checkpoint keeps, for JSON."""
    kept = {name: value for name, value in vars(options).items() if name not in FREE | free}
    return {name: str(value) if isinstance(value, Path) else value for name, value in kept.items()}
