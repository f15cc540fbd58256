"""Write a repository for Hugging Face's `kernels` from this tree's sources.

    python build_backend/hugging_face/write.py FOLDER
    python build_backend/hugging_face/write.py FOLDER --build    and the variant for this machine's CPU and torch

    build.toml flake.nix CARD.md LICENSE
    csrc/                                  the C++ and CUDA sources
    torch-ext/torch_binding.cpp            the Python module that loads the operators
    torch-ext/xlnet_kernels/               the operator, its backends and modules, with the different files of python/,
                                           beside this file
    build/torch-stable-abi210-cpu-x86_64-linux/
                                           the result of --build, for torch 2.10 and later;
                                           `kernels.get_local_kernel(FOLDER)` loads it

Operators are registered under the name of the extension, which differs from build to build, so that several versions
can be loaded at once. `_ops.py` is kernel-builder's; for --build it is written here.

The sources use torch's stable ABI only. So one variant for each CUDA version serves every torch from that of
`[torch.stable-abi]` on. `kernel-builder upload` goes to `repo-id`. `kernels.get_kernel` loads repositories of
publishers that Hugging Face trusts, and others only with trust_remote_code=True.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import platform
import runpy
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "build_backend"))

import build_decisions as decide  # noqa: E402

NAME = "xlnet_kernels"
VERSION = 0  # not yet stable, by kernel-builder's convention
# Modules that need more than torch and the standard library, or belong to the package only
LEFT_OUT = ("model", "pretraining", "integrations", "info.py", "tensor_parallel.py", "_parallel_styles.py", "_ops.py")
LEFT_OUT += ("__main__.py", "_library_file.py", "_sources.py", "py.typed", "_build_info.json")
REPOSITORY = "xlnet-kernels/xlnet-kernels"  # name on the Hub; nothing is published there
STABLE = ".".join(map(str, decide.MIN_TORCH))
TARGET = (f"-DTORCH_TARGET_VERSION={decide.target_version()}",)  # kernel-builder's own for `[torch.stable-abi]`
NAMESPACE = "#define XLNET_KERNELS_NAMESPACE "
CXX_FLAGS = ("-O3", "-Wno-psabi")
# Always set, because kernel-builder's GCC knows the instructions, and x86.cpp is empty elsewhere; --build checks.
BFLOAT16_FLAG = f"-D{decide.BFLOAT16_MACRO}=1"
OPS = """import torch

from . import {id}

ops = torch.ops.{id}


def add_op_namespace_prefix(op_name):
    return f"{id}::{{op_name}}"
"""


def write_sources(folder: Path) -> None:
    shutil.copytree(ROOT / "csrc", folder / "csrc", ignore=shutil.ignore_patterns("fast_path"))
    header = folder / "csrc" / "inputs.h"
    text = header.read_text()
    assert text.count(f"{NAMESPACE}{NAME}\n") == 1, "csrc/inputs.h no longer names the operators' namespace"
    header.write_text(text.replace(f"{NAMESPACE}{NAME}\n", f"{NAMESPACE}TORCH_EXTENSION_NAME\n"))
    package = folder / "torch-ext" / NAME
    binary = shutil.ignore_patterns("__pycache__", "*.so", *LEFT_OUT)
    shutil.copytree(ROOT / NAME, package, ignore=binary)
    shutil.copytree(HERE / "python", package, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / NAME / "integrations" / "conformer.py", package / "integrations" / "conformer.py")
    shutil.copy(HERE / "torch_binding.cpp", package.parent)
    for file in (HERE / "CARD.md", HERE / "flake.nix", ROOT / "LICENSE"):
        shutil.copy(file, folder)


def sources(folder: Path, *patterns: str) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for pattern in patterns for path in folder.glob(pattern))


def build_toml(folder: Path) -> str:
    """Text of build.toml; the CUDA extension has the CPU's sources too, because it also serves CPU tensors."""
    of_cuda = [f"csrc/cuda/{name}.h" for name in ("heuristics", "kernels", "tile_sizes")]
    cpu = sources(folder, "csrc/*.cpp", "csrc/*.h", "csrc/stable/*.*", "csrc/cpu/**/*.*", *of_cuda)
    cuda = sources(folder, "csrc/cuda/**/*.*")
    parts = {"cpu": cpu, "cuda": sorted({*cpu, *cuda})}
    lines = ["[general]", f'name = "{NAME.replace("_", "-")}"', f"version = {VERSION}", "edition = 5"]
    lines += ['license = "apache-2.0"', f"backends = {json.dumps([*parts])}", ""]
    lines += ["[general.hub]", f'repo-id = "{REPOSITORY}"', ""]
    lines += ["[torch]", 'src = ["torch-ext/torch_binding.cpp"]', 'include = ["csrc"]']
    lines += ["", "[torch.stable-abi]", *(f'{backend} = "{STABLE}"' for backend in parts)]
    for backend, files in parts.items():
        lines += ["", f"[kernel.{NAME}_{backend}]", f'backend = "{backend}"', 'depends = ["torch"]']
        lines += ['include = ["csrc", "csrc/cuda"]', f"cxx-flags = {json.dumps([*CXX_FLAGS, BFLOAT16_FLAG])}"]
        if backend == "cuda":
            lines.append('cuda-capabilities = ["8.0", "9.0", "10.0"]')  # _extension.py has them too
        lines += ["src = [", *(f'  "{file}",' for file in files), "]"]
    return "\n".join(lines) + "\n"


