"""Runs of attn.py in a few lines: this package against the best of plain attention and its peers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .implementations import BASELINE, TRANSFORMERS
from .report import baseline_kernel

OWN = "xlnet_kernels "
COMPILED = "transformers compiled"
UNFUSED = ("xlnet_kernels torch", "xlnet_kernels reference")
PEERS = {
    TRANSFORMERS: "transf.",
    "SDPA + bias": "SDPA+bias",
    "SDPA + bias compiled": "compiled",
    "FlexAttention": "Flex",
}


@dataclass(frozen=True)
class Line:
    """One backend at one length.

    `forward` and `backward` are multiples of the time that the fastest kernel of plain SDPA takes, with that kernel's
    name ("" where there is one alone). Backward is forward and backward together less the forward, for both sides.
    `peers` are how many times as long forward and backward together take them.
    """

    name: str
    length: int
    forward: tuple[float, str] | None
    backward: tuple[float, str] | None
    peers: list[float | None]


def summarise(rows: list[dict]) -> list[Line]:
    """The core section's lines, one backend of this package after the other; none where nothing was timed."""
    core = [row for row in rows if row["section"] == "core" and "median_ms" in row]
    names = dict.fromkeys(row["implementation"] for row in core if row["implementation"].startswith(OWN))
    lines = []
    for name in names:
        for length in sorted({row["length"] for row in core}):
            forward, backward = (core_times(rows, length, one)[0] for one in ("forward", "backward"))
            both = _medians(rows, length, "backward")
            peers = [both[peer] / both[name] if {peer, name} <= both.keys() else None for peer in PEERS]
            lines.append(Line(name, length, _against_baseline(forward, name), _against_baseline(backward, name), peers))
    return lines


def _medians(rows: list[dict], length: int, direction: str) -> dict[str, float]:
    here = [row for row in rows if row["section"] == "core" and row["length"] == length and "median_ms" in row]
    return {row["implementation"]: row["median_ms"] for row in here if row["direction"] == direction}


def core_times(rows: list[dict], length: int, direction: str) -> tuple[dict[str, float], int]:
    """Milliseconds of each implementation, of a backward pass alone; and pairs of query and key of all heads."""
    times, pairs = _medians(rows, length, direction), 0
    if direction == "backward":
        forward = _medians(rows, length, "forward")
        times = {one: both - forward[one] for one, both in times.items() if one in forward and both > forward[one]}
    for row in rows:
        if row["section"] == "core" and row["length"] == length and "median_ms" in row:
            pairs = row.get("batch", 1) * row.get("heads", 1) * length**2
    return times, pairs


def _against_baseline(times: dict[str, float], name: str) -> tuple[float, str] | None:
    best = min((one for one in times if one.startswith(BASELINE)), key=times.get, default=None)
    if best is None or name not in times:
        return None
    return times[name] / times[best], baseline_kernel({"baseline": best})


def headline(rows: list[dict]) -> Iterator[str]:
    """Lines of plain text, for a terminal."""
    name = None
    for line in summarise(rows):
        if line.name != name:
            name = line.name
            yield f"{name}: times the best plain SDPA's, and how many times as fast as peers (forward + backward)"
            yield f"{'L':>7}{'forward':>16}{'backward':>16}" + "".join(f"{short:>11}" for short in PEERS.values())
        cells = [f"{_ratio(line.forward):>16}{_ratio(line.backward):>16}", *(f"{_cell(x):>11}" for x in line.peers)]
        yield f"{line.length:7}" + "".join(cells)
    for row in rows:
        if "median_ms" not in row:
            continue
        if row["section"] == "streams" and row.get("ratio_to_baseline", 1) != 1:
            both = " + backward" if row["direction"] == "backward" else ""
            yield f"both streams, L {row['length']}, forward{both}: {row['ratio_to_baseline']:.2f} x the content stream"
        if row["section"] == "long" and row.get("peak_bytes") is not None:
            peak = f"{row['peak_bytes'] / 1e9:.2f} GB"
            yield f"L {row['length']}, forward + backward: {row['implementation']} needs {peak}"


