"""Shared code of training: optimiser, schedule, metrics that survive a kill, a clean stop, the progress bar."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from parts.curves import draw_curves


def make_optimizer(model: nn.Module, options: argparse.Namespace, step: int = 0) -> tuple[AdamW, LambdaLR]:
    """AdamW with one learning rate per layer, and the schedule after `step` steps.

    A layer's rate is `layer_decay` times the next one's, and embeddings are below the first layer. It scales the
    update, because scaling the gradient, as the original does, changes little: Adam divides by its size.
    """
    groups: dict[tuple[int, bool], list[nn.Parameter]] = {}
    top = model.config.n_layer
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decays = parameter.dim() > 1 and "_bias" not in name
            groups.setdefault((_height(name, top), decays), []).append(parameter)
    made = []
    for (height, decays), parameters in sorted(groups.items(), key=lambda group: group[0]):
        rate = options.lr * options.layer_decay ** (top - height)
        weight_decay = options.weight_decay if decays else 0.0
        made.append({"params": parameters, "lr": rate, "initial_lr": rate, "weight_decay": weight_decay})
    optimizer = AdamW(made, eps=1e-6, fused=True)
    return optimizer, LambdaLR(optimizer, lambda done: learning_rate(done, options), last_epoch=step - 1)


def _height(name: str, top: int) -> int:
    """Height of a parameter: 0 for embeddings, 1 for the first layer, `top` for the last layer and the head."""
    parts = name.split(".")
    if "layer" in parts:
        return int(parts[parts.index("layer") + 1]) + 1
    return 0 if "word_embedding" in parts or "mask_emb" in parts else top


def learning_rate(step: int, options: argparse.Namespace) -> float:
    """Share of the highest learning rate at a step, counted from 0."""
    rise = max(1, round(options.steps * options.warmup))
    if step < rise:
        return (step + 1) / (rise + 1)
    done = (step - rise) / max(1, options.steps - rise)
    return 1 - done if options.decay == "linear" else (1 + math.cos(math.pi * done)) / 2


def update(model: nn.Module, optimizer: AdamW, scheduler: LambdaLR, loss: torch.Tensor, clip: float) -> float:
    """Run the backward pass, clip and make one step; returns the gradient's norm without clipping."""
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item()  # sharded parameters have a DTensor


def check_finite(step: int, loss: float, norm: float, finish: Callable[[], None]) -> None:
    """Check that loss and gradient are finite, before the step is saved.

    Args:
        norm: of the gradient.
        finish: waits until checkpoints of earlier steps are complete.

    Raises:
        FloatingPointError: a number is not finite.
    """
    if not (math.isfinite(loss) and math.isfinite(norm)):
        finish()
        raise FloatingPointError(f"step {step}: the loss is {loss}, the gradient's length {norm}")


class Metrics:
    """Writer of metrics: one line of JSON per event, with its "step", readable during the run; also TensorBoard.

    Args:
        path: the file. TensorBoard's files go to tensorboard/ beside it, and a picture is drawn at the end, if the
            packages are installed.
        after: lines of later steps, left by a run killed after its last checkpoint, are dropped.
        write: False in all processes but one.
    """

    def __init__(self, path: Path, after: int = 0, write: bool = True) -> None:
        self.path, self._file, self._board = path, None, None
        if not write:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = []
        if after and path.exists():
            kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _step(line) <= after]
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        os.replace(temporary, path)
        self._file = open(path, "a", encoding="utf-8")
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return
        folder = path.parent / "tensorboard"
        if not after:
            for old in folder.glob("events.out.tfevents.*"):
                old.unlink()
        self._board = SummaryWriter(str(folder), purge_step=after + 1)

    def write(self, *, step: int, **numbers: float) -> None:
        if self._file:
            self._file.write(json.dumps({"step": step} | numbers) + "\n")
            self._file.flush()
        if self._board:
            for name, value in numbers.items():
                self._board.add_scalar(name, value, step)

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file:
            self._file.close()
            draw_curves(self.path)
        if self._board:
            self._board.close()


def _step(line: str) -> float:
    """The step of a line; infinite for a line truncated by a kill."""
    try:
        return json.loads(line)["step"]
    except ValueError:
        return math.inf


@contextmanager
def stop_signals() -> Iterator[Callable[[], bool]]:
    """Context with a function that returns whether Ctrl-C or SIGTERM came; a later second one ends the program."""
    came: list[float] = []

    def handle(number, frame) -> None:
        if not came:
            # Not print, because print is not reentrant and may be running.
            os.write(2, b"\nstopping after this step\n")
        came.append(time.monotonic())
        # Because under torchrun one Ctrl-C comes twice, from the terminal and from torchrun.
        if came[-1] - came[0] > 1:
            signal.signal(number, before[number])
            signal.raise_signal(number)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def progress_bar(console: Console, disable: bool = False) -> Progress:
    """Progress bar with a `status` text after it."""
    columns = (BarColumn(12), MofNCompleteColumn(), TextColumn("{task.fields[status]}"))
    return Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, disable=disable)


def memory_used(device: torch.device) -> str:
    """Text of the peak memory of the device or of this process."""
    if device.type == "cuda":
        return f"{torch.cuda.max_memory_allocated(device) / 1e6:,.0f} MB"
    try:
        import resource
        import sys
    except ImportError:  # Windows
        return "? MB"
    unit = 1 if sys.platform == "darwin" else 1024
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6:,.0f} MB"


def make_exact(threads: int | None) -> None:
    """Make runs reproducible: deterministic kernels, and a fixed number of threads if given."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that costs time
    if threads:
        torch.set_num_threads(threads)
