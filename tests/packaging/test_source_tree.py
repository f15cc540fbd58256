"""Python started in the root of a source tree that was never built, and extensions that cannot be loaded."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
import torch

from tests import ROOT
from xlnet_kernels import _extension
from xlnet_kernels._sources import digest

SAY = """
import xlnet_kernels as xk
from xlnet_kernels import _extension
print(xk.__file__, _extension.module and _extension.module.__file__, xk.backends()["cpu"], sep="\\n")
"""
WARNING = "RuntimeWarning: xlnet_kernels runs without its C++ and CUDA kernels: "
OWN_FAST_PATH = f"_fast_path{EXTENSION_SUFFIXES[0]}"
PYTHON_ONLY = shutil.ignore_patterns("*.so", "_build_info.json", "__pycache__")


def start(tree: Path, installed: Path, command: str = SAY, *, arguments=()) -> subprocess.CompletedProcess:
    """Python in `tree`, whose packages are torch's and `installed`; -S: this environment's own package is none."""
    path = os.pathsep.join([str(installed), *(entry for entry in sys.path if entry.endswith("-packages"))])
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": path}
    command = [sys.executable, "-S", "-c", command, *map(str, arguments)]
    return subprocess.run(command, cwd=tree, env=environ, capture_output=True, text=True)


@pytest.fixture
def tree(tmp_path) -> Path:
    shutil.copytree(ROOT / "xlnet_kernels", tmp_path / "tree" / "xlnet_kernels", ignore=PYTHON_ONLY)
    shutil.copytree(ROOT / "csrc", tmp_path / "tree" / "csrc")
    return tmp_path / "tree"


@pytest.fixture
def installed(tmp_path, tree) -> Path:
    """A folder with the package and its extension, as `pip install .` in `tree` leaves them."""
    if _extension.module is None:
        pytest.skip(f"there is no extension here: {_extension.reason}")
    folder = shutil.copytree(tree / "xlnet_kernels", tmp_path / "installed" / "xlnet_kernels")
    file = Path(_extension.module.__file__)
    (folder / file.name).symlink_to(file)
    record = {"torch": torch.__version__, "extension": "yes", "sources": digest(tree / "csrc")}
    (folder / "_build_info.json").write_text(json.dumps(record))
    return folder.parent


def test_source_tree_takes_the_installed_extension(tree, installed):
    done = start(tree, installed)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    package, extension, cpu = done.stdout.splitlines()
    assert Path(package).parent == tree / "xlnet_kernels"
    assert Path(extension).parent == installed / "xlnet_kernels" and cpu == "ready"
    info = start(tree, installed, "import runpy; runpy.run_module('xlnet_kernels.info', run_name='__main__')")
    assert re.search(rf"  in +{re.escape(str(installed / 'xlnet_kernels'))}\n", info.stdout)
    assert "never built" not in info.stdout


@pytest.mark.parametrize("change", ["sources", "version", "nothing installed"])
def test_source_tree_says_what_to_do(tree, installed, change):
    wanted = "this source tree was never built (pip install -e .)"
    if change == "sources":
        (tree / "csrc" / "call.cpp").write_text("// of a later commit")
        wanted += f"; the one in {installed / 'xlnet_kernels'} was built from other sources"
    elif change == "version":
        (installed / "xlnet_kernels" / "_version.py").write_text('__version__ = "0.0.1"')
    else:
        shutil.rmtree(installed)
    done = start(tree, installed)
    assert done.returncode == 0 and WARNING in done.stderr and wanted in done.stderr
    assert "never built" in done.stdout


OLD_TORCH = "import torch; torch.__version__ = '2.9.1'\n"


@pytest.mark.parametrize("broken", ["torch", "file", "left out"])
def test_library_that_cannot_be_loaded_is_a_warning(tree, installed, broken, tmp_path):
    folder = installed / "xlnet_kernels"
    record = json.loads((folder / "_build_info.json").read_text())
    if broken != "torch":
        (folder / Path(_extension.module.__file__).name).unlink()
        if broken == "file":
            (folder / Path(_extension.module.__file__).name).write_bytes(b"not a library")
        else:
            (folder / "_build_info.json").write_text(json.dumps(record | {"extension": "no, because of a test"}))
    done = start(tmp_path, installed, (OLD_TORCH if broken == "torch" else "") + SAY)
    file = "is no library of this platform" if sys.platform == "linux" else "does not load"
    old = 'compiled kernels need torch 2.10 or later, you have 2.9.1: backend "torch" serves'
    texts = {"torch": old, "file": file, "left out": "because of a test"}
    text = texts[broken]
    assert done.returncode == 0 and text in done.stdout
    assert (WARNING in done.stderr and text in done.stderr) or broken == "left out" and done.stderr == ""


BREAK = {  # what becomes of the library's bytes, and what is said of the file
    "truncated": (lambda code: code[: len(code) // 2], r" is truncated: it has \d+ bytes of at least \d+: install"),
    "header alone": (lambda code: code[:64], r" is truncated: it has 64 bytes"),
    "empty": (lambda code: b"", " is no library of this platform: install"),
    "of another processor": (
        lambda code: code[:18] + b"\x2a\x00" + code[20:],
        " is for machine 42, 64 bits, this Python",
    ),
    "of 32 bits": (
        lambda code: code[:4] + b"\x01" + code[5:],
        " is for .*, 32 bits, this Python for .*, 64 bits: install",
    ),
    "no libgomp": (
        lambda code: code.replace(b"libgcc_s.so.1\0", b"libgomp.so.77\0"),
        r" does not load \(built with torch .*\): it needs libgomp.so.77, which this system has not got "
        r"\(Debian, Ubuntu: apt-get install libgomp1\)$",
    ),
    "another ABI": (
        lambda code: code.replace(b"\0torch_library_impl\0", b"\0torch_library_impX\0"),
        r" does not load .*: it was built for another torch or Python \(undefined symbol: \w+\): install",
    ),
    "of older sources": (
        lambda code: code.replace(b"build_facts() -> str", b"older_facts() -> str"),
        r" does not load .*: '_OpNamespace' 'xlnet_kernels' object has no attribute 'build_facts': install",
    ),
}

LOAD = """
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
import torch
import xlnet_kernels as xk
from xlnet_kernels import _extension
for folder in sys.argv[1:]:
    xk.__path__, _extension.HERE = [folder], Path(folder)
    module, reason = _extension.load()
    assert module is None
    print(reason, flush=True)
