"""Installs the package in real, throw-away virtual environments: every way in that the README names.

Slow: each test makes an environment and most of them compile. One environment gets a real torch; the others borrow
that one through a .pth file, and all compilers share a cache (cached_compiler.py).
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
TORCH = f"torch=={torch.__version__.split('+')[0]}"
# What pip prints when it gets a torch, from wherever.
TORCH_FETCHED = re.compile(r"^\s*(Collecting torch(?![\w-])|(Downloading|Using cached|Processing) \S*torch-\d)", re.M)
# Would decide the build from outside.
OURS = ("XLNET_KERNELS_SKIP_EXT", "FORCE_CUDA", "TORCH_CUDA_ARCH_LIST", "MAX_JOBS", "PYTHONPATH", "VIRTUAL_ENV")
SMOKE = """
import torch, xlnet_kernels as xk
x = torch.randn(1, 2, 5, 8)
out = xk.rel_attention(x, x, x, torch.randn(2, 10, 8))
assert out.shape == x.shape and out.isfinite().all()
"""
BUILD_SDIST = """
import sys
sys.path.insert(0, "build_backend")
import xlnet_kernels_build
print(xlnet_kernels_build.build_sdist(sys.argv[1]))
"""


def run(*command, cwd, check=True, **variables):
    """Runs a command and returns what it prints; a variable set to None is removed."""
    environ = {name: value for name, value in os.environ.items() if name not in OURS} | variables
    environ = {name: value for name, value in environ.items() if value is not None}
    command = [str(part) for part in command]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, cwd=cwd, env=environ, **output)
    if check and done.returncode:
        pytest.fail(f"{command} ended with {done.returncode}:\n{done.stdout[-6000:]}", pytrace=False)
    return done.stdout if check else (done.returncode, done.stdout)


class Environment:
    """A new virtual environment; `borrow` is one whose packages it sees as well."""

    def __init__(self, folder, compiler, borrow=None):
        self.folder, self.compiler = folder, compiler
        run(sys.executable, "-m", "venv", folder, cwd=folder.parent)
        self.bin = folder / ("Scripts" if os.name == "nt" else "bin")
        self.python = self.bin / "python"
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        self.packages = Path(run(self.python, "-c", code, cwd=folder).strip())
        if borrow:
            (self.packages / "borrowed.pth").write_text(f"{borrow.packages}\n")

    def run(self, *command, cwd=None, check=True, **variables):
        path = f"{self.bin}{os.pathsep}{os.environ['PATH']}"
        # No bytecode at installation (0 is how pip spells that): most of torch's is never used here.
        variables = {"PATH": path, "PIP_NO_COMPILE": "0", **self.compiler, **variables}
        return run(self.python, *command, cwd=cwd or self.folder, check=check, **variables)

    def pip(self, command, *args, **options):
        return self.run("-m", "pip", command, *args, **options)

    def facts(self):
        """What `python -m xlnet_kernels.info` says, after the package has computed something."""
        self.run("-c", SMOKE)
        facts = json.loads(self.run("-m", "xlnet_kernels.info", "--json"))
        assert not Path(facts["folder"]).is_relative_to(ROOT)  # the installed package, not this checkout
        return facts

    def assert_compiled(self):
        facts = self.facts()
        assert facts["not_compiled_because"] is None
        assert facts["compiled"]["torch_version"].split(".")[:2] == torch.__version__.split(".")[:2]
        assert facts["build_decisions"]["extension"].startswith("yes, because ")
        assert facts["backends"]["cpu"] == "ready"


@pytest.fixture(scope="session")
def compiler(tmp_path_factory):
    """Environment variables that send compilations through cached_compiler.py."""
    real = shutil.which(os.environ.get("CXX", "c++"))
    if real is None or os.name == "nt":
        pytest.skip("needs a C++ compiler with GCC's options")
    folder = tmp_path_factory.mktemp("compiler")
    command = folder / "cached-g++"
    script = shlex.join([sys.executable, "-I", str(Path(__file__).with_name("cached_compiler.py"))])
    command.write_text(f'#!/bin/sh\nexec {script} "$@"\n')
    command.chmod(0o755)
    return {"CXX": str(command), "REAL": real, "CACHE": str(folder)}


@pytest.fixture(scope="session")
def with_torch(tmp_path_factory, compiler):
    """An environment with a real torch of the version that runs these tests."""
    environment = Environment(tmp_path_factory.mktemp("with_torch") / "env", compiler)
    code, log = environment.pip("install", TORCH, "numpy", "safetensors", check=False)
    if code:
        # In CI this must not go unnoticed.
        stop = pytest.fail if os.environ.get("CI") else pytest.skip
        stop(f"{TORCH} cannot be installed here: {log.strip().splitlines()[-1]}")
    return environment


@pytest.fixture
def borrowing(tmp_path, compiler, with_torch):
    return Environment(tmp_path / "env", compiler, borrow=with_torch)


@pytest.fixture
def tree(tmp_path):
    """A copy of what is or could be committed, so that builds leave this checkout alone."""
    git = ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        names = subprocess.run(git, check=True, capture_output=True, text=True).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            target = tmp_path / "tree" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
    return tmp_path / "tree"


def test_installed_torch_is_used(with_torch, tree):
    before = (with_torch.packages / "torch" / "__init__.py").stat()
    try:
        log = with_torch.pip("install", "-v", tree)
        with_torch.assert_compiled()
        text = with_torch.run("-m", "xlnet_kernels.info")
    finally:
        with_torch.pip("uninstall", "-y", "xlnet-kernels")  # others borrow this environment
    assert not TORCH_FETCHED.search(log), log
    assert "Installing backend dependencies" not in log
    assert re.search(r"xlnet_kernels: CPU extension: yes, because .+\n", log)
    assert re.search(r"xlnet_kernels: CUDA: (yes|no), because .+\n", log)
    assert re.search(r"^extension +for torch \S+, .+$", text, re.M) and re.search(r"^ +reference +ready$", text, re.M)
    after = (with_torch.packages / "torch" / "__init__.py").stat()
    assert (before.st_ino, before.st_mtime) == (after.st_ino, after.st_mtime)


def test_missing_torch_is_installed(tmp_path, compiler, with_torch, tree):
    environment = Environment(tmp_path / "env", compiler)
    constraint = tmp_path / "constraint.txt"
    constraint.write_text(f"{TORCH}\n")
    # The second name is what newer versions of pip read for the isolated build.
    log = environment.pip("install", "-v", tree, PIP_CONSTRAINT=str(constraint), PIP_BUILD_CONSTRAINT=str(constraint))
    assert "Installing backend dependencies" in log  # torch to compile against
    assert TORCH_FETCHED.search(log)
    assert (environment.packages / "torch" / "__init__.py").exists()  # torch to run with
    environment.assert_compiled()


def test_without_build_isolation(borrowing, tree):
    borrowing.pip("install", "setuptools>=77", "wheel", "ninja")
    log = borrowing.pip("install", "-v", "--no-build-isolation", tree)
    assert "Installing build dependencies" not in log and not TORCH_FETCHED.search(log)
    borrowing.assert_compiled()


def test_editable(borrowing, tree):
    run("git", "init", "-q", cwd=tree)
    run("git", "add", "--all", cwd=tree)
    borrowing.pip("install", "-e", tree)
    borrowing.assert_compiled()
    left_behind = run("git", "ls-files", "--others", "--exclude-standard", cwd=tree)
    assert left_behind == ""  # everything that a build makes is ignored by git
    # A change of the sources is there at once.
    (tree / "xlnet_kernels" / "added_later.py").write_text("answer = 42\n")
    borrowing.run("-c", "from xlnet_kernels.added_later import answer; assert answer == 42")
    # Installed again without the extension: the compiled one of before must not be picked up.
    borrowing.pip("install", "-e", tree, XLNET_KERNELS_SKIP_EXT="1")
    assert "XLNET_KERNELS_SKIP_EXT" in borrowing.facts()["not_compiled_because"]


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        pytest.param({"XLNET_KERNELS_SKIP_EXT": "1"}, "XLNET_KERNELS_SKIP_EXT is set", id="asked-for"),
        pytest.param({"CXX": None, "PATH": ""}, "'c++' was not found", id="no-compiler"),
    ],
)
def test_pure_python(borrowing, tree, variables, reason):
    log = borrowing.pip("install", "-v", tree, **variables)
    assert re.search(rf"xlnet_kernels: CPU extension: no, because .*{re.escape(reason)}", log)
    assert not TORCH_FETCHED.search(log)
    facts = borrowing.facts()
    assert facts["compiled"] is None and reason in facts["not_compiled_because"]
    assert facts["backends"]["reference"] == "ready" and reason in facts["backends"]["cpu"]


def test_extension_that_does_not_fit_is_left_aside(borrowing, tree):
    package = shutil.copytree(tree / "xlnet_kernels", borrowing.packages / "xlnet_kernels")
    (package / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}").write_bytes(b"not a library")
    (package / "_build_info.json").write_text(json.dumps({"torch": "1.13.1", "extension": "yes", "cuda": "no"}))
    reason = borrowing.facts()["not_compiled_because"]
    assert "was built for torch 1.13.1, you have " + torch.__version__.split("+")[0] in reason
    (package / "_build_info.json").unlink()  # nothing warns: loading is tried, and fails
    assert "does not load" in borrowing.facts()["not_compiled_because"]


def test_source_archive(tmp_path, borrowing, tree):
    run(sys.executable, "-c", BUILD_SDIST, tmp_path, cwd=tree)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        packed = {name.split("/", 1)[1] for name in opened.getnames() if "/" in name}
    needed = {path.relative_to(tree).as_posix() for path in (tree / "csrc").rglob("*") if path.is_file()}
    assert needed | {"LICENSE", "build_backend/xlnet_kernels_build.py"} <= packed
    shutil.rmtree(tree)
    borrowing.pip("wheel", "--no-deps", "-w", tmp_path / "wheels", archive)
    (wheel,) = (tmp_path / "wheels").iterdir()
    with zipfile.ZipFile(wheel) as opened:
        tops = {name.split("/")[0] for name in opened.namelist()}
    assert {re.sub(r"-.*\.", ".", top) for top in tops} == {"xlnet_kernels", "xlnet_kernels.dist-info"}
    borrowing.pip("install", wheel)
    borrowing.assert_compiled()


def test_compile_error_is_an_error(borrowing, tree):
    with open(tree / "csrc" / "module.cpp", "a") as source:
        source.write("#error on purpose\n")
    code, log = borrowing.pip("install", tree, check=False)
    assert code != 0 and "#error on purpose" in log
    assert "XLNET_KERNELS_SKIP_EXT=1 pip install ." in log


def test_missing_torch_without_isolation_is_an_error(tmp_path, compiler, tree):
    environment = Environment(tmp_path / "env", compiler)
    environment.pip("install", "setuptools>=77", "wheel")
    code, log = environment.pip("install", "--no-build-isolation", "--no-deps", tree, check=False)
    assert code != 0 and "torch is not installed, and compiling needs torch>=2.6" in log
