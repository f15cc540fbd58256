"""Decisions and requirements of the build (build_backend/), and messages of the extension's loader."""

import platform
import sys

import pytest

from tests import ROOT
from xlnet_kernels import _extension

sys.path.insert(0, str(ROOT / "build_backend"))

import build_decisions as decide  # noqa: E402
import xlnet_kernels_build as backend  # noqa: E402

GIB = 2**30
CUDA = ["csrc/cuda/dispatch.cu"]


@pytest.mark.parametrize(
    ("environ", "torch_cuda", "nvcc", "sources", "build", "reason"),
    [
        ({}, "13.0", "/cuda/bin/nvcc", CUDA, True, "torch is built for CUDA 13.0 and there is /cuda/bin/nvcc"),
        ({}, None, "/cuda/bin/nvcc", CUDA, False, "torch is a build without CUDA"),
        ({}, "13.0", None, CUDA, False, "nvcc was not found (set CUDA_HOME)"),
        ({}, None, None, CUDA, False, "torch is a build without CUDA and nvcc was not found (set CUDA_HOME)"),
        ({}, "13.0", "nvcc", [], False, "this version has no CUDA sources"),
        ({"FORCE_CUDA": "1"}, "13.0", "nvcc", [], False, "no CUDA sources (FORCE_CUDA=1 changes nothing)"),
        ({"FORCE_CUDA": "1"}, "13.0", "nvcc", CUDA, True, "torch is built for CUDA 13.0"),
        ({"FORCE_CUDA": "0"}, "13.0", "nvcc", CUDA, False, "FORCE_CUDA=0"),
        ({"FORCE_CUDA": "0", "TORCH_CUDA_ARCH_LIST": "9.0"}, None, None, CUDA, False, "FORCE_CUDA=0"),
        ({"TORCH_CUDA_ARCH_LIST": "9.0"}, "13.0", "nvcc", CUDA, True, "torch is built for CUDA 13.0"),
        (
            {"TORCH_CUDA_ARCH_LIST": "9.0"},
            None,
            None,
            CUDA,
            False,
            "torch is a build without CUDA and nvcc was not found",
        ),
    ],
)
def test_cuda_decision(environ, torch_cuda, nvcc, sources, build, reason):
    decision = decide.cuda_decision(environ, torch_cuda, nvcc, sources)
    assert decision.build is build
    assert reason in decision.reason


@pytest.mark.parametrize(
    ("environ", "torch_cuda", "nvcc", "message"),
    [
        ({"FORCE_CUDA": "1"}, None, "nvcc", "FORCE_CUDA=1, but torch is a build without CUDA"),
        ({"FORCE_CUDA": "1"}, "13.0", None, "FORCE_CUDA=1, but nvcc was not found"),
        ({"FORCE_CUDA": "1"}, None, None, "torch .* nvcc was not found .*; FORCE_CUDA=0 builds without CUDA"),
    ],
)
def test_forced_cuda_that_cannot_be_built_raises(environ, torch_cuda, nvcc, message):
    with pytest.raises(ValueError, match=message):
        decide.cuda_decision(environ, torch_cuda, nvcc, CUDA)


def test_nvcc_version(tmp_path):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.6, V12.6.85'\n")
    nvcc.chmod(0o755)
    assert decide.nvcc_version(str(nvcc)) == "12.6"


def test_windows_is_pure_python():
    assert "GCC and Clang" in decide.extension_decision({}, "win32").reason
    assert not decide.extension_decision({}, "win32").build


@pytest.mark.parametrize(
    ("cores", "free", "jobs"),
    [(8, 64 * GIB, 8), (8, 8 * GIB, 4), (8, GIB, 1), (1, 64 * GIB, 1), (8, None, 8), (2, 0, 1)],
)
def test_max_jobs(cores, free, jobs):
    assert decide.max_jobs(cores, free) == jobs


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:  2048 kB\n"}, 2048 * 1024),
        ({"proc/meminfo": "MemAvailable: 2048 kB\n", "sys/fs/cgroup/memory.max": "max\n"}, 2048 * 1024),
        ({"proc/meminfo": "MemAvailable: 2048 kB\n", "sys/fs/cgroup/memory.max": "1024\n"}, 1024),
    ],
)
def test_available_memory(tmp_path, files, expected):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    assert decide.available_memory(tmp_path) == expected


