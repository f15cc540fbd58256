"""Installs the package in real, throw-away virtual environments: every way in that the README names.

Slow: each test makes an environment and most of them compile. One environment gets a real torch and pip; the others
borrow them through a .pth file. All compilers, of all workers, share a cache and optimise less (cached_compiler.py):
what `make` has installed for these tests is optimised in full. Isolated builds, which install build tools each time,
are left to the tests that are about them.
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
from email.parser import HeaderParser
from pathlib import Path

import pytest
import torch

import xlnet_kernels as xk
from tests import ROOT
from tests.packaging.test_stable_library import assert_is_stable

pytestmark = pytest.mark.slow

TORCH = f"torch=={torch.__version__.split('+')[0]}"
# Lines of pip when it gets a torch, from any source
TORCH_FETCHED = re.compile(r"^\s*(Collecting torch(?![\w-])|(Downloading|Using cached|Processing) \S*torch-\d)", re.M)
# Would decide the build from outside.
OURS = ("XLNET_KERNELS_SKIP_EXT", "FORCE_CUDA", "TORCH_CUDA_ARCH_LIST", "MAX_JOBS", "PYTHONPATH", "VIRTUAL_ENV")
SMOKE = """
import json, torch, xlnet_kernels as xk
from xlnet_kernels.info import collect
x = torch.randn(1, 2, 5, 8)
out = xk.rel_attention(x, x, x, torch.randn(2, 10, 8))
assert out.shape == x.shape and out.isfinite().all()
print(json.dumps(collect()))
"""
NOT_ISOLATED = ("--no-build-isolation", "--no-deps")
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
    """A new virtual environment. It sees the packages in the folders `borrow` as well, pip among them."""

    def __init__(self, folder, compiler, borrow=()):
        self.folder, self.compiler = folder, compiler
        run(sys.executable, "-m", "venv", *(["--without-pip"] if borrow else []), folder, cwd=folder.parent)
        self.bin = folder / ("Scripts" if os.name == "nt" else "bin")
        self.python = self.bin / "python"
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        self.packages = Path(run(self.python, "-c", code, cwd=folder).strip())
        (self.packages / "borrowed.pth").write_text("".join(f"{path}\n" for path in borrow))
        self.path = os.pathsep.join(map(str, [self.bin, *(path / "bin" for path in borrow), os.environ["PATH"]]))

    def run(self, *command, cwd=None, check=True, **variables):
        # No bytecode at installation (0 is how pip spells that): most of torch's is never used here.
        variables = {"PATH": self.path, "PIP_NO_COMPILE": "0", **self.compiler, **variables}
        return run(self.python, *command, cwd=cwd or self.folder, check=check, **variables)

    def pip(self, command, *args, **options):
        return self.run("-m", "pip", command, *args, **options)

    def facts(self):
        """Output of `python -m xlnet_kernels.info`, after the package has computed something."""
        facts = json.loads(self.run("-c", SMOKE).splitlines()[-1])
        assert not Path(facts["folder"]).is_relative_to(ROOT)  # the installed package, not this checkout
        return facts

    def assert_compiled(self):
        facts = self.facts()
        assert facts["not_compiled_because"] is None
        assert facts["no_fast_path_because"] is None
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
    base = tmp_path_factory.getbasetemp()
    cache = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled-once"
    cache.mkdir(exist_ok=True)
    return {"CXX": str(command), "REAL": real, "CACHE": str(cache)}


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


@pytest.fixture(scope="session")
def tools(tmp_path_factory, with_torch):
    """A folder with what building without isolation needs."""
    folder = tmp_path_factory.mktemp("tools")
    with_torch.pip("install", "--target", folder, "setuptools>=77", "wheel", "ninja")
    return folder


@pytest.fixture
def borrowing(tmp_path, compiler, with_torch):
    return Environment(tmp_path / "env", compiler, borrow=[with_torch.packages])


@pytest.fixture
def building(tmp_path, compiler, with_torch, tools):
    """Borrows torch and the tools to build with `NOT_ISOLATED`."""
    return Environment(tmp_path / "env", compiler, borrow=[with_torch.packages, tools])


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
        text = with_torch.run("-m", "xlnet_kernels.info", cwd=tree)  # README's own sequence, in the clone's root
    finally:
        with_torch.pip("uninstall", "-y", "xlnet-kernels")  # others borrow this environment
    assert not TORCH_FETCHED.search(log), log
    assert "Installing backend dependencies" not in log
    assert re.search(r"xlnet_kernels: CPU extension: yes, because .+\n", log)
    assert re.search(r"xlnet_kernels: fast path: yes, because .+\n", log)
    assert re.search(r"xlnet_kernels: CUDA: (yes|no), because .+\n", log)
    assert re.search(r"^extension +for torch 2.10 or later, .+$", text, re.M) and re.search(
        r"^ +reference +ready$", text, re.M
    )
    after = (with_torch.packages / "torch" / "__init__.py").stat()
    assert (before.st_ino, before.st_mtime) == (after.st_ino, after.st_mtime)


def test_missing_torch_is_asked_for(tmp_path, compiler, with_torch, tree):
    """The build requires torch, to compile against it, and so does the wheel."""
    without = Environment(tmp_path / "without", compiler)
    constraint = tmp_path / "constraint.txt"
    constraint.write_text(f"{TORCH}\n")
    # The second name is what newer versions of pip read for the isolated build.
    options = {"PIP_CONSTRAINT": str(constraint), "PIP_BUILD_CONSTRAINT": str(constraint)}
    log = without.pip("wheel", "-v", "--no-deps", "-w", tmp_path, tree, **options)
    assert "Installing backend dependencies" in log and TORCH_FETCHED.search(log)
    assert not (without.packages / "torch").exists()
    (wheel,) = tmp_path.glob("*.whl")
    assert "torch>=2.6" in metadata(wheel).get_all("Requires-Dist")
    borrowing = Environment(tmp_path / "with", compiler, borrow=[with_torch.packages])
    borrowing.pip("install", "--no-deps", wheel)
    borrowing.assert_compiled()


def test_editable(building, tree):
    run("git", "init", "-q", cwd=tree)
    run("git", "add", "--all", cwd=tree)
    building.pip("install", *NOT_ISOLATED, "-e", tree)  # isolated, the Makefile does it
    building.assert_compiled()
    left_behind = run("git", "ls-files", "--others", "--exclude-standard", cwd=tree)
    assert left_behind == ""  # everything that a build makes is ignored by git
    # A change of the sources is there at once.
    (tree / "xlnet_kernels" / "added_later.py").write_text("answer = 42\n")
    building.run("-c", "from xlnet_kernels.added_later import answer; assert answer == 42")
    # Installed again without the extension: the compiled one of before must not be picked up.
    building.pip("install", *NOT_ISOLATED, "-e", tree, XLNET_KERNELS_SKIP_EXT="1")
    assert "XLNET_KERNELS_SKIP_EXT" in building.facts()["not_compiled_because"]


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        pytest.param({"XLNET_KERNELS_SKIP_EXT": "1"}, "XLNET_KERNELS_SKIP_EXT is set", id="asked-for"),
        pytest.param({"CXX": None, "PATH": ""}, "'c++' was not found", id="no-compiler"),
    ],
)
def test_pure_python(building, tree, variables, reason):
    log = building.pip("install", "-v", *NOT_ISOLATED, tree, **variables)
    assert re.search(rf"xlnet_kernels: CPU extension: no, because .*{re.escape(reason)}", log)
    facts = building.facts()
    assert facts["compiled"] is None and reason in facts["not_compiled_because"]
    assert facts["backends"]["reference"] == "ready" and reason in facts["backends"]["cpu"]


def test_extension_that_does_not_fit_is_left_aside(borrowing, tree):
    package = shutil.copytree(tree / "xlnet_kernels", borrowing.packages / "xlnet_kernels")
    (package / "_kernels.so").write_bytes(b"not a library")
    assert "is no library of this platform" in borrowing.facts()["not_compiled_because"]


def metadata(wheel):
    with zipfile.ZipFile(wheel) as opened:
        (name,) = [name for name in opened.namelist() if name.endswith(".dist-info/METADATA")]
        return HeaderParser().parsestr(opened.read(name).decode())


def test_source_archive_and_wheel(tmp_path, building, tree):
    """The archive has everything; the wheel made of it, without isolation, the package, its metadata, nothing else."""
    run(sys.executable, "-c", BUILD_SDIST, tmp_path, cwd=tree)
    (archive,) = tmp_path.glob("*.tar.gz")
    assert archive.name == f"xlnet_kernels-{xk.__version__}.tar.gz"
    with tarfile.open(archive) as opened:
        packed = {name.split("/", 1)[1] for name in opened.getnames() if "/" in name}
    sources = {path.relative_to(tree) for path in tree.rglob("*") if path.is_file()}
    missing = {path.as_posix() for path in sources if not path.parts[0].startswith(".")} - packed
    assert not missing
    package = {path.as_posix() for path in sources if path.parts[0] == "xlnet_kernels"}
    shutil.rmtree(tree)

    log = building.pip("wheel", "-v", *NOT_ISOLATED, "-w", tmp_path / "wheels", archive)
    assert "Installing build dependencies" not in log and not TORCH_FETCHED.search(log)
    (wheel,) = (tmp_path / "wheels").iterdir()
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
    info = f"xlnet_kernels-{xk.__version__}.dist-info/"
    fast_path = f"xlnet_kernels/_fast_path{sysconfig.get_config_var('EXT_SUFFIX')}"
    assert {name for name in names if not name.startswith(info)} == package | {
        "xlnet_kernels/_build_info.json",
        "xlnet_kernels/_kernels.so",
        fast_path,
    }
    assert info + "licenses/LICENSE" in names
    found = metadata(wheel)
    assert (found["Name"], found["Version"]) == ("xlnet-kernels", xk.__version__)
    assert found["License-Expression"] == "Apache-2.0" and found["Requires-Python"] == ">=3.10"
    assert found["Description-Content-Type"] == "text/markdown" and found.get_payload().startswith("# xlnet_kernels")
    assert found["Summary"] and found["Keywords"] and found.get_all("Classifier")
    assert {"bench", "test"} <= set(found.get_all("Provides-Extra"))
    building.pip("install", "--no-deps", wheel)
    building.assert_compiled()


def test_version_is_in_one_place():
    heading = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert heading[1] == xk.__version__
    assert xk.__version__ not in (ROOT / "pyproject.toml").read_text() + (ROOT / "setup.py").read_text()


def test_compile_error_is_an_error(building, tree):
    with open(tree / "csrc" / "call.cpp", "a") as source:
        source.write("#error on purpose\n")
    code, log = building.pip("install", *NOT_ISOLATED, tree, check=False)
    assert code != 0 and "#error on purpose" in log
    assert "XLNET_KERNELS_SKIP_EXT=1 pip install ." in log


def test_missing_torch_without_isolation_is_an_error(tmp_path, compiler, tools, tree):
    environment = Environment(tmp_path / "env", compiler)
    environment.pip("uninstall", "-y", "setuptools")  # an old one, that Python 3.11 puts there
    (environment.packages / "tools.pth").write_text(f"{tools}\n")
    code, log = environment.pip("install", *NOT_ISOLATED, tree, check=False)
    assert code != 0 and "torch is not installed, and compiling needs torch>=2.10" in log


@pytest.fixture(scope="module")
def wheel_of_kernels(tmp_path_factory, compiler, with_torch, tools):
    """As .github/workflows/wheels.yml makes it, but for auditwheel."""
    folder = tmp_path_factory.mktemp("wheel")
    environment = Environment(folder / "env", compiler, borrow=[with_torch.packages, tools])
    source = shutil.copytree(ROOT, folder / "tree", ignore=shutil.ignore_patterns(".*", "build", "*.so", "__pycache__"))
    options = {"XLNET_KERNELS_FAST_PATH": "0", "FORCE_CUDA": "0"}
    environment.pip("wheel", *NOT_ISOLATED, "-w", folder / "wheels", source, **options)
    (made,) = (folder / "wheels").iterdir()
    return made


def test_wheel_is_for_every_python(wheel_of_kernels, tmp_path):
    assert re.fullmatch(r"xlnet_kernels-[\d.]+-py3-none-(linux|macosx)_\w+\.whl", wheel_of_kernels.name)
    with zipfile.ZipFile(wheel_of_kernels) as opened:
        libraries = [name for name in opened.namelist() if name.endswith(".so")]
        opened.extractall(tmp_path)
    assert libraries == ["xlnet_kernels/_kernels.so"]
    assert_is_stable(tmp_path / libraries[0])


def test_operator_of_the_wheel(wheel_of_kernels, tmp_path, compiler, with_torch):
    """The operator's tests of its kernels pass in an environment of its own, with the torch that runs these tests."""
    ours = [Path(entry) for entry in sys.path if entry.endswith("-packages")]  # pytest and its plugins
    environment = Environment(tmp_path / "env", compiler, borrow=[with_torch.packages, *ours])
    environment.pip("install", "--no-deps", wheel_of_kernels)
    for name in ("tests", "csrc", "build_backend", "benchmarks/lib"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    facts = environment.facts()
    assert facts["backends"]["cpu"] == "ready" and "it was not built" in facts["no_fast_path_because"]
    environment.run("-m", "pytest", "-q", "-x", "tests/operator/test_operator.py", "-k", "[cpu-", cwd=tmp_path)
