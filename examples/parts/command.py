"""Shared code of commands: help with defaults, one-line errors, protection of existing outputs."""

from __future__ import annotations

import argparse
import math
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from parts.folder import LOCK

# Backends of the attention, listed here to avoid importing torch.
BACKENDS = ("cpu", "cuda", "triton", "torch", "reference")


_HARD = "\xa0"  # a space without line breaks in textwrap


class Formatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Help formatter: descriptions as wide as the terminal, and each option's default, unless its help names one."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Wrap paragraphs again, and keep indented lines.

        If an indented line is too long, words beside a command go below it, a command breaks between options, and other
        text continues with more indentation.
        """
        lines: list[str] = []
        for line in text.strip().splitlines():
            if lines and lines[-1] and line and not (line.startswith(" ") or lines[-1].startswith(" ")):
                lines[-1] += f" {line}"
            else:
                lines.append(line)
        return "\n".join(self._wrap(line, width) for line in lines)

    def _wrap(self, line: str, width: int) -> str:
        start = line[: len(line) - len(line.lstrip())]
        further = f"{start}    " if start else ""
        words, is_command = "", bool(re.match(r" +(python|torchrun) ", line))
        if is_command and len(line) > width:
            line, _, words = line.strip().partition("   ")
            line = start + line
            line = re.sub(r'"[^"]*"', lambda quoted: quoted[0].replace(" ", _HARD), line)
            line = re.sub(r"(--[a-z-]+) (?!--)", rf"\1{_HARD}", line)
        wrapper = textwrap.TextWrapper(
            width - 2 * is_command, subsequent_indent=further, break_long_words=False, break_on_hyphens=False
        )
        wrapped = (" \\\n" if is_command else "\n").join(wrapper.wrap(line)).replace(_HARD, " ")
        return f"{wrapped}\n{further}{words.strip()}" if words else wrapped

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        """Metavar of an option by its type, not its name."""
        kind = getattr(action.type, "__name__", "")
        return {"int": "N", "float": "X", "Path": "PATH"}.get(kind) or super()._get_default_metavar_for_optional(action)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        shown = action.help or ""
        if action.default in (None, False, argparse.SUPPRESS) or "default" in shown:
            return shown
        return f"{shown} (default: %(default)s)".strip()


def number(kind: type, least: float, below: float = math.inf) -> Callable[[str], float]:
    """Type for argparse: an int or float in [least, below)."""

    def parse(text: str) -> float:
        value = kind(text)
        if not least <= value < below:
            raise argparse.ArgumentTypeError(f"must be in [{least}, {below}), got {text}")
        return value

    parse.__name__ = kind.__name__  # its name in argparse's errors
    return parse


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(description=doc, formatter_class=Formatter, allow_abbrev=False)


def add_place(parser: argparse.ArgumentParser) -> None:
    """Add --device, --backend and --threads; `parallel.settle_place` completes them."""
    add = parser.add_argument_group("place").add_argument
    add("--device", choices=("cpu", "cuda"), help="where to run; default cuda where there is one")
    add("--backend", choices=BACKENDS, help="of the attention; default the best there is")
    add("--threads", type=number(int, 1), metavar="N", help="CPU threads; exact resuming needs the same number")


def refuse(name: str, work: Callable[[], object]) -> int:
    """Run a command; errors (ValueError, OSError) become one line and exit status 2, Ctrl-C 130."""
    try:
        status = work()
        return status if type(status) is int else 0
    except (ValueError, OSError) as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{name}: stopped", file=sys.stderr)
        return 130


def protect(output: Path, inputs: Mapping[str, str | Path | None]) -> None:
    """Raise ValueError if `output` is or contains the working directory or an input, or is a file within an input.

    Args:
        inputs: the command's input paths by name; None if not given.
    """
    place = output.resolve()
    for name, given in {**inputs, "the working directory": Path.cwd()}.items():
        if given is None:
            continue
        # Resolved too, because a run's folder shows files of a checkpoint, which may be elsewhere.
        shown = Path(given, "config.json")
        paths = [Path(given).resolve(), *([shown.resolve().parent] if shown.exists() else [])]
        inside = output.is_file() and name in inputs and any(place.is_relative_to(path) for path in paths)
        if inside or any(path.is_relative_to(place) for path in paths):
            raise ValueError(f"--output {output} would overwrite {name} {given}: name another place")


def check_output(
    output: Path, overwrite: bool, inputs: Mapping[str, str | Path | None] | None = None, *, folder: bool = True
) -> None:
    """Check that a command may write its folder, or its file, to `output`; `clear` then removes old files.

    Raises:
        ValueError: it is a file in place of a folder, or the reverse; it exists, and `overwrite` is False; or it
            overlaps with an input (`protect`).
    """
    if output.exists() and output.is_dir() != folder:
        kinds = ("file", "folder")
        raise ValueError(f"--output {output} is a {kinds[not folder]}, and must be a {kinds[folder]}")
    if any(path.name != LOCK for path in output.iterdir()) if output.is_dir() else output.exists():
        protect(output, inputs or {})
        if not overwrite:
            raise ValueError(f"{output} is there already: --overwrite replaces it")


def clear(output: Path, names: Iterable[str]) -> None:
    """Remove the files of these names or patterns, left by an earlier run, from a folder; other files stay."""
    for name in names:
        for path in output.glob(name):
            if path.is_file() or path.is_symlink():
                path.unlink()