def test_extension_decision(tmp_path):
    compiler = tmp_path / "my-compiler"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    found = {"CXX": str(compiler), "PATH": str(tmp_path)}
    assert decide.extension_decision(found).build
    assert decide.extension_decision({**found, "XLNET_KERNELS_SKIP_EXT": "0"}).build
    skipped = decide.extension_decision({**found, "XLNET_KERNELS_SKIP_EXT": "1"})
    assert str(skipped) == "no, because XLNET_KERNELS_SKIP_EXT is set"
    doubtful = str(decide.extension_decision({**found, "XLNET_KERNELS_SKIP_EXT": "false"}))
    assert doubtful == f"{skipped} to 'false', which is neither 0 nor 1 and counts as 1"
    for environ in ({"PATH": str(tmp_path)}, {"CXX": "/nonexistent"}):
        missing = decide.extension_decision(environ)
        assert not missing.build and "no C++ compiler" in missing.reason


def program(path):
    path.parent.mkdir(exist_ok=True)
    path.write_text("#!/bin/sh\necho a compiler\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("cxx", "words"),
    [
        ("ccache my-g++", ["{}/ccache", "{}/my-g++"]),
        ("ccache my-g++ -m64 '-DNAME=a b'", ["{}/ccache", "{}/my-g++", "-m64", "-DNAME=a b"]),
        ("my-g++ -m64", ["{}/my-g++", "-m64"]),
        ("{}/my-g++", ["{}/my-g++"]),
        ("'{}/a folder/g++' -m64", ["{}/a folder/g++", "-m64"]),
        ("{}/a folder/g++", ["{}/a folder/g++"]),
        ("  ", ["{}/c++"]),
        ("ccache no-such-compiler", None),
        ("no-such-launcher my-g++", None),
        ("'an open quote", None),
    ],
)
def test_compiler_is_what_a_shell_takes(tmp_path, cxx, words):
    folder = tmp_path / "bin"
    for name in ("ccache", "my-g++", "c++"):
        program(folder / name)
    program(folder / "a folder" / "g++")
    environ = {"CXX": cxx.format(folder), "PATH": str(folder)}
    wanted = words and [word.format(folder) for word in words]
    assert decide.find_compiler(environ)[1] == wanted
    assert decide.extension_decision(environ, "linux").build == (wanted is not None)


@pytest.mark.parametrize(
    ("cc", "flags"),
    [("", []), ("gcc", []), ("ccache gcc", ["-ccbin", "gcc"]), ("gcc-13 -m64", ["-ccbin", "gcc-13"])],
)
def test_nvcc_gets_a_program_as_its_host_compiler(cc, flags):
    """torch hands all of CC on as one program, which "ccache gcc" is not."""
    assert decide.host_compiler({"CC": cc}) == flags


@pytest.mark.parametrize(
    ("version", "usable"),
    [("2.10.0", True), ("2.13.0+cpu", True), ("3.0.0a0", True), ("2.9.1", False), ("1.13.1", False), (None, False)],
)
def test_torch_is_asked_for_only_where_there_is_none(monkeypatch, tmp_path, version, usable):
    """One that is too old stays: the library would be compiled for another, which this one could not load."""
    program(tmp_path / "c++")
    assert decide.torch_is_usable(version) is usable
    monkeypatch.setattr(backend, "torch_version", lambda: version)
    monkeypatch.setattr(backend, "extension_decision", lambda: decide.Decision(True, "test"))
    needed = [] if version else ["torch>=2.10"]
    assert backend.get_requires_for_build_wheel() == backend.get_requires_for_build_editable() == needed
    assert backend.get_requires_for_build_sdist() == []
    monkeypatch.setattr(backend, "extension_decision", lambda: decide.Decision(False, "test"))
    assert backend.get_requires_for_build_wheel() == backend.get_requires_for_build_editable() == []
    decision = decide.extension_decision({"PATH": str(tmp_path)}, "linux", version)
    assert decision.build is (usable or version is None)
    if not decision.build:
        assert decision.reason == f'compiled kernels need torch>=2.10, found {version}: backend "torch" serves'


def test_versions_are_the_same_everywhere():
    assert decide.MIN_TORCH == _extension.MIN_TORCH
    assert int(decide.target_version(), 16) == (2 << 56) + (10 << 48)


