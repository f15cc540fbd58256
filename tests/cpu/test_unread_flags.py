"""Flags of unread rows (csrc/cpu/unread.h) are read for the rows that are loaded, and for no other."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from lib.simt import simt_build
from tests import ROOT

SOURCE = Path(__file__).with_name("unread_flags.cpp")


@pytest.mark.skipif(simt_build.COMPILER is None, reason=simt_build.NO_COMPILER)
def test_no_flag_beyond_the_last_row_is_read(tmp_path):
    """Rows are prefetched ahead of those that are loaded, beyond the last of them too."""
    program = tmp_path / "unread_flags"
    command = [simt_build.COMPILER, "-std=c++17", "-fsanitize=address", "-Wno-psabi", f"-I{ROOT / 'csrc'}"]
    (tmp_path / "empty.cpp").write_text("int main() {}\n")
    if subprocess.run([*command, tmp_path / "empty.cpp", "-o", program], capture_output=True).returncode:
        pytest.skip("the compiler has no address sanitizer")
    subprocess.run([*command, SOURCE, "-o", program], check=True)
    environment = os.environ | {"ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run([program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