def highlights(run: dict) -> str:
    """README's three numbers of one run of attn.py: time against transformers and plain SDPA, and memory.

    They are of the greatest length at which all of these were measured in both directions.

    Raises:
        ValueError: there is no such length.
    """
    core = [row for row in run["rows"] if row["section"] == "core" and "median_ms" in row]
    ways = ("forward", "backward")
    for length in sorted({row["length"] for row in core}, reverse=True):
        here = {(row["implementation"], row["direction"]): row for row in core if row["length"] == length}
        names = list(dict.fromkeys(name for name, _ in here if all((name, way) in here for way in ways)))
        # The rows have the package's own order, the best backend first.
        own = next((name for name in names if name.startswith(OWN) and "reference" not in name), None)
        plain = [name for name in names if name.startswith(BASELINE)]
        if own and plain and TRANSFORMERS in names:
            break
    else:
        raise ValueError("no length has this package, transformers and plain SDPA in both directions")

    time = {key: row["median_ms"] for key, row in here.items()}
    faster = _both(time[TRANSFORMERS, way] / time[own, way] for way in ways)
    if all((COMPILED, way) in time for way in ways):
        compiled = f"**{_both(time[COMPILED, way] / time[own, way] for way in ways)}** against it compiled"
    else:
        compiled = "compiled it was not measured"
    slower = _both(time[own, way] / min(time[name, way] for name in plain) for way in ways)
    memory = [f"{here[name, 'backward']['peak_bytes'] / 1e6:.0f} MB" for name in (own, TRANSFORMERS)]
    environment, settings = run["environment"], run["settings"]
    machine = environment.get("gpu") or f"{environment['threads']} cores of an {environment['cpu']}"
    return "\n".join(
        [
            f"* **{faster}** as fast as transformers' attention in eager mode, {compiled} (forward / with backward)",
            f"* **{slower}** the time of plain SDPA, which has no positions",
            f"* **{memory[0]}** of memory, linear in length; transformers takes {memory[1]}, quadratic in length",
            "",
            f"<sub>Length {length}, permutation mask and relative segments, {settings['dtype']}, "
            f"{settings['heads']} heads of {settings['head_dim']}, {machine}, torch {environment['torch']}. "
            "The picture has as many tokens at every length, so memory that is linear in length is a flat line. "
            "[All processors and conditions](docs/performance.md).</sub>",
        ]
    )


def _both(ratios: Iterable[float]) -> str:
    return " / ".join(f"{ratio:.1f}x" if ratio >= 2 else f"{ratio:.2f}x" for ratio in ratios)


def markdown(runs: dict[str, dict]) -> str:
    """One table of several runs by name: a line for each run, dtype, head_dim, fused backend and length.

    A run without fused backends has its other ones. Peers that no run has are left out.
    """
    lines = {name: _fused(summarise(run["rows"])) for name, run in runs.items()}
    found_peers = zip(*(line.peers for part in lines.values() for line in part), strict=True)
    shown = [index for index, ratios in enumerate(found_peers) if any(ratios)]
    peers = [f"vs {list(PEERS)[index]}" for index in shown]
    heads = ["run", "dtype, head_dim", "L", "backend", "forward", "backward", *peers]
    found = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, run in runs.items():
        settings = run["settings"]
        kind = f"{name} | {settings['dtype']}, {settings['head_dim']}"
        for line in sorted(lines[name], key=lambda line: line.length):
            ratios = [line.peers[index] for index in shown]
            cells = [kind, str(line.length), line.name.removeprefix(OWN), _ratio(line.forward), _ratio(line.backward)]
            cells += [_cell(ratio) + "x" * (ratio is not None) for ratio in ratios]
            found.append(f"| {' | '.join(cells)} |")
    machines = dict.fromkeys(
        f"{run['environment'].get('gpu') or run['environment']['cpu']}, torch {run['environment']['torch']}"
        for run in runs.values()
    )
    found += ["", f"Forward and backward are multiples of the best plain SDPA's time. {'; '.join(machines)}.", ""]
    return "\n".join(found)


def _fused(lines: list[Line]) -> list[Line]:
    """Lines of fused backends; where there are none, of all."""
    return [line for line in lines if line.name not in UNFUSED] or lines


def _ratio(found: tuple[float, str] | None) -> str:
    return "-" if found is None else f"{found[0]:.2f} {found[1]}".strip()


def _cell(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"