@pytest.mark.parametrize(("value", "built"), [("", True), ("1", True), ("0", False), ("no", True)])
def test_fast_path_is_left_out_where_that_is_asked_for(value, built):
    decision = decide.fast_path_decision({"XLNET_KERNELS_FAST_PATH": value})
    assert decision.build is built and ("neither 0 nor 1" in decision.reason) == (value == "no")


def test_environment_is_added_behind_the_isolated_packages(monkeypatch, tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    (tmp_path / "outside.pth").write_text(f"{inside}\n")
    monkeypatch.setattr(sys, "path", ["isolated"])
    monkeypatch.setattr(backend, "environment_paths", lambda: [str(tmp_path)])
    backend.add_environment()
    assert sys.path == ["isolated", str(tmp_path), str(inside)]


@pytest.mark.parametrize(
    ("built_for", "have", "fits"),
    [("2.13.0", "2.13.1+cu130", True), ("2.13.0", "2.14.0", False), ("2.1.0", "2.13.0", False), ("2.6", "3.6", False)],
)
def test_mismatch(built_for, have, fits):
    reason = _extension.mismatch(built_for, have)
    assert (reason is None) is fits
    assert fits or f"built for torch {built_for}, you have {have}" in reason


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({}, "never built"),
        ({"extension": "no, because of a test"}, "no, because of a test"),
        ({"extension": "yes, because of a test", "torch": "2.13.0"}, "missing, although it was built"),
    ],
)
def test_reason_for_a_missing_library(monkeypatch, tmp_path, record, reason):
    monkeypatch.setattr(_extension, "HERE", tmp_path)
    monkeypatch.setattr(_extension, "find_installed", lambda: None)
    file, told = _extension.find(record)
    assert file is None and reason in told


def test_build_record_survives_a_broken_file(tmp_path):
    assert _extension.build_record(tmp_path) == {}
    for broken in ("{broken", "[1]", '{"extension": 1, "torch": ["2.13.0"]}'):
        (tmp_path / "_build_info.json").write_text(broken)
        assert _extension.build_record(tmp_path) == {}
    (tmp_path / "_build_info.json").write_bytes(b"\xff\xfe")
    assert _extension.build_record(tmp_path) == {}


def test_cuda_home_is_that_of_a_compiler_behind_a_script(tmp_path):
    home = tmp_path / "cuda"
    (tmp_path / "nvcc").write_text(f"#!/bin/sh\necho '#$ TOP={home}/bin/..' >&2\n")
    (tmp_path / "nvcc").chmod(0o755)
    (home / "bin").mkdir(parents=True)
    assert decide.cuda_home({"PATH": str(tmp_path)}) == str(home)
    (tmp_path / "nvcc").write_text("#!/bin/sh\necho something else >&2\n")
    assert decide.cuda_home({"PATH": str(tmp_path)}) is None
    assert decide.cuda_home({"PATH": str(home)}) is None


@pytest.mark.parametrize("code, build", [("int one() { return 1; }", True), ("this is no C++", False)])
def test_bfloat16_instructions_are_compiled_where_the_compiler_takes_them(tmp_path, code, build):
    if sys.platform != "linux" or platform.machine() != "x86_64":
        pytest.skip("they are of x86-64 Linux")
    source = tmp_path / "x86.cpp"
    source.write_text(code)
    decision = decide.bfloat16_decision(source)
    assert decision.build == build and "x86.cpp" in decision.reason


@pytest.mark.parametrize(
    ("system", "machine", "build"),
    [("Linux", "aarch64", True), ("Darwin", "arm64", True), ("Darwin", "x86_64", False), ("Linux", "riscv64", False)],
)
def test_bfloat16_instructions_of_other_processors(tmp_path, system, machine, build):
    source = tmp_path / "x86.cpp"
    source.write_text("x86-64 alone compiles this")
    assert decide.bfloat16_decision(source, system=system, machine=machine).build == build


def test_bfloat16_instructions_need_a_compiler(tmp_path):
    decision = decide.bfloat16_decision(tmp_path / "x86.cpp", {"CXX": "no-such-compiler", "PATH": ""})
    assert not decision.build and "no-such-compiler" in decision.reason
