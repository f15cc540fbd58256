"""Code in several processes that talk over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests import ROOT

# At the end Python must not be torn down: a thread of gloo that drops its last tensors then would end the process with
# an error (pytorch/pytorch#117762).
SCRIPT = """
import os, sys, torch, torch.distributed as dist
rank, size, store, code = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
dist.barrier()  # to avoid that a process ends while another is still connecting
exec(code)
dist.destroy_process_group()
os._exit(0)
"""


def run_in_processes(code: str, size: int, folder: Path, timeout: float = 400) -> None:
    """Runs `code`, which knows its `rank` and the `size`, in so many processes; fails where one of them fails."""
    command = [sys.executable, "-X", "faulthandler", "-c", SCRIPT]
    how = dict(cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True)
    store = str(folder / "store")
    processes = [subprocess.Popen([*command, str(rank), str(size), store, code], **how) for rank in range(size)]
    try:
        for process in processes:
            errors = process.communicate(timeout=timeout)[1]
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
