"""Perplexity and bits per byte of a language model on text, with memory, in every supported order.

    python examples/evaluate.py --checkpoint runs/pretrain                 the part that pretrain.py held out
    python examples/evaluate.py --checkpoint runs/pretrain --text my-folder --mem-len 0

Orders: `causal`, every token from earlier tokens; `permutation`, every token, in a random order within each segment;
`partial`, as in pre-training: a sixth of the tokens, from all others (and, in a permutation LM, from earlier targets of
the order). The first two are probabilities of the whole text, with bits per byte comparable to a compressor's;
`partial` is not. A permutation LM supports all three, an auto-regressive LM the first (without a document's first
token), a masked LM the last. Memory holds the previous segments, and is empty at the beginning of a document. Needs pip
install '.[examples]'.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

try:
    from rich.console import Console
except ImportError:
    raise SystemExit("evaluate.py needs rich: pip install '.[examples]'") from None

import xlnet_kernels as xk
from parts import command
from parts.command import number
from parts.corpus import prepare
from parts.folder import read_settings
from parts.inference import OBJECTIVES, Reader, load_reader
from parts.training import progress_bar
from xlnet_kernels.pretraining import TokenFile, with_memory

ORDERS = {
    "permutation": ("causal", "permutation", "partial"),
    "autoregressive": ("causal",),
    "masked": ("partial",),
}
WRITTEN = ("results.json", "positions.png")  # into --output


@dataclass
class Tally:
    """Tally of the losses of one order: sum and number, also by position in the segment."""

    nats: np.ndarray
    count: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.count = np.zeros_like(self.nats)

    def add(self, positions: Tensor, losses: Tensor) -> None:
        np.add.at(self.nats, positions.cpu().numpy(), losses.double().cpu().numpy())
        np.add.at(self.count, positions.cpu().numpy(), 1)

    @property
    def mean(self) -> float:
        return float(self.nats.sum() / self.count.sum())


def segments(text: TokenFile, length: int) -> Iterator[tuple[np.ndarray, int | None, bool]]:
    """Pieces of `length` tokens of each document, the next token, and whether a document begins with the piece."""
    for begin, end in zip(text.bounds[:-1].tolist(), text.bounds[1:].tolist(), strict=True):
        ids = text.read(begin, end)
        for at in range(0, len(ids), length):
            after = int(ids[at + length]) if at + length < len(ids) else None
            yield ids[at : at + length], after, at == 0


def inputs_of(reader: Reader, order: str, ids: np.ndarray, after: int | None, rng) -> tuple[dict, Tensor, Tensor]:
    """The model's arguments for one segment without memory, the positions of the losses, and the labels."""
    length, device = len(ids), reader.device
    tokens, places = torch.from_numpy(ids)[None], torch.arange(length)[None]
    objective, rows = OBJECTIVES[reader.objective](), None
    if order == "partial" or reader.objective == "autoregressive":
        if order == "partial" and length < 3:  # too short for a target and its context
            return {}, places[:, :0], places[:, :0]
        example = objective.example(ids, reader.tokenizer.vocabulary, (length,), rng, next_id=after)
        ranks = (torch.from_numpy(np.ascontiguousarray(rank))[None] for rank in (example.query_rank, example.key_rank))
        tokens, labels = (torch.from_numpy(x)[None] for x in (example.input_ids, example.labels))
        mask, found = xk.RankMask(*ranks), (example.target_positions, example.output_rows)
        targets, rows = (None if x is None else torch.from_numpy(x)[None] for x in found)
    else:
        steps = torch.from_numpy(rng.permutation(length))[None] if order == "permutation" else places
        mask, targets, labels = xk.RankMask.from_order(steps, torch.ones_like(steps, dtype=torch.bool)), places, tokens
    given = {"input_ids": tokens, "mask": mask, "target_positions": targets, "output_rows": rows}
    positions = next((x for x in (targets, rows) if x is not None), places)
    return {name: x if x is None else x.to(device) for name, x in given.items()}, positions, labels


@torch.no_grad()
def evaluate(reader: Reader, text: TokenFile, order: str, length: int, mem_len: int, seed: int, progress) -> Tally:
    """Losses of all targets in nats."""
    tally, rng, mems = Tally(np.zeros(length)), np.random.default_rng(seed), None
    task = progress.add_task("", total=len(text), status=order)
    for ids, after, first in segments(text, length):
        mems = None if first else mems
        given, positions, labels = inputs_of(reader, order, ids, after, rng)
        progress.update(task, advance=len(ids))
        if not given:
            continue
        past = mems[0].shape[0] if mems else 0
        given["mask"] = with_memory(given["mask"], past, torch.tensor([past], device=reader.device))
        output = reader.model(**given, mems=mems, use_mems=mem_len > 0, mem_len=mem_len or None)
        mems = output.mems if mem_len else None
        losses = torch.nn.functional.cross_entropy(
            output.logits[0].float(), labels[0].to(reader.device), reduction="none"
        )
        counts = labels[0] >= 0
        tally.add(positions[0][counts], losses.cpu()[counts])
    return tally


