"""Registers and spills of each attention kernel, from ptxas in the output of a build.

pip install -v . > build.log
python benchmarks/compiled/ptxas_report.py build.log benchmarks/results/cuda-compiled.json
"""

from __future__ import annotations

import argparse
import functools
import json
import re
from pathlib import Path
from typing import NamedTuple

# Bytes stored to and loaded from registers' stand-ins in memory, at most: measured with CUDA 13.0, rounded up. forward:
# 396 in float32 at 128 on sm_80. backward: 208 in 16 bits at 64 on sm_90.
SPILLED_BYTES = {"forward": 400, "backward": 210}
REGISTERS = 65536  # of a multiprocessor

_ENTRY = re.compile(
    r"Compiling entry function '(\w+)' for '(\w+)'.*?"
    r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
    re.S,
)


_DTYPES = {"float": "float32", "Half": "float16", "BFloat16": "bfloat16"}


@functools.cache
def _threads() -> dict[tuple[str, str, int], int]:
    from xlnet_kernels import _extension

    return {
        (sizes["kernel"], sizes["dtype"], sizes["head_dim"]): sizes["threads"]
        for sizes in _extension.module.cuda_kernels()
    }


class Kernel(NamedTuple):
    kernel: str  # "forward" or "backward"
    dtype: str
    width: int
    architecture: str
    spilled: int
    registers: int

    @property
    def threads(self) -> int:
        """Threads of a block, from the compiled extension."""
        return _threads()[self.kernel, _DTYPES[self.dtype], self.width]


def kernels(output: str) -> list[Kernel]:
    """The attention kernels in the output of a build, without the small kernels around them."""
    found = []
    for name, architecture, stores, loads, registers in _ENTRY.findall(output):
        kind = re.search(r"\d(forward|backward)_kernelINS\w*?Shape\w*?(Half|BFloat16|If)\w*?Li(\d+)E(?!Lb1E)", name)
        if kind:
            dtype = {"If": "float"}.get(kind[2], kind[2])
            found.append(Kernel(kind[1], dtype, int(kind[3]), architecture, int(stores) + int(loads), int(registers)))
    return found


def check(found: list[Kernel]) -> None:
    """Spills within their bounds; two blocks of forward at a time on a multiprocessor, and of narrow backward."""
    assert found
    for kernel in found:
        assert kernel.spilled <= SPILLED_BYTES[kernel.kernel], kernel
        if kernel.threads <= 128:
            assert 2 * kernel.threads * kernel.registers <= REGISTERS, kernel


def main(log: str, output: str) -> None:
    text = Path(log).read_text()
    version = re.search(r"CUDA_VERSION=(\S+)", text)
    found = sorted(set(kernels(text)))
    rows = [json.dumps(kernel._asdict() | {"threads": kernel.threads}) for kernel in found]
    head = json.dumps({"torch_cuda": version[1] if version else None})
    Path(output).write_text(head[:-1] + ', "rows": [\n' + ",\n".join(rows) + "\n]}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", help="output of the build")
    parser.add_argument("output", help="file of results")
    main(**vars(parser.parse_args()))
