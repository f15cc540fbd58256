"""Hash of the C++ sources of a build. Imports the standard library only, because setup.py runs this file too."""

import hashlib
from pathlib import Path


def digest(folder: Path) -> str:
    """A short hash of all files under `folder`, csrc of a source tree; "" where there are none."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    found = hashlib.sha256()
    for path in files:
        content = path.read_bytes()
        found.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode() + content)
    return found.hexdigest()[:16] if files else ""
