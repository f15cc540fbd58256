"""Folders for compiled code that is kept from run to run."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def own_cache(name: str) -> Path:
    """This user's folder `name` for compiled code, in the temporary folder.

    Raises:
        PermissionError: the folder is a link, another user's, or others may write to it: its code would be run.
    """
    folder = Path(tempfile.gettempdir()) / f"xlnet-kernels-{name}-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if folder.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(f"{folder} must be a folder that this user alone can write to: remove it")
    return folder
