"""Wheels of other versions than the installed one, each in a folder of its own under build/wheels."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT


def wheel(requirement: str) -> Path:
    """Folder with the files of `requirement`, such as "triton==3.6.0"; skips the test where pip cannot get it."""
    folder = ROOT / "build" / "wheels" / requirement
    if not folder.exists():
        new = folder.with_name(f"{requirement}.new")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--upgrade"]
        done = subprocess.run([*command, "--target", new, requirement], capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"pip cannot get {requirement}: {done.stderr.strip().splitlines()[-1:]}")
        new.rename(folder)
    return folder
