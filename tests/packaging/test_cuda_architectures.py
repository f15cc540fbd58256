"""Architecture lists that people and images have: built for what can be built, and a reason for what is left out."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from torch.utils import cpp_extension

from tests import ROOT

sys.path.insert(0, str(ROOT / "build_backend"))

from build_decisions import cuda_decision  # noqa: E402
from cuda_architectures import NAMES, choose, known_to  # noqa: E402

OLD = "the kernels need 8.0 or later"
# what nvcc --list-gpu-arch of CUDA 13.0 and 12.4 prints
NEW_NVCC = (75, 80, 86, 87, 88, 89, 90, 100, 110, 103, 120, 121)
OLD_NVCC = (50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 90)


def stand_in_nvcc(folder, numbers, version="13.0"):
    """An nvcc that says which architectures it knows, and compiles nothing."""
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True, exist_ok=True)
    known = "\\n".join(f"compute_{number}" for number in numbers)
    nvcc.write_text(f"""#!/bin/sh
[ "$1" = --list-gpu-arch ] && printf '{known}\\n'
[ "$1" = --version ] && echo 'Cuda compilation tools, release {version}, V{version}.1'
exit 0
""")
    nvcc.chmod(0o755)
    return str(nvcc)


def torch_takes(name):
    """By torch's own table; a variable of its own, so that nothing of this process changes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_CUDA_ARCH_LIST", name)
        try:
            cpp_extension._get_cuda_arch_flags()
        except ValueError:
            return False
    return True


@pytest.mark.parametrize(
    ("asked", "names", "left_out"),
    [
        ("7.5", [], [f"7.5 ({OLD})"]),  # T4
        ("7.0", [], [f"7.0 ({OLD})"]),  # V100
        ("7.0;7.5+PTX", [], [f"7.0 ({OLD})", f"7.5+PTX ({OLD})"]),
        (
            "7.5 8.0 8.6 9.0 10.0 12.0+PTX",  # NGC's images
            ["8.0", "8.6", "9.0a", "10.0", "12.0+PTX"],
            [f"7.5 ({OLD})"],
        ),
        ("5.2 6.0 6.1 7.0 7.2 7.5 8.0 8.6 8.7 9.0+PTX", ["8.0", "8.6", "8.7+PTX", "9.0a"], None),
        ("8.0, 8.6", ["8.0", "8.6"], []),
        ("Hopper", ["8.0+PTX", "9.0a"], []),
        ("hopper", ["8.0+PTX", "9.0a"], []),
        ("Ampere", ["8.0", "8.6+PTX"], []),
        ("Ampere+Tegra;Ada", ["8.7", "8.9+PTX"], []),
        ("Turing", [], [f"7.5+PTX of Turing ({OLD})"]),
        ("Volta;Ampere", ["8.0", "8.6+PTX"], [f"7.0+PTX of Volta ({OLD})"]),
        ("Blackwell", ["10.0", "10.3", "12.0", "12.1+PTX"], []),
        ("9.0", ["9.0a"], []),
        ("9.0a", ["9.0a"], []),
        ("9.0;9.0a", ["9.0a"], []),
        ("9.0+PTX", ["8.0+PTX", "9.0a"], []),
        ("8.0;9.0a+PTX", ["8.0+PTX", "9.0a"], []),
        ("10.0a", ["10.0a"], []),
        ("8.0;8.0;8.0", ["8.0"], []),
        ("Rubin;8.0", ["8.0"], ["Rubin (no architecture that torch names)"]),
        ("sm_80", [], ["sm_80 (no architecture that torch names)"]),
        ("nonsense", [], ["nonsense (no architecture that torch names)"]),
        ("14.0;9.0", ["9.0a"], ["14.0 (this nvcc does not know it)"]),
        ("8.8", [], ["8.8 (this torch does not take it)"]),
        ("", ["8.0", "9.0a", "10.0+PTX"], []),
        ("native", ["8.0", "9.0a", "10.0+PTX"], []),
        (" ; ", [], []),
    ],
)
def test_lists(tmp_path, asked, names, left_out):
    known = known_to(stand_in_nvcc(tmp_path, NEW_NVCC))
    found = choose(asked, [], known, torch_takes)
    assert found.names == names and (left_out is None or found.left_out == left_out)
    assert all(torch_takes(name) for name in found.names)


