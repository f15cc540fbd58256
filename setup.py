"""Build of the kernel library and the fast path, with a record of the decisions; static metadata is in pyproject.toml.

xlnet_kernels/_kernels.so        csrc without csrc/fast_path, on torch's stable ABI: for every torch from
                                 MIN_TORCH on and every Python
xlnet_kernels/_fast_path.*.so    csrc/fast_path, for the present torch and Python
"""

import json
import os
import runpy
import shlex
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "build_backend"))

import build_decisions as decide  # noqa: E402
from cuda_architectures import choose, known_to  # noqa: E402

PACKAGE = "xlnet_kernels"
HELP = "Fix what is reported above, or install without compiled kernels: XLNET_KERNELS_SKIP_EXT=1 pip install ."
WITHOUT_CUDA = "To have the CPU's kernels without CUDA's: FORCE_CUDA=0 pip install ."


def find(*patterns):
    # Relative, because setuptools needs relative paths; sorted, so that two builds link in the same order.
    return sorted(path.relative_to(ROOT).as_posix() for pattern in patterns for path in ROOT.glob(pattern))


CPU_SOURCES = find("csrc/*.cpp", "csrc/stable/*.cpp", "csrc/cpu/**/*.cpp")
CUDA_SOURCES = find("csrc/cuda/**/*.cu", "csrc/cuda/*.cpp")
FAST_PATH_SOURCES = find("csrc/fast_path/*.cpp")
LIBRARY = "_kernels"

torch_version = decide.torch_version()
extension = decide.extension_decision(torch=torch_version)
cuda = bfloat16 = fast_path = decide.Decision(False, "the extension is not built")
if extension.build:
    fast_path = decide.fast_path_decision()
# Only compiling needs torch; metadata and source archives do not.
can_compile = extension.build and torch_version is not None


def find_nvcc(cuda_home):
    """The nvcc that cpp_extension calls; None (cuda_home is None) under a torch without CUDA."""
    return shutil.which("nvcc", path=str(Path(cuda_home, "bin")) if cuda_home else None)


def cuda_architectures(torch, cpp_extension, nvcc):
    """Architectures for nvcc: TORCH_CUDA_ARCH_LIST, else the GPUs of this machine, else all."""
    asked = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    flags = getattr(cpp_extension, "_get_cuda_arch_flags", list)

    def torch_takes(name):
        os.environ["TORCH_CUDA_ARCH_LIST"] = name
        try:
            flags()
        except ValueError:
            return False
        return True

    seen = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    chosen = choose(asked, seen, known_to(nvcc), torch_takes)
    # In the variable, because torch compiles for it; with semicolons, because nvcc splits a macro's value at commas.
    os.environ["TORCH_CUDA_ARCH_LIST"] = ";".join(chosen.names)
    return chosen


