"""`python -m xlnet_kernels.info [--json | --check | --models]`: versions, devices, build, backends, upgrades.

--check compares the backends with the reference; --models lists the models that `accelerate` knows.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import platform
import re
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import TextIO

import torch

import xlnet_kernels
from xlnet_kernels import _extension, linear
from xlnet_kernels._upgrades import upgrades
from xlnet_kernels._version import __version__
from xlnet_kernels.backends import _BACKENDS, self_check
from xlnet_kernels.backends.cpu import UNKNOWN_SET
from xlnet_kernels.backends.triton import features
from xlnet_kernels.integrations._libraries import LIBRARIES

# Instruction sets for bfloat16 only, with the one that float32 uses (csrc/cpu/dispatch.cpp)
FLOAT32_BESIDE = {
    "amx_bf16": "avx512",
    "avx512_bf16": "avx512",
    "neon_bf16": "neon",
    "emulated_bf16": "the best of avx512, avx2, neon, generic",
}


def installed_version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def triton_version() -> str:
    try:
        return features.installed()
    except metadata.PackageNotFoundError:
        return "not installed"


def cpu_name() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def cuda_devices() -> list[str]:
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [f"{device.name} (sm_{device.major}{device.minor})" for device in devices]


def linear_library() -> str:
    """The matrix-product library of `xk.Linear`, the reason for it, and its precision."""
    rounds = "; bfloat16 operands at medium precision" if linear.can_round() else ""
    return "{} ({})".format(*linear.choice()) + rounds


def compiled() -> dict | None:
    """Build facts of the loaded extension; None without one."""
    names = ["torch_version", "compiler", "cpp_standard", "cpu_instruction_set"]
    names += ["cpu_bfloat16_products", "cpu_products_of_parts", "cuda_version", "cuda_architectures"]
    module = _extension.module
    if module is None:
        return None
    facts = {name: getattr(module, name) for name in names} | {"file": module.__file__}
    choices = {"cuda_forward": module.cuda_forward_choices(), "cuda_backward": module.cuda_backward_choices()}
    return facts | {name: [f"{kernels}: {calls}" for kernels, calls in served] for name, served in choices.items()}


def collect() -> dict:
    record, built = _extension.build_record(), compiled()
    backends = {name: "ready" if state.available else state.reason for name, state in xlnet_kernels.backends().items()}
    facts: dict = {
        "xlnet_kernels": __version__,
        "folder": str(Path(xlnet_kernels.__file__).parent),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "triton": triton_version(),
        "cpu": {
            "name": cpu_name(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
        },
        "linear": linear_library(),
        "cuda_devices": cuda_devices(),
        "nvidia_driver": shutil.which("nvidia-smi") is not None,
        "compiled": built,
        "not_compiled_because": _extension.reason,
        "no_fast_path_because": _extension.fast_path_reason,
        "build_decisions": {name: record.get(name) for name in ("extension", "fast_path", "cuda", "bfloat16")},
        "backends": backends,
    }
    return facts | {"upgrades": upgrades(facts)}


def render(facts: dict) -> str:
    cpu, built = facts["cpu"], facts["compiled"]
    cuda = f"CUDA {facts['torch_cuda']}" if facts["torch_cuda"] else "without CUDA"
    rows = [
        ("xlnet_kernels", f"{facts['xlnet_kernels']} in {facts['folder']}"),
        ("python", f"{facts['python']}, {facts['platform']}"),
        ("torch", f"{facts['torch']}, {cuda}"),
        ("triton", facts["triton"]),
        ("CPU", f"{cpu['name']}, {cpu['cores']} cores, {cpu['threads']} threads, {cpu['instructions']}"),
        ("Linear", facts["linear"]),
        ("CUDA devices", "; ".join(facts["cuda_devices"]) or "none"),
    ]
    if built:
        gpu = f"CUDA {built['cuda_version']} for {built['cuda_architectures']}" if built["cuda_version"] else "no CUDA"
        made_by = f"{built['compiler']}, C++{built['cpp_standard'] // 100 % 100}, {gpu}"
        least = ".".join(map(str, _extension.MIN_TORCH))
        rows.append(("extension", f"for torch {least} or later, by {built['torch_version']}, {made_by}"))
        if Path(built["file"]).parent != Path(facts["folder"]):
            rows.append(("  in", str(Path(built["file"]).parent)))
        products = built["cpu_bfloat16_products"] or "converted to float32"
        if built["cpu_products_of_parts"]:
            products += ", float32 in parts too"
        chosen = built["cpu_instruction_set"]
        both = f"float32: {FLOAT32_BESIDE.get(chosen, chosen)}; bfloat16: {products}"
        rows.append(("  on this CPU", both if chosen else UNKNOWN_SET))
        rows.append(("  fast path", facts["no_fast_path_because"] or "ready"))
        if built["cuda_version"]:
            rows += [("  CUDA forward", line) for line in built["cuda_forward"]]
            rows += [("  CUDA backward", line) for line in built["cuda_backward"]]
    else:
        rows.append(("extension", facts["not_compiled_because"]))
    labels = {"extension": "  built", "fast_path": "  fast path", "cuda": "  CUDA", "bfloat16": "  bfloat16"}
    for name, label in labels.items():
        rows.append((label, facts["build_decisions"][name] or "no record of a build"))
    for title in ("backends", "upgrades"):
        rows += [(title, "")] + [(f"  {name}", state) for name, state in facts[title].items()]
    return "\n".join(f"{label:<15} {text}".rstrip() for label, text in rows)


class Progress(logging.Handler):
    """A terminal's progress line with the current step; log records of the package get lines of their own.

    Without a terminal only log records are written.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(logging.INFO)
        self.stream, self.on_terminal, self.text = stream, stream.isatty(), ""

    def __enter__(self) -> Progress:
        logger = logging.getLogger("xlnet_kernels")
        self.before = logger.level, logger.propagate
        logger.addHandler(self)
        logger.setLevel(logging.INFO)
        # Because the caller's handlers would write into the line.
        logger.propagate = False
        return self

    def __exit__(self, *_: object) -> None:
        logger = logging.getLogger("xlnet_kernels")
        logger.removeHandler(self)
        logger.level, logger.propagate = self.before
        self.clear()

    def show(self, text: str) -> None:
        self.text = text
        if self.on_terminal:
            print(f"\r\x1b[K{text}", end="", file=self.stream, flush=True)

    def clear(self) -> None:
        if self.text and self.on_terminal:
            print("\r\x1b[K", end="", file=self.stream, flush=True)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        text = self.text
        self.clear()
        print(record.getMessage(), file=self.stream, flush=True)
        if text:
            self.show(text)