def make_parser() -> argparse.ArgumentParser:
    parser = command.make_parser(__doc__)
    add = parser.add_argument
    add("--checkpoint", type=Path, default=Path("runs/pretrain"), metavar="FOLDER", help="a model, or a run's folder")
    add("--text", metavar="PATH", help="a file or a folder; default the part of its text that the run held out")
    add("--order", choices=("causal", "permutation", "partial"), help="default all that the model can")
    add("--seq-len", type=number(int, 2), help="tokens of a segment; default as in pre-training, or 512")
    add("--mem-len", type=number(int, 0), help="tokens of memory; 0 for none; default as in pre-training")
    add("--seed", type=number(int, 0), default=0, help="of orders and targets")
    add("--output", type=Path, metavar="FOLDER", help="also write results.json, and a picture of loss over position")
    add("--overwrite", action="store_true", help="replace the results in --output")
    command.add_place(parser)
    return parser


def read_text(reader: Reader, text: str | None, settings: dict, folder: Path) -> tuple[TokenFile, int]:
    """The tokens to evaluate on, written into `folder`, and the number of bytes they stand for.

    Raises:
        ValueError: there are no tokens.
    """
    if text is None and not settings:
        raise ValueError(f"--text is missing: {reader.folder} does not say what it was trained on")
    corpus = prepare(folder / "tokens", text if text is not None else settings["text"], reader.tokenizer)
    if text is not None:
        return corpus.text, corpus.bytes
    _, held_out = corpus.split(settings["held_out"])
    ids = held_out.read(0, len(held_out))
    return held_out, len(ids) if reader.tokenizer.is_bytes else len(reader.tokenizer.decode(ids).encode())


def draw(tallies: dict[str, Tally], path: Path) -> None:
    """Draw the loss over the position in the segment, in sixteen bins."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for order, tally in tallies.items():
        bins = [part for part in np.array_split(np.arange(len(tally.count)), 16) if tally.count[part].sum()]
        axes.plot(
            [part.mean() for part in bins], [tally.nats[p].sum() / tally.count[p].sum() for p in bins], label=order
        )
    axes.set_xlabel("position in the segment")
    axes.set_ylabel("nats per token")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; exit status 0, or 2 for invalid options."""
    options, console = make_parser().parse_args(arguments), Console(highlight=False)

    def work() -> None:
        reader = load_reader(options)
        known = (reader.folder / "settings.json").exists()
        settings = read_settings(reader.folder)["options"] if known else {}
        length = options.seq_len or settings.get("seq_len", 512)
        mem_len = (
            settings.get("mem_len", reader.model.config.mem_len or 0) if options.mem_len is None else options.mem_len
        )
        can = ORDERS[reader.objective]
        if options.order and options.order not in can:
            raise ValueError(f"--order {options.order}: the {reader.objective} objective has {', '.join(can)}")
        if options.output:
            text = settings.get("text") if options.text is None else options.text
            inputs = {"--checkpoint": options.checkpoint, "the checkpoint": reader.folder, "--text": text}
            command.check_output(options.output, options.overwrite, inputs)
        with tempfile.TemporaryDirectory() as folder:
            text, size = read_text(reader, options.text, settings, Path(folder))
            console.print(
                f"{len(text.bounds) - 1:,} documents, {size:,} bytes, {len(text):,} tokens; segments of {length}, "
                f"{mem_len} tokens of memory",
                soft_wrap=True,
            )
            with progress_bar(console) as progress:
                orders = (options.order,) if options.order else can
                tallies = {
                    order: evaluate(reader, text, order, length, mem_len, options.seed, progress) for order in orders
                }
            results = {order: summary(tally, len(text), size) for order, tally in tallies.items()}
        for order, found in results.items():
            shown = (f"{name} {x:,}" if isinstance(x, int) else f"{name} {x:,.3f}" for name, x in found.items())
            console.print(f"{order}: {', '.join(shown)}", soft_wrap=True)
        if options.output:
            command.clear(options.output, WRITTEN)
            options.output.mkdir(parents=True, exist_ok=True)
            (options.output / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
            draw(tallies, options.output / "positions.png")

    return command.refuse("evaluate.py", work)


def summary(tally: Tally, tokens: int, size: int) -> dict[str, float]:
    """Nats per target, perplexity, and bits per byte of text as if all tokens cost as much as the targets."""
    mean = tally.mean
    bits = mean / math.log(2) * tokens / size
    return {
        "nats per token": mean,
        "perplexity": math.exp(mean),
        "bits per byte": bits,
        "targets": int(tally.count.sum()),
    }


if __name__ == "__main__":
    sys.exit(main())