def test_an_older_nvcc_compiles_what_it_knows(tmp_path):
    known = known_to(stand_in_nvcc(tmp_path, OLD_NVCC))
    reason = "this nvcc does not know it"
    found = choose("8.0 10.0 12.0+PTX", [], known, torch_takes)
    assert found == (["8.0"], [f"10.0 ({reason})", f"12.0+PTX ({reason})"])
    assert choose("", [], known, torch_takes) == (["8.0+PTX", "9.0a"], [])
    # a card that is newer than nvcc runs PTX
    assert choose("", [(12, 0)], known, torch_takes) == (["8.0+PTX"], [f"12.0 ({reason}, PTX of 8.0 is for it)"])


def test_an_older_torch_compiles_what_it_takes():
    assert choose("", [], (), lambda name: not name.startswith("1")) == (["8.0+PTX", "9.0a"], [])


@pytest.mark.parametrize(
    ("seen", "names", "left_out"),
    [
        ([(7, 5)], [], [f"7.5 ({OLD})"]),
        ([(8, 6), (7, 5)], ["8.6"], [f"7.5 ({OLD})"]),
        ([(9, 0), (8, 6)], ["8.6", "9.0a"], []),
    ],
)
def test_cards_of_this_machine(seen, names, left_out):
    assert choose("", seen) == (names, left_out)
    assert choose("native", seen) == (names, left_out)


def test_an_nvcc_that_lists_nothing_leaves_nothing_out(tmp_path):
    assert known_to(stand_in_nvcc(tmp_path, ())) == set()
    assert choose("12.0", [], ()) == (["12.0"], [])


def test_names_are_those_of_torch():
    assert all(torch_takes(name) or name.startswith("Blackwell") for name in NAMES)


def decided(environ, asked, nvcc_cuda="13.0"):
    return cuda_decision(environ, "13.0", "nvcc", ["a.cu"], nvcc_cuda, lambda: choose(asked, []))


def test_decision_says_what_is_left_out():
    assert decided({}, "7.5 8.0").reason.endswith(f"there is nvcc, for 8.0; left out: 7.5 ({OLD})")
    nothing = decided({}, "7.5")
    assert not nothing.build and f"nothing that is asked for can be compiled (left out: 7.5 ({OLD}))" in nothing.reason
    with pytest.raises(ValueError, match=r"FORCE_CUDA=1, but nothing .* FORCE_CUDA=0 builds without CUDA"):
        decided({"FORCE_CUDA": "1"}, "7.5")


def test_an_nvcc_of_another_major_version_is_not_used():
    """torch's cpp_extension would end the whole installation."""
    found = decided({}, "8.0", "12.6")
    assert not found.build and "torch is built for CUDA 13.0 and nvcc is of CUDA 12.6" in found.reason
    assert decided({}, "8.0", "13.2").build and decided({}, "8.0", None).build


SETUP = """
import os, runpy, sys
import torch
from torch.utils import cpp_extension
torch.version.cuda = "13.0"
cpp_extension.CUDA_HOME = sys.argv.pop(1)
runpy.run_path("setup.py", run_name="__main__")
print("compiles for", os.environ["TORCH_CUDA_ARCH_LIST"])
"""


@pytest.mark.parametrize(
    ("asked", "build", "compiled"),
    [("7.5 8.0 9.0+PTX", "yes", "8.0+PTX;9.0a"), ("7.5", "no", ""), ("Hopper", "yes", "8.0+PTX;9.0a")],
)
def test_setup_prints_one_line_and_goes_on(tmp_path, asked, build, compiled):
    stand_in_nvcc(tmp_path, NEW_NVCC)
    command = [sys.executable, "-c", SETUP, str(tmp_path), "build_py", "--build-lib", str(tmp_path / "lib")]
    environ = {name: value for name, value in os.environ.items() if name not in ("FORCE_CUDA", "CC", "CXX")}
    environ["TORCH_CUDA_ARCH_LIST"] = asked
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("xlnet_kernels: CUDA: ")]
    assert line.startswith(f"xlnet_kernels: CUDA: {build}, because") and (f"left out: 7.5 ({OLD})" in line) == (
        "7.5" in asked
    )
    assert f"compiles for {compiled}\n" in done.stdout
    record = json.loads((tmp_path / "lib" / "xlnet_kernels" / "_build_info.json").read_text())
    assert f"xlnet_kernels: CUDA: {record['cuda']}" == line
