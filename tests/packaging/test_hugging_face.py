"""The repository for Hugging Face's `kernels` that build_backend/hugging_face writes."""

from __future__ import annotations

import ast
import inspect
import json
import re
import runpy
import sys
from pathlib import Path

import pytest
from torch import nn

from tests import ROOT
from tests.packaging.test_install import Environment, compiler  # noqa: F401

WRITE = ROOT / "build_backend" / "hugging_face" / "write.py"
PACKAGES = [Path(entry) for entry in sys.path if entry.endswith("-packages")]


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "repository"
    assert runpy.run_path(str(WRITE))["main"]([str(folder)]) == 0
    return folder


def test_imports_are_relative_and_of_torch_alone(repository):
    package = repository / "torch-ext" / "xlnet_kernels"
    allowed = {"torch", "triton", *sys.stdlib_module_names}
    files = list(package.rglob("*.py"))
    assert len(files) > 20
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert {name.name.partition(".")[0] for name in node.names} <= allowed, path
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                assert node.module.partition(".")[0] in allowed, (path, node.module)
            elif isinstance(node, ast.ImportFrom) and node.module and node.module != "_ops":  # kernel-builder's
                target = path.parents[node.level - 1].joinpath(*node.module.split("."))
                assert target.is_dir() or target.with_suffix(".py").is_file(), (path, node.module)


def test_build_file_names_every_source(repository):
    tomllib = pytest.importorskip("tomllib", reason="in Python 3.11 and later")
    settings = tomllib.loads((repository / "build.toml").read_text())
    assert settings["general"]["edition"] == 5 and settings["general"]["name"] == "xlnet-kernels"
    parts = {part["backend"]: part["src"] for part in settings["kernel"].values()}
    there = {path.relative_to(repository).as_posix() for path in (repository / "csrc").rglob("*") if path.is_file()}
    assert (
        set(parts["cuda"]) == there and set(parts["cpu"]) < there and not (repository / "csrc" / "fast_path").exists()
    )
    assert all((repository / file).is_file() for file in settings["torch"]["src"])
    assert settings["torch"]["stable-abi"] == {"cpu": "2.10", "cuda": "2.10"}  # as setup.py has it for the package
    assert "/" in settings["general"]["hub"]["repo-id"] and "minver" not in settings["torch"]


def test_the_cpu_has_every_source_that_setup_py_compiles(repository):
    tomllib = pytest.importorskip("tomllib", reason="in Python 3.11 and later")
    (line,) = re.findall(r"^CPU_SOURCES = find\((.*)\)$", (ROOT / "setup.py").read_text(), re.MULTILINE)
    patterns = ast.literal_eval(f"({line},)")
    wanted = {path.relative_to(ROOT).as_posix() for pattern in patterns for path in ROOT.glob(pattern)}
    part = tomllib.loads((repository / "build.toml").read_text())["kernel"]["xlnet_kernels_cpu"]
    compiled = {file for file in part["src"] if file.endswith(".cpp")}
    assert compiled == wanted and "csrc/cpu/bfloat16/x86.cpp" in compiled
    headers = {path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc" / "cpu").rglob("*.h")}
    assert headers <= set(part["src"]) and "-DXLNET_KERNELS_BFLOAT16_INSTRUCTIONS=1" in part["cxx-flags"]


def test_namespace_is_that_of_the_build(repository):
    text = "\n".join(path.read_text() for path in (repository / "csrc").rglob("*.*"))
    assert re.findall(r"define XLNET_KERNELS_NAMESPACE (\w+)", text) == ["TORCH_EXTENSION_NAME"]
    assert not re.findall(r"TORCH_LIBRARY\w*\(xlnet_kernels", text) and "<ATen/" not in text
    for path in (repository / "torch-ext").rglob("*.py"):
        assert not re.search(r"torch\.ops\.xlnet_kernels|\"xlnet_kernels::", path.read_text()), path


def test_the_library_has_what_the_package_asks_of_it(repository):
    """_compiled.py of the package reads the operators of csrc/stable/facts.cpp, both of which are in the repository."""
    asked = (repository / "torch-ext" / "xlnet_kernels" / "_compiled.py").read_text()
    offered = (repository / "csrc" / "stable" / "facts.cpp").read_text()
    assert set(re.findall(r"\bops\.(\w+)", asked)) == set(re.findall(r'\.def\("(\w+)', offered))


def test_layers_are_pure():
    """kernels refuses layers with a constructor or other members."""
    tree = ast.parse((WRITE.parent / "python" / "layers.py").read_text())
    for layer in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        members = {node.name for node in layer.body if isinstance(node, ast.FunctionDef)}
        members |= {node.targets[0].id for node in layer.body if isinstance(node, ast.Assign)}
        assert members <= {"forward", "can_torch_compile", "has_backward"}
        assert not {name for name, _ in inspect.getmembers(nn.Module)} & members - {"forward"}


def test_a_full_folder_is_left_alone(tmp_path, capsys):
    (tmp_path / "mine").write_text("")
    with pytest.raises(SystemExit):
        runpy.run_path(str(WRITE))["main"]([str(tmp_path)])
    assert "is not empty" in capsys.readouterr().err


@pytest.mark.slow
def test_kernels_loads_it(tmp_path, compiler):  # noqa: F811
    environment = Environment(tmp_path / "env", compiler, borrow=PACKAGES)
    code, log = environment.pip("install", "kernels>=0.17", "kernel-abi-check", check=False)
    if code:
        pytest.skip(f"kernels cannot be installed here: {log.strip().splitlines()[-1]}")
    environment.run(WRITE, tmp_path / "repository", "--build", cwd=tmp_path)
    (variant,) = (tmp_path / "repository" / "build").iterdir()
    assert json.loads((variant / "metadata.json").read_text())["id"].startswith("_xlnet_kernels_cpu_")
    client = Path(__file__).with_name("hugging_face_client.py")
    assert environment.run(client, tmp_path / "repository").endswith("all right\n")
