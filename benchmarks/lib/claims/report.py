"""Tables of what experiments/objectives.py found: the mean of the seeds, and the least and the greatest of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable

from ..markdown import table
from . import EDGES, THEIRS

BINS = [f"below {EDGES[0]:g}", *(f"{a:g} to {b:g}" for a, b in zip(EDGES, EDGES[1:], strict=False))]
BINS.append(f"above {EDGES[-1]:g}")


def markdown(results: dict) -> str:
    """A table for every experiment that was run, and the machine."""
    found = []
    for section, (title, show) in SECTIONS.items():
        rows = [row for row in results["rows"] if row["section"] == section]
        if rows:
            seconds = results["cpu_seconds"].get(section)
            took = "" if seconds is None else f" ({seconds / 60:.1f} minutes of one thread)"
            found.append(f"**{title}**{took}\n\n{show(rows)}")
    facts, settings = results["environment"], results["settings"]
    size = f"{settings['layers']} layers, {settings['d_model']} wide, {settings['vocab']} ids"
    found.append(
        f"Mean (least - greatest) of seeds {', '.join(map(str, settings['seeds']))}. {size}, "
        f"{results['text']['bytes']:,} bytes of text. {facts['cpu']}, torch {facts['torch']}.\n"
    )
    return "\n\n".join(found)


def spread(values: Iterable[float], digits: int = 3) -> str:
    """Mean, least and greatest.

    >>> spread([1.0, 2.0], 1)
    '1.5 (1.0 - 2.0)'
    """
    found = list(values)
    if not found:
        return ""
    mean, least, greatest = (f"{x:.{digits}f}" for x in (statistics.fmean(found), min(found), max(found)))
    return mean if len(found) == 1 else f"{mean} ({least} - {greatest})"


def names(rows: list[dict]) -> list[str]:
    """Names of the implementations, in the order of the rows."""
    return list(dict.fromkeys(row["implementation"] for row in rows))


def rows_of(rows: list[dict], name: str) -> list[dict]:
    return [row for row in rows if row["implementation"] == name]


def reached(row: dict, rows: list[dict]) -> float | None:
    """The share of Trainer's time after which a run's loss was no higher than Trainer's last one; None if never."""
    theirs = next(other for other in rows_of(rows, THEIRS) if other["seed"] == row["seed"])
    times = [seconds for _, seconds, loss in row["course"] if loss <= theirs["held_out"]]
    return times[0] / theirs["cpu_seconds"] if times else None


def _pairs(rows: list[dict]) -> str:
    lines = []
    for index, label in enumerate(BINS):
        bins = {
            name: [one for row in rows_of(rows, name) for one in row["bins"] if one["bin"] == index]
            for name in names(rows)
        }
        if not any(bins.values()):
            continue
        gains = [spread(one["gain"] for one in bins[name]) for name in ("permutation", "masked")]
        joints = [spread((one["joint"] for one in found), 2) for found in bins.values()]
        lines.append([label, str(bins["permutation"][0]["pairs"]), *gains, *joints])
    headers = ["mutual information, nats", "pairs", "gain, permutation", "gain, masked"]
    text = table(headers + [f"log p(A, B), {name}" for name in names(rows)], lines)
    examples: dict[tuple[str, str], list[float]] = {}
    for row in rows_of(rows, "permutation"):
        for example in row["examples"]:
            labels = (f'"{example["pair"]}"', f"{example['information']}")
            examples.setdefault(labels, []).append(example["gain"])
    lines = [[*labels, f"{statistics.fmean(gains):+.2f}"] for labels, gains in examples.items()]
    return f"{text}\n\n{table(['pair', 'mutual information, nats', 'mean gain, permutation'], lines)}"


def _context(rows: list[dict]) -> str:
    lines = []
    for task in dict.fromkeys(row["task"] for row in rows):
        here = [row for row in rows if row["task"] == task]
        for name in names(here):
            scores = [spread((row[metric] for row in rows_of(here, name)), 3) for metric in ("accuracy", "f1")]
            lines.append([task, name, *scores])
    return table(["task", "pre-trained by", "accuracy", "F1, mean of the classes"], lines)


def _memory(rows: list[dict]) -> str:
    lines, length = [], len(rows[0]["by_position"])
    longest = max((int(m) for row in rows for m in row["by_memory"]), default=0)
    shares = list(rows[0]["recl"])
    for name in names(rows):
        found = rows_of(rows, name)
        cells = [spread(row["held_out"] for row in found)]
        cells += [spread(statistics.fmean(part(row["by_position"])) for row in found) for part in _parts(length)]
        cells.append(spread(row["by_memory"][str(longest)] for row in found))
        cells += [spread((row["recl"][share] for row in found), 0) for share in shares]
        lines.append([name, *cells])
    headers = ["segments", "held-out loss", "first quarter of a segment", "last quarter"]
    headers.append(f"evaluated with {longest} tokens of memory")
    return table(headers + [f"RECL, r = {share}" for share in shares], lines)


def _parts(length: int) -> tuple[Callable, Callable]:
    quarter = max(1, length // 4)
    return lambda losses: losses[:quarter], lambda losses: losses[-quarter:]


def _streams(rows: list[dict]) -> str:
    lines = []
    for name in names(rows):
        found = rows_of(rows, name)
        changes = [
            f"{max(row[change] for row in found):.2g}" if change in found[0] else "-"
            for change in ("own_token", "earlier_token")
        ]
        lines.append([name, spread(row["held_out"] for row in found), *changes])
        lines[-1].append(spread((row["other_position"] for row in found), 3))
    headers = ["", "held-out loss", "its own token replaced: change of logits", "an earlier token replaced"]
    return table([*headers, "two positions, same tokens: total variation"], lines)


def _trainer(rows: list[dict]) -> str:
    lines = []
    for name in names(rows):
        found = rows_of(rows, name)
        cells = [spread((row["steps"] for row in found), 0), spread((row["cpu_seconds"] for row in found), 1)]
        cells += [spread(row[loss] for row in found if loss in row) for loss in ("held_out", "own")]
        shares = [reached(row, rows) for row in found if row["course"]]
        times = [share for share in shares if share is not None]
        never = [f"never with {len(shares) - len(times)} of {len(shares)} seeds"] if len(times) < len(shares) else []
        cells.append(", ".join([spread(times, 2)] * bool(times) + never))
        lines.append([name, *cells])
    headers = ["way", "steps", "CPU seconds", "loss on the common targets", "held-out loss of its own objective"]
    return table([*headers, "share of Trainer's time to reach its last loss"], lines)


SECTIONS: dict[str, tuple[str, Callable[[list[dict]], str]]] = {
    "pairs": ("Do targets depend on each other?", _pairs),
    "context": ("Do both sides of context help?", _context),
    "memory": ("Does memory carry context over segments?", _memory),
    "streams": ("Do predictions know the position and not the token?", _streams),
    "trainer": ("Against transformers' XLNet in its Trainer", _trainer),
}
