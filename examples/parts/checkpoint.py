"""Checkpoints that are whole at any moment: folders step-00000100, written under another name and renamed.

Each is a whole model folder (config, weights, tokenizer, generation config, model card; `from_pretrained` and
`AutoTokenizer` read it) and holds what a run needs to go on: settings.json, training/ (the optimiser, in shards, by
torch.distributed.checkpoint), and for each process its random numbers and memory, process-R.pt. The run's folder shows
the files of the newest one. Go on from your own checkpoints alone: torch reads training/.metadata with pickle.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from parts.parallel import Processes
from xlnet_kernels.model.checkpoint import PretrainedModel

LATEST, TRAINING = "latest", "training"
DAMAGED = (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError)
warnings.filterwarnings("ignore", "torch.distributed is .* single process")  # as is meant
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def checkpoints(output: Path) -> list[Path]:
    """Those in a folder, the newest last. Other files and folders of the user may lie beside them."""
    found = (path for path in output.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name, re.ASCII))
    return sorted(found, key=step_of)


def latest(output: Path) -> Path | None:
    """The newest checkpoint in a folder."""
    return next(reversed(checkpoints(output)), None)


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


class Checkpoints:
    """Writes the checkpoints of a run, one after the other; all processes call it together.

    The optimiser's state, twice the model, goes through torch.distributed.checkpoint: each process writes what it has.
    The first process writes the model. A kill leaves the checkpoints that were there before; what it left half-written
    is cleaned up by the next one.

    Args:
        output: the folder.
        keep: how many of the newest to keep.
        background: `save` returns when the state is copied, and training goes on while it is written.
    """

    def __init__(self, output: Path, keep: int, processes: Processes, background: bool = False) -> None:
        self.output, self.keep, self.processes, self.background = output, keep, processes, background
        self._thread = ThreadPoolExecutor(1)
        self._written: Future | None = None

    def save(
        self,
        step: int,
        model: nn.Module,
        make: Callable[[], PretrainedModel],
        optimizer: Optimizer,
        own: dict[str, Any],
        settings: dict[str, Any],
        describe: Callable[[Path], None],
    ) -> None:
        """Writes the checkpoint of a step, and removes old ones.

        Args:
            model: as it is trained, maybe wrapped; make() is the model as it is saved.
            own: what this process needs to go on, beside the optimiser and random numbers; tensors, numbers, text.
            describe: writes what belongs to the model besides config and weights into a folder.
        """
        self.finish()
        ours = self.processes
        unfinished = self.output / f".step-{step:08d}.unfinished"
        weights = get_model_state_dict(model, options=WHOLE)
        if ours.first:
            for left in self.output.glob(".step-*.unfinished"):
                shutil.rmtree(left)
            unfinished.mkdir(parents=True)
            describe(unfinished)
            (unfinished / "settings.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        ours.wait()
        torch.save({"random": _random_state(ours.device)} | own, unfinished / f"process-{ours.rank}.pt")
        state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        written = dcp.async_save(state, checkpoint_id=unfinished / TRAINING, process_group=ours.saving)
        if ours.first:
            if self.background:  # the next step changes these very tensors
                weights = copy.deepcopy(weights)
            written = self._thread.submit(self._publish, written, make, weights, unfinished)
        self._written = written
        if not self.background:
            self.finish()

    def finish(self) -> None:
        """Until the last checkpoint is whole, in all processes."""
        if self._written is not None:
            self._written.result()
            self._written = None
            self.processes.wait()

    def _publish(
        self, written: Future, make: Callable[[], PretrainedModel], weights: dict[str, Any], unfinished: Path
    ) -> None:
        written.result()  # in this process only when all others have written too
        with torch.device("meta"):
            whole = make()
        whole.load_state_dict(weights, assign=True)
        whole.save_pretrained(unfinished)
        for path in (*unfinished.rglob("*"), unfinished):
            _sync(path)
        final = self.output / unfinished.stem.removeprefix(".")
        os.rename(unfinished, final)
        _show(self.output, final)
        _sync(self.output)
        for old in checkpoints(self.output)[: -self.keep]:
            if old != final:
                _remove(old)


def remove(output: Path) -> None:
    """Removes all checkpoints in a folder."""
    for link in output.glob("*"):
        if link.is_symlink() and (link.name == LATEST or os.readlink(link).startswith(LATEST)):
            link.unlink()
    for old in checkpoints(output):
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
            if path.suffix != ".pt" and path.name != TRAINING and not shown.exists() and not shown.is_symlink():
                shown.symlink_to(Path(LATEST, path.name))
    except OSError:  # no links here: `find` knows the newest checkpoint anyway
        switched.unlink(missing_ok=True)


def _remove(folder: Path) -> None:
    # Half a checkpoint must not look like one.
    half = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(half, ignore_errors=True)  # of a kill; renaming takes no folder that has files
    shutil.rmtree(folder.rename(half))


def load_model(kind: type[PretrainedModel], checkpoint: Path, backend: str | None, device: torch.device) -> Any:
    """The model of a checkpoint, ready for training.

    Raises:
        ValueError: a file is missing or damaged.
    """
    try:
        return kind.from_pretrained(checkpoint, backend=backend, device=device).train()
    except FileNotFoundError as error:
        raise ValueError(f"{checkpoint} is incomplete: {error}") from None


def load_training(checkpoint: Path, model: nn.Module, optimizer: Optimizer, processes: Processes) -> dict[str, Any]:
    """Puts the optimiser and the random numbers where they were; returns what else the process saved as its own.

    Raises:
        ValueError: a file is missing or damaged.
    """
    own = _read(checkpoint / f"process-{processes.rank}.pt")
    state, folder = get_optimizer_state_dict(model, optimizer), checkpoint / TRAINING
    try:
        saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        # Parameters that never had a gradient have no state.
        had = {name for name in state["state"] if any(key.startswith(f"optimizer.state.{name}.") for key in saved)}
        state["state"] = {name: value for name, value in state["state"].items() if name in had}
        dcp.load({"optimizer": state}, checkpoint_id=folder, process_group=processes.saving)
    except (dcp.CheckpointException, *DAMAGED) as error:
        raise ValueError(f"{folder} is missing or damaged: {str(error).strip().splitlines()[-1]}") from None
    set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(strict=False))
    random = own.pop("random")
    torch.set_rng_state(random["cpu"])
    if processes.device.type == "cuda" and "cuda" in random:
        torch.cuda.set_rng_state(random["cuda"])
    return own


def _random_state(device: torch.device) -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    return state | {"cuda": torch.cuda.get_rng_state()} if device.type == "cuda" else state


def _read(path: Path) -> dict[str, Any]:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except DAMAGED as error:
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