def check() -> bool:
    """Compare every ready backend with the reference and print a table; returns whether all are right."""
    with Progress(sys.stderr) as progress:
        return _check(progress)


def _check(progress: Progress) -> bool:
    ready = [name for name, state in xlnet_kernels.backends().items() if state.available and name != "reference"]
    if not ready:
        print("no backend but the reference is ready: nothing to compare")
        return True
    print("Forward and all gradients against the reference in float64:\n")
    print(f"{'':<30}" + "".join(f"{name:>15}" for name in ready))
    sets = {"cpu": (compiled() or {}).get("cpu_instruction_set") or ""}
    print((f"{'':<30}" + "".join(f"{sets.get(name, ''):>15}" for name in ready)).rstrip())
    any_device = "cuda" if torch.cuda.is_available() else "cpu"  # for backends that serve every device
    ticks, crosses = ("\u2713", "\u2717") if _can_print("\u2713\u2717") else ("ok", "wrong")
    failures = []
    for number, problem in enumerate(problems := self_check.problems(), 1):
        dtype = str(problem.dtype).removeprefix("torch.")
        row = f"{problem.name}, {dtype}"
        marks = []
        for name in ready:
            backend = _BACKENDS[name]
            if backend.DTYPES is not None and problem.dtype not in backend.DTYPES:
                marks.append("-")
                continue
            progress.show(f"{number} of {len(problems)}: {row}, {name}")
            try:
                wrong = self_check.compare(backend, problem, backend.DEVICE or any_device)
            # Every exception, because the table continues after a failure of a compiler or driver.
            except Exception as failure:
                wrong = [f"{type(failure).__name__}: {failure}"]
            marks.append(crosses if wrong else ticks)
            failures += [f"{name}, {row}: {line}" for line in wrong]
        progress.clear()
        print(f"{row:<30}" + "".join(f"{mark:>15}" for mark in marks), flush=True)
    print("\n" + ("\n".join(failures) or "All right."))
    return not failures


def _can_print(text: str) -> bool:
    """Whether standard output's encoding has every character of `text`."""
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def models() -> str:
    """The libraries and classes that `accelerate` supports, and the classes it refuses."""
    lines = []
    for library in LIBRARIES:
        lines.append(f"{library.name}, from {library.least} on; here: {installed_version(library.package)}")
        lines += [f"  {name:<40} {where}" for name, (_, where) in library.classes.items()]
        if library.refused:
            lines.append("  not served:")
        lines += [f"    {name}: {reason}" for name, reason in library.refused.items()]
    return "\n".join(lines + ["xlnet_kernels.accelerate(model) finds them in any model: docs/how-to/accelerate.md"])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m xlnet_kernels.info", description=__doc__)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print everything as one JSON object")
    form.add_argument("--check", action="store_true", help="compare every ready backend with the reference; seconds")
    form.add_argument("--models", action="store_true", help="list the models of other libraries that accelerate knows")
    options = parser.parse_args()
    if options.models:
        print(models())
        return 0
    if options.check:
        return 0 if check() else 1
    facts = collect()
    print(json.dumps(facts, indent=2) if options.json else render(facts))
    return 1 if facts["backends"]["cpu"].startswith(UNKNOWN_SET) else 0


def run() -> int:
    """`main` for a terminal or a pipe: exit status 1 without a traceback where `head` closes the pipe early."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Because paths and names may need characters that the encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        # Because the interpreter flushes standard output once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


if __name__ == "__main__":
    sys.exit(run())
