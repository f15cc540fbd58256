"""What every command has: help that shows defaults, errors of one line, outputs that are not overwritten unasked."""

from __future__ import annotations

import argparse
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import xlnet_kernels as xk


class Formatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """The description as it stands, and each option's default, unless its help names one or there is none."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        shown = action.help or ""
        if action.default in (None, False, argparse.SUPPRESS) or "default" in shown:
            return shown
        return f"{shown} (default: %(default)s)".strip()


def number(kind: type, least: float, below: float = math.inf) -> Callable[[str], float]:
    """An argparse type: an int or float in [least, below)."""

    def parse(text: str) -> float:
        value = kind(text)
        if not least <= value < below:
            raise argparse.ArgumentTypeError(f"must be in [{least}, {below}), got {text}")
        return value

    parse.__name__ = kind.__name__  # what argparse calls it where the text is no number
    return parse


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(description=doc, formatter_class=Formatter, allow_abbrev=False)


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def add_place(parser: argparse.ArgumentParser) -> None:
    """--device, --backend and --threads."""
    add = parser.add_argument_group("place").add_argument
    add(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu", help="where to run"
    )
    add("--backend", choices=tuple(xk.backends()), help="of the attention; default the best there is")
    add("--threads", type=number(int, 1), metavar="N", help="CPU threads; exact resuming needs the same number")


def refuse(name: str, work: Callable[[], int | None]) -> int:
    """Runs a command; what does not fit (ValueError, OSError) becomes one line and exit status 2."""
    try:
        return work() or 0
    except (ValueError, OSError) as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return 2


def clear(output: Path, overwrite: bool) -> None:
    """Makes way for a new output folder or file.

    Raises:
        ValueError: there is something, and `overwrite` is False.
    """
    there = output.is_file() or output.is_dir() and any(output.iterdir())
    if there and not overwrite:
        raise ValueError(f"{output} is there already: --overwrite replaces it")
    if there:
        output.unlink() if output.is_file() else shutil.rmtree(output)
