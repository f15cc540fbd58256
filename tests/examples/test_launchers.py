"""The commands of docs/how-to/train-at-scale.md: launchers, two machines that are one, a killed process."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import ROOT
from tests.examples.test_pretrain import TINY, environment, lines, pretrain, text  # noqa: F401

for name in ("rich", "transformers", "accelerate"):
    pytest.importorskip(name)

pytestmark = [
    pytest.mark.usefixtures("scripts", "one_thread"),
    pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes in Linux' /proc"),
]

MODULES = {"torchrun": ["torch.distributed.run"], "accelerate": ["accelerate.commands.accelerate_cli"]}


def commands(start: str) -> list[str]:
    """The page's commands that begin so."""
    page = (ROOT / "docs" / "how-to" / "train-at-scale.md").read_text()
    return [
        line for line in re.findall(r"^(\w.* examples/pretrain\.py.*)$", page, re.MULTILINE) if line.startswith(start)
    ]


def launch(command: str, port: int, *arguments: object) -> subprocess.Popen:
    """Starts a command of the page, with our port, one process for each machine or two on one."""
    machines = re.search(r"--nnodes (\d)", command)
    here = "1" if machines else "2"
    command = re.sub(r"(--nproc-per-node|--num_processes) \d+", rf"\1 {here}", command)
    command = command.replace("node0", "127.0.0.1").replace("29500", str(port))
    command = command.replace("accelerate launch", f"accelerate launch --main_process_port {port}")
    program, *rest = shlex.split(command)
    whole = [sys.executable, "-m", *MODULES[program], *rest, *map(str, arguments), "--device", "cpu"]
    return subprocess.Popen(whole, cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_process_of_two_machines_is_killed_and_another_launcher_goes_on(pretrain, tmp_path, text):  # noqa: F811
    arguments = (*TINY, "--lr", 0.01, "--steps", 60, "--save-every", 4, "--text", text, "--output", tmp_path / "two")
    assert pretrain("one", *arguments[:-4]) == 0
    port = free_port()
    agents = [launch(command, port, *arguments) for command in commands("torchrun --nnodes 2")]
    assert len(agents) == 2
    metrics, end = tmp_path / "two" / "metrics.jsonl", time.monotonic() + 300
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 11:
        assert time.monotonic() < end and all(agent.poll() is None for agent in agents), "no steps were made"
        time.sleep(0.01)
    (worker,) = children(agents[1].pid)
    os.kill(worker, signal.SIGKILL)
    for agent in agents:
        errors = agent.communicate(timeout=300)[1]
        assert agent.returncode != 0, errors
    done, steps = max((tmp_path / "two").glob("step-*")), max(lines(tmp_path / "two"))
    # of the checkpoint every 4 steps the one before the last was whole when the last one was begun
    assert steps < 60 and 4 <= (steps - 1) // 4 * 4 - 4 <= int(done.name[5:]) <= steps

    (command,) = commands("accelerate launch")
    resumed = launch(command, port, *arguments, "--parallel", "fsdp2", "--resume")
    errors = resumed.communicate(timeout=300)[1]
    assert resumed.returncode == 0, errors
    # The batch's sum is added in two halves: 60 float32 steps at this rate amplify the last bit to about 1e-5.
    assert lines(tmp_path / "two") == pytest.approx(lines(tmp_path / "one"), rel=1e-4)
