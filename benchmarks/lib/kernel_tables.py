"""Markdown tables of what compilers made of the GPU kernels, and of what these execute by count."""

from __future__ import annotations

import re


def compiled_by_triton(results: dict) -> str:
    """Results of compiled/triton_report.py, a line for each kernel and class of the table."""
    by_class: dict[tuple, dict] = {}
    for row in results["rows"]:
        rows = by_class.setdefault((row["kind"], row["head_dim"], row["kernel"]), {})
        rows[row["architecture"], row["call"]] = row
    architectures = sorted({row["architecture"] for row in results["rows"]})
    names = [name if isinstance(name, str) else f"sm_{name}" for name in architectures]
    found = [f"| kernel | dtype, head_dim up to | {' | '.join(names)} |", f"|---|---|{'---|' * len(names)}"]
    for (kind, head_dim, kernel), rows in by_class.items():
        cells = [
            _compiled_cell(rows[architecture, "order"], rows[architecture, "stacked"]) for architecture in architectures
        ]
        found.append(f"| {kernel} | {kind}, {head_dim} | {' | '.join(cells)} |")
    return "\n".join(found) + f"\n\nTriton {results['triton']}.\n"


def _compiled_cell(plain: dict, stacked: dict) -> str:
    tile = f"{plain['BLOCK_M']} x {plain['BLOCK_N']}, {plain['num_warps']} warps"
    kilobytes = max(plain["shared_memory"], stacked["shared_memory"]) / 1024
    return f"{tile}: {plain['spills']}, {stacked['spills']}; {kilobytes:.0f} KB"


def compiled_by_nvcc(results: dict) -> str:
    """Results of compiled/ptxas_report.py, a line for each kernel."""
    by_kernel: dict[tuple, dict] = {}
    for row in results["rows"]:
        by_kernel.setdefault((row["kernel"], row["dtype"], row["width"], row["threads"]), {})[row["architecture"]] = row
    names = sorted({row["architecture"] for row in results["rows"]}, key=lambda name: int(re.sub(r"\D", "", name)))
    found = [f"| kernel | dtype, head_dim | threads | {' | '.join(names)} |", f"|---|---|---|{'---|' * len(names)}"]
    for (kernel, dtype, width, threads), rows in by_kernel.items():
        cells = [f"{rows[name]['registers']}, {rows[name]['spilled']}" for name in names]
        found.append(f"| {kernel} | {dtype}, {width} | {threads} | {' | '.join(cells)} |")
    return "\n".join(found) + "\n"


def counted(results: dict) -> str:
    """Counts of benchmarks/gpu_counts.py, a line for each kernel, direction and case."""
    by_case: dict[tuple, dict] = {}
    for row in results["rows"]:
        rows = by_case.setdefault((row["direction"], row["head_dim"], row["case"], row["kernel"]), {})
        rows[row["architecture"], row["length"]] = row
    columns = sorted({(row["architecture"], row["length"]) for row in results["rows"]})
    names = " | ".join(f"sm_{architecture}, L {length}" for architecture, length in columns)
    found = [f"| direction, D | case | kernel | {names} |", f"|---|---|---|{'---|' * len(columns)}"]
    for (direction, head_dim, case, kernel), rows in sorted(by_case.items()):
        cells = [_bound_cell(rows.get(column)) for column in columns]
        found.append(f"| {direction}, {head_dim} | {case} | {kernel} | {' | '.join(cells)} |")
    found += ["", "| plain kernel | by its bound | predicted, error | measured | quotient | source |", "|---" * 6 + "|"]
    for row in results["calibration"]:
        kernel = f"{row['direction']}, D {row['head_dim']}, L {row['length']}, sm_{row['architecture']}"
        speed = "-"
        if "predicted_teraflops" in row:  # results of earlier versions have none
            speed = f"{row['predicted_teraflops']}, {100 * row['prediction_error']:+.0f} %"
        speeds = f"{row['bound_teraflops']} TFLOP/s | {speed} | {row['published_teraflops']} | {row['quotient']:.2f}"
        found.append(f"| {kernel} | {speeds} | {row['source']} |")
    star = " \\*: of a launch its bound, below which its simulation is, or which has none." if _stars(results) else ""
    return "\n".join(found) + f"\n\nTriton {results['triton']}.{star}\n"


def _stars(results: dict) -> bool:
    return any("*" in predicted(row) for row in results["rows"])


def predicted(row: dict) -> str:
    """Cycles, with a star if a launch has its bound instead of a simulation; "-" if nothing was simulated."""
    if row.get("predicted_cycles") is None:
        return "-"
    return f"{row['predicted_cycles']:.0f}" + ("*" if row.get("launches_at_bound") else "")


def _bound_cell(row: dict | None) -> str:
    if row is None:
        return ""
    time = f"; {predicted(row)} predicted".replace("*", "\\*") if "predicted_cycles" in row else ""
    return f"{row['bound_cycles']:.0f} {row['bound_by']}, {row['ratio']:.2f}x{time}"


def counted_of_windows(results: dict) -> str:
    """Counts of benchmarks/long_counts.py, a line for each kind of window and direction."""
    by_case: dict[tuple, dict] = {}
    for row in results["rows"]:
        by_case.setdefault((row["case"], row["direction"]), {})[row["architecture"], row["length"]] = row
    columns = sorted({(row["architecture"], row["length"]) for row in results["rows"]})
    names = " | ".join(f"sm_{architecture}, L {length}" for architecture, length in columns)
    found = [f"| {results['window']} keys by | direction | {names} |", f"|---|---|{'---|' * len(columns)}"]
    for (case, direction), rows in by_case.items():
        cells = [_growth_cell(rows[column]) for column in columns]
        found.append(f"| {case} | {direction} | {' | '.join(cells)} |")
    return "\n".join(found) + f"\n\nTriton {results['triton']}.\n"


def _growth_cell(row: dict) -> str:
    growth = "" if row["growth"] is None else f", {row['growth']:.3f}x a key"
    return f"{row['bound_cycles'] / 1e6:.1f}{growth}"
