"""The tables and notes of a run, for a terminal and as Markdown."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

from . import kernel_tables, precision
from .claims import report as claims

try:
    from rich import box
    from rich.console import Console
    from rich.table import Table
except ImportError:  # then there is plain text alone
    box = Console = Table = None

from .plain import PlainTable

TITLES = {
    "core": "Attention core: operator against operator",
    "terms": "What each part costs: left out or added",
    "streams": "Two streams: what the query stream adds",
    "module": "Whole layer, both streams",
    "precision": "float32 and bfloat16",
    "long": "Long sequences: one forward and backward pass",
    "model": "Whole model against transformers'",
    "capacity": "Largest training step",
    "packing": "Sequences of different lengths: packed in a row against padding",
    "recurrence": "Evaluation with memory against a sliding window recomputed for every token",
    "speech": "Attention of a speech encoder against the best of transformers' own",
    "speech-layer": "The same with the layer's projections",
    "speech-toolkit": "An encoder layer of a speech toolkit against the best of its own ways",
    "speech-encoder": "A whole speech encoder against the best of its library's own ways",
}
RATIOS = dict.fromkeys(("core", "terms", "long"), "x baseline") | {
    "streams": "x content",
    "precision": "x float32",
    "packing": "x padded",
}
DIRECTION_NAMES = {"forward": "forward", "backward": "fwd + bwd"}
DIRECTIONS = tuple(DIRECTION_NAMES)
PUBLISHED = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}  # speed-ups with memory, Dai et al. 2019, table 9


MakeTable = Callable[[str], Any]  # of a title; PlainTable is one


def rich_table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", header_style="bold")


def tables(rows: list[dict], make: MakeTable = rich_table) -> list:
    """One table per section that was measured."""
    by_section = {section: [row for row in rows if row["section"] == section] for section in TITLES}
    special = {"recurrence": _recurrence, "capacity": _capacity}
    return [special.get(section, _table)(make, section, found) for section, found in by_section.items() if found]


def show(rows: list[dict], width: int) -> None:
    """Prints the tables: rich's where it is there and they fit, else plain ones."""
    drawn = tables(rows) if Console is not None else []
    for index, plain in enumerate(tables(rows, PlainTable)):
        if drawn and Console(width=1000).measure(drawn[index]).maximum <= width:
            Console(width=width).print(drawn[index])
        else:
            print(plain.text(width))


def _recurrence(make: MakeTable, section: str, rows: list[dict]):
    """Per token, whatever a call holds."""
    table = make(TITLES[section])
    for header in ("attention length", "evaluated by"):
        table.add_column(header, no_wrap=True)
    table.add_column("result", justify="center")
    for header in ("tokens/s", "ms per token", "quartiles", "peak MB", "vs window", "published"):
        table.add_column(header, justify="right", no_wrap=True)
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    for length, group in groupby(sorted(rows, key=lambda row: row["length"]), key=lambda row: row["length"]):
        for index, row in enumerate(sorted(group, key=lambda row: names.index(row["implementation"]))):
            tokens = row["tokens_per_call"]
            name = row["implementation"] + (f" of {tokens}" if tokens > 1 else "")
            head = (str(length) if index == 0 else "", name)
            if row["status"] != "ok":
                table.add_row(*head, f"[dim]{row['status']}[/dim]", *[""] * 6)
                continue
            per_token = {key: row[key] / tokens for key in ("median_ms", "q1_ms", "q3_ms") if key in row}
            numbers = _numbers(row | per_token)
            published = f"{PUBLISHED[length]:,}x" if length in PUBLISHED and tokens > 1 else "-"
            speed = f"{row['tokens_per_s']:,.{1 if row['tokens_per_s'] < 100 else 0}f}"
            table.add_row(*head, _result(row, rows), speed, *numbers, _times(row.get("speedup")), published)
        table.add_section()
    return table


