"""Folder of a run: checkpoints step-00000100, links to the newest one's files, and a lock. Needs no torch."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LATEST, TRAINING, LOCK = "latest", "training", ".lock"
CHECKPOINTS = "checkpoints"  # folder of them in --output of finetune.py, until training has ended


@contextmanager
def locked(output: Path) -> Iterator[None]:
    """Lock the folder, made if missing, for a single writer. The lock ends with its process.

    Raises:
        ValueError: another run writes there, the folder is not writable, or its file system has no locks.
    """
    made = not output.exists()
    file = _lock(output)
    try:
        yield
    finally:
        if fcntl is None:
            # Because Windows cannot remove an open file.
            file.close()
        # Because the next writer may have opened it on Windows.
        with suppress(PermissionError):
            (output / LOCK).unlink(missing_ok=True)  # elsewhere while held: `_lock` checks that the file exists
        file.close()
        if made:
            with suppress(OSError):  # a folder with files stays
                output.rmdir()


def _lock(output: Path) -> IO[str]:
    path = output / LOCK
    try:
        while True:
            output.mkdir(parents=True, exist_ok=True)
            file = open(path, "a+", encoding="utf-8")
            _hold(file, output)
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}")
                file.flush()
                return file
            file.close()  # its last owner removed the file before the lock was taken
    except OSError as error:
        raise ValueError(f"--output {output} cannot be written: {error.strerror}") from None


def _hold(file: IO[str], output: Path) -> None:
    """Lock the file; raises ValueError if another process holds it, or there are no locks."""
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            import msvcrt

            # A byte beyond the end, so that others may read the file.
            file.seek(1 << 20)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
    except OSError as error:
        file.seek(0)
        holder = file.read() or "another process"
        file.close()
        if isinstance(error, (BlockingIOError, PermissionError)):
            raise ValueError(
                f"--output {output}: another run writes there ({holder}); wait for it, stop it, or name another folder"
            ) from None
        raise ValueError(
            f"--output {output}: its file system has no locks, which keep two runs apart ({error.strerror}); name a "
            f"folder on another one"
        ) from None


def checkpoints(output: Path) -> list[Path]:
    """The checkpoints in a folder, newest last. The folder may have other files and folders."""
    found = (path for path in output.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name, re.ASCII))
    return sorted(found, key=step_of)


def latest(output: Path) -> Path | None:
    """The newest checkpoint in a folder."""
    return next(reversed(checkpoints(output)), None)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def find(path: Path) -> Path:
    """The checkpoint at `path`, or the newest in the output folder of a run.

    Raises:
        ValueError: there is no checkpoint.
    """
    found = path if (path / "config.json").exists() else latest(path)
    if found is None:
        raise ValueError(f"there is no checkpoint in {path}")
    return found


def read_settings(checkpoint: Path) -> dict[str, Any]:
    """The content of settings.json.

    Raises:
        ValueError: it is missing or damaged.
    """
    path = checkpoint / "settings.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(settings, dict) or not isinstance(settings.get("options"), dict):
            raise ValueError("it must be an object with options")
        return settings
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is missing or damaged: {error}") from None


def remove(output: Path) -> None:
    """Remove all checkpoints in a folder."""
    for link in output.glob("*"):
        if link.is_symlink() and (link.name == LATEST or os.readlink(link).startswith(LATEST)):
            link.unlink()
    for old in checkpoints(output):
        remove_one(old)


def show(output: Path, newest: Path) -> None:
    """Make `output` itself a model folder: links to the files of LATEST, a link that is switched atomically."""
    switched = output / f".{LATEST}"
    try:
        switched.unlink(missing_ok=True)
        switched.symlink_to(newest.name)
        os.replace(switched, output / LATEST)
        for path in newest.iterdir():
            shown = output / path.name
            if path.suffix != ".pt" and path.name != TRAINING and not shown.exists() and not shown.is_symlink():
                shown.symlink_to(Path(LATEST, path.name))
    except OSError:  # without links `find` still finds the newest checkpoint
        switched.unlink(missing_ok=True)


def remove_one(folder: Path) -> None:
    """Remove a checkpoint; a half-removed one is not taken for a checkpoint."""
    half = folder.with_name(f".{folder.name}.unfinished")
    # Left by a kill; removed because renaming needs an empty target.
    shutil.rmtree(half, ignore_errors=True)
    shutil.rmtree(folder.rename(half))


def sync(path: Path) -> None:
    """Flush to the disk, so that the contents survive a power cut after the renaming."""
    if os.name != "posix":  # elsewhere folders cannot be opened
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
