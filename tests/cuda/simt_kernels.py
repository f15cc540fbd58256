"""selftest.cu from Python."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import torch

SELFTEST = Path(__file__).with_name("selftest.cu")


def arguments(name: str, **fields) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


POINTER, INT = ctypes.c_void_p, ctypes.c_int
NUMBERS = ["half", "bfloat16", "tf32", "exp2", "from_half", "from_bfloat16"]
Numbers = arguments("Numbers", inputs=POINTER, half_in=POINTER, count=INT, **dict.fromkeys(NUMBERS, POINTER))
Warp = arguments("Warp", source=POINTER, mask=INT, shuffled=POINTER, exchanged=POINTER, ballots=POINTER)
Matrices = arguments("Matrices", inputs=POINTER, straight=POINTER, transposed=POINTER)
Product = arguments("Product", a=POINTER, b=POINTER, sum=POINTER, repeats=INT)
Sums = arguments("Sums", inputs=POINTER, out=POINTER, rounds=INT, mistake=INT, zero=INT)
Access = arguments("Access", to=POINTER, memory=POINTER, index=INT, thread=INT, write=ctypes.c_bool)
Grid = arguments("Grid", out=POINTER, counter=POINTER)
Index = arguments("Index", x=INT, y=INT, z=INT)


class Kernels:
    """The library's kernels; tensors in argument structs become addresses."""

    def __init__(self, path: Path):
        self.library = ctypes.CDLL(str(path))

    def __call__(
        self, name: str, struct: type[ctypes.Structure], values: tuple, *more, seed: int | None = 0
    ) -> str | None:
        """The error's text, or None. Without a seed the schedule goes on."""
        if seed is not None:
            self.library.set_schedule(ctypes.c_uint64(seed))
        run = getattr(self.library, f"run_{name}")
        run.restype = ctypes.c_char_p
        values = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in values]
        error = run(struct(*values), *more)
        return error and error.decode()


def mistake(name: str) -> int:
    """The value of selftest.cu's enumerator."""
    names = re.search(r"enum Mistake : int \{(.*?)\}", SELFTEST.read_text(), re.DOTALL)[1]
    return re.findall(r"\w+", names).index(name)


def words(*shape: int) -> torch.Tensor:
    return torch.full(shape, -1, dtype=torch.int32)