def _capacity(make: MakeTable, section: str, rows: list[dict]):
    """The largest that fits, for each question."""
    table = make(TITLES[section])
    for header in ("largest", "implementation"):
        table.add_column(header, no_wrap=True)
    for header in ("found", "tokens", "vs transformers"):
        table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        if row["status"] != "ok":
            table.add_row(row["case"], row["implementation"], f"[dim]{row['status']}[/dim]", "", "")
            continue
        found = f"{row['largest']:,}" + (" or more" if row["largest"] == row["most"] else "")
        tokens = f"{row['length'] * row['batch']:,}"
        table.add_row(row["case"], row["implementation"], found, tokens, _times(row.get("speedup")))
    return table


def _table(make: MakeTable, section: str, rows: list[dict]):
    speedups = section in ("core", "module", "model", "speech", "speech-layer", "speech-toolkit", "speech-encoder")
    table = make(TITLES[section])
    heads = {"model": "task, L x B + memory", "speech": "audio, L x B", "speech-layer": "audio, L x B"}
    heads |= {"speech-toolkit": "toolkit, audio, L x B", "speech-encoder": "encoder, audio, L x B"}
    heads |= {"terms": "L x B, parts", "packing": "lengths"}
    head = heads.get(section, "L x B")
    for header in (head, "direction", "implementation"):
        table.add_column(header, no_wrap=True)
    table.add_column("result", justify="center")
    for header in ("median ms", "quartiles", "peak MB"):
        table.add_column(header, justify="right", no_wrap=True)
    if section in RATIOS:
        table.add_column(RATIOS[section], justify="right", no_wrap=True)
    products = any("product" in row for row in rows)
    if products:
        table.add_column("of GEMM", justify="right", no_wrap=True)
    if speedups:
        whom = {"speech-toolkit": "toolkit", "speech-encoder": "its library"}.get(section, "transformers")
        table.add_column(f"vs {whom}", justify="right", no_wrap=True)
    if section == "model":
        table.add_column("vs its compiled", justify="right", no_wrap=True)

    columns = len(table.columns)
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    cases = list(dict.fromkeys(row.get("case") for row in rows))

    def block(row: dict) -> tuple[int, int, int, bool]:
        return row["length"], row["batch"], cases.index(row.get("case")), row["direction"] == "backward"

    order = sorted(rows, key=lambda row: (block(row), names.index(row["implementation"])))
    for _, group in groupby(order, key=block):
        head = None
        for row in group:
            head = (_problem(row), direction_name(row)) if head is None else ("", "")
            cells = [*head, row["implementation"], _result(row, rows), *_numbers(row)]
            if section in RATIOS:
                cells.append(f"{_times(row.get('ratio_to_baseline'))} {baseline_kernel(row)}".strip())
            if products:
                cells.append(f"{row['product']['share']:.0%}" if "product" in row else "-")
            if speedups:
                cells.append(_times(row.get("speedup")))
            if section == "model":
                cells.append(_times(row.get("speedup_compiled")))
            if row["status"] != "ok":  # the reason takes the place of the numbers
                table.add_row(*cells[:3], f"[dim]{row['status']}[/dim]", *[""] * (columns - 4))
            else:
                table.add_row(*cells)
        table.add_section()
    return table


def _problem(row: dict) -> str:
    size = f"{row['length']} x {row['batch']}"
    return f"{size}, {row['case']}" if row["section"] == "terms" else row.get("case") or size


def baseline_kernel(row: dict) -> str:
    """Which of plain SDPA's kernels is the baseline, "flash"; "" where nothing had to choose one."""
    return ", ".join(row.get("baseline", "").split(", ")[2:])


def direction_name(row: dict) -> str:
    """The name of a direction: a model's includes the optimizer."""
    training_step = row["section"] == "model" and row["direction"] == "backward"
    return "training step" if training_step else DIRECTION_NAMES[row["direction"]]