def build(folder: Path) -> Path:
    """Compile the CPU variant with the installed torch; returns its folder."""
    from torch.utils import cpp_extension

    digest = runpy.run_path(str(ROOT / NAME / "_sources.py"))["digest"]
    unique = hashlib.sha256((digest(folder / "csrc") + digest(folder / "torch-ext")).encode()).hexdigest()[:7]
    name = f"_{NAME}_cpu_{unique}"
    files = ["torch-ext/torch_binding.cpp", *sources(folder, "csrc/*.cpp", "csrc/stable/*.cpp", "csrc/cpu/**/*.cpp")]
    bfloat16 = [BFLOAT16_FLAG] if decide.bfloat16_decision(folder / "csrc/cpu/bfloat16/x86.cpp").build else []
    objects = folder / "build-objects"
    objects.mkdir(exist_ok=True)
    cpp_extension.load(
        name,
        [str(folder / file) for file in files],
        extra_include_paths=[str(folder / "csrc")],
        extra_cflags=[*CXX_FLAGS, *bfloat16, *TARGET, "-DPy_LIMITED_API=0x03090000", "-DCPU_KERNEL"],
        build_directory=str(objects),
        is_python_module=False,
        verbose=True,
    )
    variant = folder / "build" / f"torch-stable-abi{STABLE.replace('.', '')}-cpu-{platform.machine()}-{sys.platform}"
    shutil.rmtree(variant, ignore_errors=True)
    shutil.copytree(folder / "torch-ext" / NAME, variant)
    shutil.copy(objects / f"{name}.so", variant / f"{name}.abi3.so")
    shutil.rmtree(objects)
    (variant / "_ops.py").write_text(OPS.format(id=name))
    hashes = {
        path.relative_to(variant).as_posix(): base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
        for path in sorted(variant.rglob("*"))
        if path.is_file()
    }
    facts = {"id": name, "name": NAME.replace("_", "-"), "version": VERSION, "license": "apache-2.0"}
    facts |= {"python-depends": [], "backend": {"type": "cpu"}, "digest": {"algorithm": "sha256", "files": hashes}}
    (variant / "metadata.json").write_text(json.dumps(facts, indent=2) + "\n")
    return variant


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="new or empty")
    parser.add_argument("--build", action="store_true", help="compile the variant for this machine's CPU and torch")
    options = parser.parse_args(arguments)
    folder = options.folder.resolve()
    if folder.is_dir() and any(folder.iterdir()):
        parser.error(f"{folder} is not empty")
    folder.mkdir(parents=True, exist_ok=True)
    write_sources(folder)
    (folder / "build.toml").write_text(build_toml(folder))
    print(build(folder) if options.build else folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
