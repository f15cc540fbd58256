"""Atomic checkpoints: folders step-00000100, written under another name and renamed.

Each is a whole model folder (config, weights, tokenizer, generation config, model card; `from_pretrained` and
`AutoTokenizer` read it) and holds the state of a run: settings.json, training/ (the optimiser's tensors, in shards, by
torch.distributed.checkpoint), and for each process its random numbers and memory, process-R.pt. The run's folder shows
the files of the newest checkpoint. Nothing is unpickled: files are JSON, safetensors, or read with torch's
weights_only=True.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from parts import shards
from parts.folder import TRAINING, checkpoints, remove_one, show, sync
from parts.parallel import Processes
from xlnet_kernels.model.checkpoint import PretrainedModel

DAMAGED = (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError)
warnings.filterwarnings("ignore", "torch.distributed is .* single process")  # intended here
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Checkpoints:
    """Writer of a run's checkpoints, one after the other; all processes call it together.

    The optimiser's state, twice the model, is written by torch.distributed.checkpoint: each process writes its shards.
    The first process writes the model. A kill leaves the earlier checkpoints unchanged; the next checkpoint cleans up a
    half-written one.

    Args:
        output: the folder.
        keep: number of newest checkpoints to keep.
        background: `save` returns when the state is copied, and training continues while it is written.
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
        """Write the checkpoint of a step, and remove old ones.

        Args:
            model: the trained model, possibly wrapped; make() returns the model to save.
            own: state of this process besides the optimiser and random numbers; tensors, numbers, text.
            describe: writes the model's files besides config and weights into a folder.
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
        writer = shards.Writer(unfinished / TRAINING)
        written = dcp.async_save(
            _tensors(get_optimizer_state_dict(model, optimizer)), storage_writer=writer, process_group=ours.saving
        )
        if ours.first:
            if self.background:  # the next step changes these tensors
                weights = copy.deepcopy(weights)
            written = self._thread.submit(self._publish, written, make, weights, unfinished)
        self._written = written
        if not self.background:
            self.finish()

    def finish(self) -> None:
        """Wait until the last checkpoint is complete, in all processes."""
        if self._written is not None:
            self._written.result()
            self._written = None
            self.processes.wait()

    def _publish(
        self, written: Future, make: Callable[[], PretrainedModel], weights: dict[str, Any], unfinished: Path
    ) -> None:
        # Done in this process only after all others have written.
        written.result()
        with torch.device("meta"):
            whole = make()
        whole.load_state_dict(weights, assign=True)
        whole.save_pretrained(unfinished)
        for path in (*unfinished.rglob("*"), unfinished):
            sync(path)
        final = self.output / unfinished.stem.removeprefix(".")
        os.rename(unfinished, final)
        show(self.output, final)
        sync(self.output)
        for old in checkpoints(self.output)[: -self.keep]:
            if old != final:
                remove_one(old)


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
    """Restore the optimiser's tensors and the random numbers; returns the process's own saved state.

    Learning rates are not restored, because they follow from the options and the step.

    Raises:
        ValueError: a file is missing or damaged.
    """
    own = _read(checkpoint / f"process-{processes.rank}.pt")
    state, folder = get_optimizer_state_dict(model, optimizer), checkpoint / TRAINING
    try:
        reader = shards.Reader(folder)
        saved = reader.read_metadata().state_dict_metadata
        # Parameters without any gradient so far have no state.
        had = {name for name in state["state"] if any(key.startswith(f"{name}/") for key in saved)}
        state["state"] = {name: values for name, values in state["state"].items() if name in had}
        tensors = _tensors(state)
        dcp.load(tensors, storage_reader=reader, process_group=processes.saving)
        for name, values in state["state"].items():
            values.update({key: tensors[f"{name}/{key}"] for key in values})
    except (dcp.CheckpointException, *DAMAGED) as error:
        raise ValueError(f"{folder} is missing or damaged: {str(error).strip().splitlines()[-1]}") from None
    set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(strict=False))
    random = own.pop("random")
    torch.set_rng_state(random["cpu"])
    if processes.device.type == "cuda" and "cuda" in random:
        torch.cuda.set_rng_state(random["cuda"])
    return own


def _tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of an optimiser's state, as PARAMETER/NAME."""
    return {f"{name}/{key}": value for name, values in state["state"].items() for key, value in values.items()}


def _random_state(device: torch.device) -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    return state | {"cuda": torch.cuda.get_rng_state()} if device.type == "cuda" else state


def _read(path: Path) -> dict[str, Any]:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except DAMAGED as error:
        raise ValueError(f"{path} is missing or damaged: {str(error).splitlines()[0]}") from None