def _result(row: dict, rows: list[dict]) -> str:
    """A tick or a cross: of this row's check, or of the same implementation's at the length that was checked."""
    # A model's check at one length stands for its other lengths; their `case` names the length.
    keys = ("implementation", "direction", "dtype", *(("task", "mem_len") if "task" in row else ("case",)))
    same = [one["check"] for one in rows if "check" in one and all(one.get(key) == row.get(key) for key in keys)]
    if not same:
        return "-"
    check = row.get("check", same[0])
    return "[green]✓[/green]" if check["passed"] else "[bold red]✗[/bold red]"


def _numbers(row: dict) -> tuple[str, str, str]:
    if "median_ms" not in row:
        return ("-", "-", _megabytes(row))
    spread = f"{_digits(row['q1_ms'])} - {_digits(row['q3_ms'])}" if row["samples"] > 1 else "one pass"
    return (_digits(row["median_ms"]), spread, _megabytes(row))


def _megabytes(row: dict) -> str:
    return "-" if row.get("peak_bytes") is None else f"{row['peak_bytes'] / 1e6:,.0f}"


def _digits(milliseconds: float) -> str:
    return f"{milliseconds:,.{3 if milliseconds < 1 else 2 if milliseconds < 10 else 1 if milliseconds < 100 else 0}f}"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def joined(runs: list[dict]) -> dict:
    """Runs of one benchmark and commit on one machine, as if they had been one run."""
    same = ("cpu", "gpu", "cores", "threads", "torch", "commit")
    for run in runs[1:]:
        for key in same:
            if run["environment"].get(key) != runs[0]["environment"].get(key):
                raise ValueError(f"these runs have not the same {key}")
        if run["benchmark"] != runs[0]["benchmark"]:
            raise ValueError("these are not runs of the same benchmark")
    return runs[0] | {"rows": [row for run in runs for row in run["rows"]]} if runs[1:] else runs[0]


def notes(results: dict) -> list[str]:
    """Notes below the tables: reasons, what was checked and how, and the machine."""
    rows, facts = results["rows"], results["environment"]
    lines = []
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["status"] != "ok":
            place = f"{row.get('case') or 'L ' + str(row['length'])} {direction_name(row)}"
            name = row["implementation"] if row["implementation"] != "all" else f"all of {row['section']}"
            reasons.setdefault((name, row["reason"]), []).append(place)
    for (name, reason), places in reasons.items():
        shown = ", ".join(dict.fromkeys(places)) if len(set(places)) < 4 else f"{len(places)} rows"
        lines.append(f"{name} ({shown}): {reason}")
    checked = sorted({row["length"] for row in rows if "check" in row})
    if checked and results.get("benchmark") == "recurrence":
        lines.append("Memory and window give the same log-probabilities where their contexts are the same: ✓.")
    elif checked:
        at = ", ".join(map(str, checked))
        lines.append(f"Results checked against float64 at L {at}; -: nothing to compare with.")
    for row in rows:
        if not row.get("check", {"passed": True})["passed"]:
            lines.append(_wrong(row))
    lines += _products([row["product"] for row in rows if "product" in row])
    cpu = f"{facts['cpu']}, {facts['cores']} cores, {facts['threads']} threads, {facts['cpu_capability']}"
    lines += _settings(results)
    lines.append(f"{facts.get('gpu') or cpu}; torch {facts['torch']}.")
    if results.get("benchmark") != "capacity":
        lines.append(f"Peak memory above inputs and outputs: {facts['peak_memory']}.")
    return lines


def _products(found: list[dict]) -> list[str]:
    """The note on the unit of shares."""
    if not found:
        return []
    rates = [product["gflops"] for product in found]
    names = ", ".join(dict.fromkeys(f"{one['name']} of {one['size']} x {one['size']}" for one in found))
    return [
        f"of GEMM: share of the rate of this machine's fastest matrix product ({names}), {min(rates):,.0f} to "
        f"{max(rates):,.0f} GFLOP/s; 3 products forward, 11 with backward (plain SDPA 2 and 7), every pair counted."
    ]


