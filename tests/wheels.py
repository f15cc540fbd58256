"""Wheels of other versions than the installed one, each in a folder of its own under build/wheels."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests import ROOT


def wheel(requirement: str) -> Path:
    """Folder with the files of `requirement`, such as "triton==3.6.0"; skips the test where pip cannot get it."""
    folder = ROOT / "build" / "wheels" / sys.implementation.cache_tag / requirement
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        # A folder of its own, because another process may install the same wheel
        new = Path(tempfile.mkdtemp(dir=folder.parent))
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--upgrade"]
        done = subprocess.run([*command, "--target", new, requirement], capture_output=True, text=True)
        if done.returncode != 0:
            shutil.rmtree(new)
            pytest.skip(f"pip cannot get {requirement}: {done.stderr.strip().splitlines()[-1:]}")
        try:
            new.rename(folder)
        except OSError:  # the other process came first
            shutil.rmtree(new)
    return folder
