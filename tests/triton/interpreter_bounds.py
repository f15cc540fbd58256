"""Bounds for Triton's interpreter: every address that a kernel reads, writes or adds to lies in a tensor of its call.

The interpreter takes any address of the process. Here each tensor is copied to where guard zones surround it, so that
no other tensor lies near, and each access is looked up among what the tensors cover.
"""

from __future__ import annotations

import numpy as np
import torch

GUARD = 1 << 18  # bytes; a multiple of every element's size


class OutOfBounds(Exception):
    """A kernel touched what is not its own."""


class _Launch:
    """The tensors of one launch: copies between guard zones, and the addresses that they cover."""

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel
        self.storages: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}
        self.covered: list[tuple[int, int]] = []

    def guarded(self, value):
        """`value` with its tensors replaced by guarded copies."""
        if isinstance(value, tuple):
            members = [self.guarded(member) for member in value]
            return type(value)(*members) if hasattr(value, "_fields") else tuple(members)
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage()
        if storage.data_ptr() not in self.storages:
            copy = torch.full((storage.nbytes() + 2 * GUARD,), 255, dtype=torch.uint8)  # NaN
            copy[GUARD : GUARD + storage.nbytes()] = _bytes(storage)
            self.storages[storage.data_ptr()] = storage, copy
        copy = self.storages[storage.data_ptr()][1]
        place = GUARD // value.itemsize + value.storage_offset()
        twin = value.new_empty(0).set_(copy.untyped_storage(), place, value.shape, value.stride())
        if value.numel():
            last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
            self.covered.append((twin.data_ptr(), twin.data_ptr() + (last + 1) * value.itemsize))
        return twin

    def close(self) -> None:
        """Sorts what is covered into ranges that do not overlap."""
        ranges: list[list[int]] = []
        for begin, end in sorted(self.covered):
            if ranges and begin <= ranges[-1][1]:
                ranges[-1][1] = max(ranges[-1][1], end)
            else:
                ranges.append([begin, end])
        self.begins, self.ends = (np.array([r[i] for r in ranges], dtype=np.uint64) for i in (0, 1))

    def restore(self) -> None:
        for storage, copy in self.storages.values():
            _bytes(storage).copy_(copy[GUARD : GUARD + storage.nbytes()])

    def check(self, what: str, pointers, mask) -> None:
        addresses = np.broadcast_to(pointers.data, np.broadcast_shapes(pointers.data.shape, mask.data.shape))
        addresses = addresses[np.broadcast_to(mask.data, addresses.shape).astype(bool)]
        index = np.searchsorted(self.begins, addresses, side="right")
        size = np.uint64(max(1, pointers.get_element_ty().primitive_bitwidth // 8))
        ends = np.concatenate([np.zeros(1, np.uint64), self.ends])[index]
        outside = int((addresses + size > ends).sum())
        if outside:
            raise OutOfBounds(f"{self.kernel}: {what}: {outside} of {addresses.size} addresses outside of its tensors")


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),))


def install() -> None:
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    launches: list[_Launch] = []

    def to_host(self, arguments, named):
        launches.append(_Launch(self.fn.__name__))
        found = [launches[-1].guarded(a) for a in arguments], {n: launches[-1].guarded(a) for n, a in named.items()}
        launches[-1].close()
        return found

    def to_device(self, *_):
        launches.pop().restore()

    def checked(name, find_mask):
        original = getattr(builder, name)

        def access(self, *arguments):
            pointers, mask = find_mask(*arguments)
            launches[-1].check(name.removeprefix("create_"), pointers, mask)
            return original(self, *arguments)

        setattr(builder, name, access)

    checked("create_masked_load", lambda pointers, mask, *_: (pointers, mask))
    checked("create_masked_store", lambda pointers, value, mask, *_: (pointers, mask))
    checked("create_atomic_rmw", lambda operation, pointers, value, mask, *_: (pointers, mask))
    executor._init_args_hst, executor._restore_args_dev = to_host, to_device