def _settings(results: dict) -> list[str]:
    """Facts that tell the runs of one page apart."""
    settings = results.get("settings", {})
    if results.get("benchmark") in ("attn", "packing"):
        memory = f", {settings['mem_len']} positions of memory" if settings.get("mem_len") else ""
        return [f"{settings['heads']} heads of {settings['head_dim']}, {settings['dtype']}{memory}."]
    if results.get("benchmark") in ("model", "capacity"):
        size = f"{settings['layers']} layers, {settings['d_model']} wide, {settings['heads']} heads"
        return [f"{size}, {settings['dtype']}."]
    return []


def _wrong(row: dict) -> str:
    tolerance = row["check"]["tolerance"]
    too_large = {name: error for name, error in row["check"]["errors"].items() if not error <= tolerance}
    return (
        f"WRONG {row['implementation']}, {direction_name(row)}, {row.get('case') or 'L ' + str(row['length'])}: "
        + ", ".join(f"{name} by {error:.2g}" for name, error in too_large.items())
        + f" of its largest value, {tolerance:.0e} is allowed"
    )


def markdown(results: dict) -> str:
    """The tables and notes of a run as Markdown."""
    if results.get("benchmark") == "precision":
        return precision.markdown(results)
    if results.get("benchmark") == "objectives":
        return claims.markdown(results)
    if results.get("benchmark") == "host time":
        return _host_time(results)
    if "calibration" in results:
        return kernel_tables.counted(results)
    if "window" in results:
        return kernel_tables.counted_of_windows(results)
    if "triton" in results:
        return kernel_tables.compiled_by_triton(results)
    if "torch_cuda" in results:
        return kernel_tables.compiled_by_nvcc(results)
    text = io.StringIO()
    console = Console(file=text, width=240, color_system=None)
    for table in tables(results["rows"]):
        title, table.title, table.box = table.title, None, box.MARKDOWN
        console.print(f"**{title}**", table, sep="\n")
    lines = (line.strip() for line in text.getvalue().splitlines())
    # rich draws the line between sections as a row of dashes, which only belongs under the header
    found: list[str] = []
    for line in lines:
        below_header = found and found[-1].startswith("|") and (len(found) < 2 or not found[-2].startswith("|"))
        if set(line) <= set("|-: ") and "-" in line and not below_header:
            continue
        found.append(line)
    notes_list = "\n".join(f"* {line}" for line in notes(results))
    return re.sub(r"[ ]{2,}", " ", "\n".join(found)) + f"\n\n{notes_list}\n"


def _host_time(results: dict) -> str:
    """Results of host_time.py: microseconds, a line for each thing that was timed, a column for each backend."""
    names = list(dict.fromkeys(row["backend"] for row in results["rows"]))
    lines: dict[tuple, dict] = {}
    for row in results["rows"]:
        lines.setdefault((row["problem"], row["what"], row["direction"]), {})[row["backend"]] = row["median_us"]
    found = [f"| problem | what | direction | {' | '.join(names)} |", f"|---|---|---|{'---|' * len(names)}"]
    for labels, times in lines.items():
        cells = [f"{times[name]:.0f}" if name in times else "" for name in names]
        found.append(f"| {' | '.join([*labels, *cells])} |")
    return "\n".join(found) + f"\n\n{results['environment']['cpu']}, torch {results['environment']['torch']}.\n"


def put(page: Path, name: str, text: str) -> None:
    """Replaces what stands between `<!-- name -->` and `<!-- end -->`.

    Raises:
        ValueError: the page has no such place.
    """
    before = page.read_text()
    pattern = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
    if not pattern.search(before):
        raise ValueError(f"there is no <!-- {name} --> ... <!-- end --> in {page}")
    page.write_text(pattern.sub(lambda found: f"{found[1]}\n{text}\n{found[2]}", before))
