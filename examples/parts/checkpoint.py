"""Checkpoints that are whole at any moment: folders step-00000100, written under another name and renamed.

Each is a whole model folder (config, weights, tokenizer, generation config, model card; `from_pretrained` and
`AutoTokenizer` read it) and holds what a run needs to go on: settings.json, training.pt (optimiser and schedule), and
for each process its random numbers and memory, process-R.pt. The run's folder shows the files of the newest one.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from parts.parallel import Processes
from xlnet_kernels import XLNetConfig, XLNetLMHeadModel

LATEST = "latest"
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def latest(output: Path) -> Path | None:
    """The newest checkpoint in a folder."""
    return max(output.glob("step-*"), default=None)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def find(path: Path) -> Path:
    """A checkpoint, or the newest one in the output folder of a run.

    Raises:
        ValueError: there is none.
    """
    found = path if (path / "config.json").exists() else latest(path)
    if found is None:
        raise ValueError(f"there is no checkpoint in {path}")
    return found


def read_settings(checkpoint: Path) -> dict[str, Any]:
    """What settings.json holds.

    Raises:
        ValueError: it is missing or damaged.
    """
    path = checkpoint / "settings.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is missing or damaged: {error}") from None


def save(
    output: Path,
    step: int,
    model: nn.Module,
    config: XLNetConfig,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    mems: list[torch.Tensor] | None,
    settings: dict[str, Any],
    processes: Processes,
    keep: int,
    describe: Callable[[Path], None],
) -> None:
    """Writes the checkpoint of a step, then removes all but the last `keep`. Called by all processes together.

    `describe` writes what belongs to the model besides config and weights into a folder. A kill leaves the checkpoints
    that were there before; what it left half-written is cleaned up by the next one.
    """
    final, unfinished = output / f"step-{step:08d}", output / f".step-{step:08d}.unfinished"
    state = get_model_state_dict(model, options=WHOLE)
    training = {
        "optimizer": get_optimizer_state_dict(model, optimizer, options=WHOLE),
        "scheduler": scheduler.state_dict(),
    }
    if processes.first:
        for left in output.glob(".step-*.unfinished"):
            shutil.rmtree(left)
        unfinished.mkdir(parents=True)
    processes.wait()
    own = {"random": _random_state(processes.device), "mems": mems}
    torch.save(own, unfinished / f"process-{processes.rank}.pt")
    processes.wait()
    if processes.first:
        with torch.device("meta"):
            whole = XLNetLMHeadModel(config)
        whole.load_state_dict(state, assign=True)
        whole.save_pretrained(unfinished)
        describe(unfinished)
        torch.save(training, unfinished / "training.pt")
        (unfinished / "settings.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        for path in (*unfinished.iterdir(), unfinished):
            _sync(path)
        os.rename(unfinished, final)
        _show(output, final)
        _sync(output)
        for old in sorted(output.glob("step-*"))[:-keep]:
            _remove(old)
    processes.wait()


def remove(output: Path) -> None:
    """Removes all checkpoints in a folder."""
    for link in output.glob("*"):
        if link.is_symlink() and (link.name == LATEST or os.readlink(link).startswith(LATEST)):
            link.unlink()
    for old in output.glob("step-*"):
        _remove(old)


def _show(output: Path, newest: Path) -> None:
    """Makes `output` itself a model folder: links to the files of LATEST, which is a link that is switched at once."""
    switched = output / f".{LATEST}"
    try:
        switched.unlink(missing_ok=True)
        switched.symlink_to(newest.name)
        os.replace(switched, output / LATEST)
        for path in newest.iterdir():
            shown = output / path.name
            if path.suffix != ".pt" and not shown.exists() and not shown.is_symlink():
                shown.symlink_to(Path(LATEST, path.name))
    except OSError:  # no links here: `find` knows the newest checkpoint anyway
        switched.unlink(missing_ok=True)


def _remove(folder: Path) -> None:
    # Half a checkpoint must not look like one.
    shutil.rmtree(folder.rename(folder.with_name(f".{folder.name}.unfinished")))


def load_model(checkpoint: Path, backend: str | None, device: torch.device) -> XLNetLMHeadModel:
    """The model of a checkpoint, ready for training.

    Raises:
        ValueError: a file is missing or damaged.
    """
    try:
        return XLNetLMHeadModel.from_pretrained(checkpoint, backend=backend, device=device).train()
    except FileNotFoundError as error:
        raise ValueError(f"{checkpoint} is incomplete: {error}") from None


def load_training(
    checkpoint: Path, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler, processes: Processes
) -> list[torch.Tensor] | None:
    """Puts the optimiser, the schedule and the random numbers where they were; returns the memory.

    Raises:
        ValueError: a file is missing or damaged.
    """
    training, own = (_read(checkpoint / name) for name in ("training.pt", f"process-{processes.rank}.pt"))
    set_optimizer_state_dict(model, optimizer, training["optimizer"], options=StateDictOptions(full_state_dict=True))
    scheduler.load_state_dict(training["scheduler"])
    torch.set_rng_state(own["random"]["cpu"])
    if processes.device.type == "cuda" and "cuda" in own["random"]:
        torch.cuda.set_rng_state(own["random"]["cuda"])
    return None if own["mems"] is None else [memory.to(processes.device) for memory in own["mems"]]


def _random_state(device: torch.device) -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    return state | {"cuda": torch.cuda.get_rng_state()} if device.type == "cuda" else state


def _read(path: Path) -> dict[str, Any]:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} is missing or damaged: {str(error).splitlines()[0]}") from None


def _sync(path: Path) -> None:
    """Onto the disk, so that a power cut after the renaming finds the contents too."""
    if os.name != "posix":  # elsewhere folders cannot be opened
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
