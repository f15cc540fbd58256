"""Makes the package's GPU backends serve CPU tensors, executed by the machine."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch

from lib.machine import cuda_driver
from lib.machine.triton_driver import Record, on_machine
from xlnet_kernels.backends import cuda as cuda_backend
from xlnet_kernels.backends import triton as triton_backend

TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@functools.cache
def _register() -> None:
    """The Triton operators for CPU tensors as well; the package registers them for one device type only."""
    from xlnet_kernels.backends.triton import launch

    torch.library.impl("xlnet_kernels::rel_attention_triton", "cpu", launch.forward)
    torch.library.impl("xlnet_kernels::rel_attention_triton_backward", "cpu", launch.backward)


@contextlib.contextmanager
def serving(architecture: int, *, size: tuple[int, int] = (3, 4), **how) -> Iterator[Record]:
    """Within it backend="triton" and "cuda" take tensors of the CPU, as on a GPU of `architecture`.

    size: how many processors the CUDA backend believes in, and how many tiles of keys are worth a block there.
    how: see on_machine.
    """
    from xlnet_kernels.backends.triton import launch_cache

    _register()
    changes = {
        (triton_backend, "DEVICE"): "cpu",
        (triton_backend, "DTYPES"): TRITON_DTYPES,
        (triton_backend, "_unavailable"): lambda device: None,
        (cuda_backend, "DEVICE"): "cpu",
        (cuda_backend, "_unavailable"): lambda device: cuda_driver.unavailable(),
        (cuda_backend, "max_head_dim"): lambda dtype, device=None: 128,
        (cuda_backend, "rel_attention"): cuda_driver.rel_attention,
        (launch_cache, "plans"): {},  # kernels are compiled for this architecture
        (cuda_driver.Device, "size"): size,
        (torch.cuda, "get_device_capability"): lambda device=None: divmod(architecture, 10),
    }
    before = {place: getattr(*place) for place in changes}
    try:
        for (module, name), value in changes.items():
            setattr(module, name, value)
        with on_machine(architecture, **how) as record:
            cuda_driver.Device.record, outer = record, cuda_driver.Device.record
            yield record
    finally:
        cuda_driver.Device.record = outer
        for (module, name), value in before.items():
            setattr(module, name, value)
