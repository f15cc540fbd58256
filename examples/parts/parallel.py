"""Parallel training: several processes by torchrun, replicated (DDP) or sharded (FSDP2), or a single process."""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import xlnet_kernels as xk


@dataclass(frozen=True)
class Processes:
    """This process among `world_size`; also works without a process group."""

    rank: int
    world_size: int
    device: torch.device
    saving: dist.ProcessGroup | None = None  # another group, for checkpoints written during training

    @property
    def first(self) -> bool:
        return self.rank == 0

    def mean(self, *values: float) -> list[float]:
        """Each value's mean over the processes, equal in all of them."""
        if not dist.is_initialized():
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return (total / self.world_size).tolist()

    def share(self, value: Any) -> Any:
        """The first process's value."""
        if not dist.is_initialized():
            return value
        values = [value]
        dist.broadcast_object_list(values, device=self.device)
        return values[0]

    def wait(self) -> None:
        """Wait for all processes."""
        if dist.is_initialized():
            dist.barrier()


def settle_place(options: argparse.Namespace) -> None:
    """Complete --device; raises ValueError if the device or the backend of the attention is unavailable."""
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no CUDA device")
    state = options.backend and xk.backends()[options.backend]
    if state and not state.available:
        raise ValueError(f"--backend {options.backend}: {state.reason}")


@contextmanager
def processes(device: str) -> Iterator[Processes]:
    """Context with the processes of torchrun joined in a group, or with this process only."""
    place = torch.device(device)
    if "RANK" not in os.environ:
        yield Processes(0, 1, place)
        return
    if device == "cuda":
        place = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(place)
    ours = not dist.is_initialized()
    if ours:
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    saving = dist.new_group(backend="gloo")
    # To avoid that a process leaves while another is still connecting, which makes that one fail
    dist.barrier(saving)
    try:
        yield Processes(dist.get_rank(), dist.get_world_size(), place, saving)
    finally:
        dist.destroy_process_group(None if ours else saving)


def distribute(model: xk.XLNetLMHeadModel, kind: str, device: torch.device) -> nn.Module:
    """The model for training in all processes: unchanged, under DDP, or sharded layer by layer (FSDP2)."""
    if not dist.is_initialized():
        return model
    if kind == "ddp":
        return DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    # Ignored, because mems are views that nothing changes in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.transformer.layer:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)