x = torch.ones(1, 1, 2, 8)
print(xk.rel_attention(x, x, x, torch.ones(1, 4, 8)).sum().item(), xk.backends()["torch"])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="their loaders say so themselves")
def test_a_broken_library_is_named_and_the_torch_backend_serves(tree, installed, tmp_path):
    """All in one process, which no broken file ends."""
    file = Path(_extension.module.__file__)
    code, folders = file.read_bytes(), []
    for name, (change, _) in BREAK.items():
        changed = change(code)
        assert changed != code
        folders.append(tmp_path / name)
        folders[-1].mkdir()
        (folders[-1] / file.name).write_bytes(changed)
        shutil.copy(installed / "xlnet_kernels" / "_build_info.json", folders[-1])
    shutil.rmtree(installed)
    done = start(tree, tmp_path / "nowhere", LOAD, arguments=folders)
    assert done.returncode == 0, done.stderr
    *lines, fallback = done.stdout.splitlines()
    assert fallback == "16.0 ready" and len(lines) == len(folders)
    for folder, line, (_, wanted) in zip(folders, lines, BREAK.values(), strict=True):
        assert re.match(re.escape(str(folder / file.name)) + wanted, line), line


FAST_PATHS = {  # the file beside the library, what the build recorded otherwise, and what is said of it
    "none": (None, {}, r"it was not built \(it is for one Python and torch: install from source\)"),
    "another Python": (
        "_fast_path.cpython-37m-x86_64-linux-gnu.so",
        {},
        r"the one here, _fast_path.cpython-37m-x86_64-linux-gnu.so, is for another Python \(it is",
    ),
    "another torch": (
        OWN_FAST_PATH,
        {"torch": "2.10.0"},
        r"it was built for torch 2.10.0, you have .*: install xlnet_kernels again from source",
    ),
    "an earlier build": (
        OWN_FAST_PATH,
        {"fast_path": "no, because XLNET_KERNELS_FAST_PATH=0"},
        r"it was not built \(no, because XLNET_KERNELS_FAST_PATH=0\)",
    ),
    "broken": (
        OWN_FAST_PATH,
        {},
        r"is no library of this platform|.* does not load: .*: install xlnet_kernels again",
    ),
}
SAY_FAST_PATH = """
from xlnet_kernels import _extension, fast_path
print(_extension.module.__file__, fast_path._fast_path, _extension.fast_path_reason, sep="\\n")
"""


@pytest.mark.parametrize("case", FAST_PATHS)
def test_the_library_serves_without_a_fast_path_that_fits(tree, installed, case):
    name, recorded, wanted = FAST_PATHS[case]
    folder = installed / "xlnet_kernels"
    if name:
        (folder / name).write_bytes(b"not a library")
    record = json.loads((folder / "_build_info.json").read_text())
    (folder / "_build_info.json").write_text(json.dumps(record | recorded))
    done = start(tree, installed, SAY_FAST_PATH)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    file, fast_path, reason = done.stdout.splitlines()
    assert Path(file).parent == folder and fast_path == "None" and re.match(wanted, reason), reason


def test_parts_are_imported_when_they_are_asked_for():
    """Not earlier, because they cost time, and transformers' stand-ins need transformers."""
    code = """
import sys
import xlnet_kernels as xk
late = "pretraining", "integrations.conformer", "integrations.transformers"
assert not any(f"xlnet_kernels.{name}" in sys.modules for name in late) and "transformers" not in sys.modules
assert {"pretraining", "rel_attention"} <= set(dir(xk)) and "conformer" in dir(xk.integrations)
xk.pretraining.PermutationLM, xk.integrations.conformer.RelPositionAttention, xk.integrations.transformers.accelerate
for module in (xk, xk.integrations):
    try:
        module.nothing
    except AttributeError as error:
        assert "has no attribute 'nothing'" in str(error)
"""
    done = start(ROOT, ROOT, code)
    assert done.returncode == 0, done.stderr