def make_extensions():
    """The extensions and their build command, made by torch."""
    global cuda, bfloat16
    if "CUDA_HOME" not in os.environ and "CUDA_PATH" not in os.environ and (home := decide.cuda_home()):
        # Set, because torch takes nvcc's own folder, which may consist of links.
        os.environ["CUDA_HOME"] = home
    compiler = decide.find_compiler()[1]
    # A path with spaces is quoted, because torch passes it to a shell.
    if Path(os.environ.get("CXX", "")).is_file():
        os.environ["CXX"] = shlex.join(compiler)
    import torch
    from torch.utils import cpp_extension

    try:
        nvcc = find_nvcc(cpp_extension.CUDA_HOME)
        cuda = decide.cuda_decision(
            os.environ,
            torch.version.cuda,
            nvcc,
            CUDA_SOURCES,
            decide.nvcc_version(nvcc) if nvcc else None,
            lambda: cuda_architectures(torch, cpp_extension, nvcc),
        )
    except ValueError as error:
        raise SystemExit(f"{PACKAGE}: {error}") from None
    bfloat16 = decide.bfloat16_decision(ROOT / "csrc/cpu/bfloat16/x86.cpp")
    # No psabi warnings, because vectors are only passed to inlined functions within one object.
    flags = ["-O3", "-g0", "-Wno-psabi", "-fvisibility=hidden"]
    # In the command line, so that ninja compiles again after a change of torch (headers may have older dates).
    built_with = ("XLNET_KERNELS_TORCH_VERSION", torch.__version__)
    macros = [built_with, ("TORCH_TARGET_VERSION", decide.target_version())]
    if bfloat16.build:
        macros.append((decide.BFLOAT16_MACRO, "1"))
    if cuda.build:
        macros += [
            ("XLNET_KERNELS_CUDA_VERSION", torch.version.cuda),
            ("XLNET_KERNELS_CUDA_ARCHITECTURES", os.environ["TORCH_CUDA_ARCH_LIST"]),
        ]
    host = decide.host_compiler()
    # One process for each architecture, because the build waits for the file that takes longest.
    threads = os.environ.get("TORCH_CUDA_ARCH_LIST", "").count(";") + 1
    nvcc_flags = ["-O3", "--threads", str(threads), "-Xptxas", "-v", "-Xfatbin", "-compress-all", *host]
    make = cpp_extension.CUDAExtension if cuda.build else cpp_extension.CppExtension
    library = make(
        f"{PACKAGE}.{LIBRARY}",
        CPU_SOURCES + (CUDA_SOURCES if cuda.build else []),
        include_dirs=[str(ROOT / "csrc"), str(ROOT / "csrc" / "cuda")],
        define_macros=macros,
        depends=find("csrc/**/*.h", "csrc/**/*.cuh"),
        extra_compile_args={"cxx": flags, "nvcc": nvcc_flags},
        py_limited_api=True,
    )
    # Only these, because the stable ABI is in them, and the library must not depend on torch's other libraries.
    library.libraries = [name for name in library.libraries if name in ("torch_cpu", "torch_cuda", "cudart")]
    modules = [library]
    if fast_path.build:
        modules.append(
            cpp_extension.CppExtension(
                f"{PACKAGE}._fast_path",
                FAST_PATH_SOURCES,
                include_dirs=[str(ROOT / "csrc")],
                define_macros=[built_with],
                depends=find("csrc/**/*.h"),
                extra_compile_args={"cxx": flags},
            )
        )

    class BuildExtension(cpp_extension.BuildExtension):
        def finalize_options(self):
            super().finalize_options()
            if not Path(self.build_temp).resolve().is_relative_to(ROOT):
                # Editable builds get a new temporary folder each time. Objects are kept in the folder of other builds,
                # so that ninja compiles only changes.
                self.build_temp = str(ROOT / "build" / f"temp.{self.plat_name}-{sys.implementation.cache_tag}")

        def build_extensions(self):
            cores, free = decide.available_cores(), decide.available_memory()
            os.environ.setdefault("MAX_JOBS", str(decide.max_jobs(cores, free)))
            memory = "unknown" if free is None else f"{free / 2**30:.1f} GB"
            say(f"compiling with MAX_JOBS={os.environ['MAX_JOBS']} ({cores} cores, {memory} of memory free)")
            try:
                super().build_extensions()
            except Exception as error:
                way = f"{WITHOUT_CUDA}\n{HELP}" if cuda.build else HELP
                raise SystemExit(f"{PACKAGE}: compiling the extension failed: {error}\n{way}") from error

        def get_ext_filename(self, fullname):
            *folders, name = fullname.split(".")
            return os.path.join(*folders, f"{LIBRARY}.so") if name == LIBRARY else super().get_ext_filename(fullname)

        def copy_extensions_to_source(self):  # for `build_ext --inplace` and editable installs
            super().copy_extensions_to_source()
            record(ROOT / PACKAGE)

    return modules, BuildExtension


class NoTorch(build_ext):
    """Build command without torch, used only without build isolation, because the backend requires torch otherwise."""

    def run(self):
        raise SystemExit(
            f"{PACKAGE}: torch is not installed, and compiling needs {decide.TORCH_REQUIREMENT}. Install it first, "
            f"or do without --no-build-isolation, or install without compiled kernels: XLNET_KERNELS_SKIP_EXT=1 pip "
            f"install ."
        )


def say(line):
    print(f"{PACKAGE}: {line}", flush=True)


def record(folder):
    """Write the decisions for `xlnet_kernels.info` and the loader of the library."""
    facts = {
        "torch": torch_version if can_compile else None,
        "extension": str(extension),
        "fast_path": str(fast_path),
        "cuda": str(cuda),
        "bfloat16": str(bfloat16),
        "sources": runpy.run_path(str(ROOT / PACKAGE / "_sources.py"))["digest"](ROOT / "csrc"),
    }
    (folder / "_build_info.json").write_text(json.dumps(facts, indent=2) + "\n")


class BuildPy(build_py):
    """Build command that prints and records the decisions, in pure-Python builds as well."""

    def run(self):
        say(f"CPU extension: {extension}")
        say(f"fast path: {fast_path}")
        say(f"CUDA: {cuda}")
        say(f"bfloat16 instructions: {bfloat16}")
        if getattr(self, "editable_mode", False):
            folder = ROOT / PACKAGE
            for pattern, decision in (("_kernels.so", extension), ("_fast_path.*.so", fast_path)):
                for left_over in [] if decision.build else folder.glob(pattern):
                    # Because a library compiled earlier would be loaded.
                    left_over.unlink()
        else:
            folder = Path(self.build_lib, PACKAGE)
            # Because build/ is reused: deleted modules would be installed.
            shutil.rmtree(folder, ignore_errors=True)
        super().run()
        record(folder)


class Wheel(bdist_wheel):
    """Wheel command: tagged for every Python if the fast path is left out."""

    def get_tag(self):
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if fast_path.build or not extension.build else ("py3", "none", platform)


if can_compile:
    modules, build_command = make_extensions()
elif extension.build:
    modules, build_command = [Extension(f"{PACKAGE}.{LIBRARY}", CPU_SOURCES)], NoTorch
else:
    modules, build_command = [], build_ext

setup(
    ext_modules=modules,
    cmdclass={"build_ext": build_command, "build_py": BuildPy, "bdist_wheel": Wheel},
)
