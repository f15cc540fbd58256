"""The folder of a run: its checkpoints step-00000100, the newest one shown as its own files, a lock. Needs no torch."""

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
CHECKPOINTS = "checkpoints"  # folder of them in --output of finetune.py, until training has come to its end


@contextmanager
def locked(output: Path) -> Iterator[None]:
    """The folder, made if need be, for one writer alone. A killed process lets go of it too.

    Raises:
        ValueError: another run writes there, files cannot be written there, or its file system has no locks.
    """
    made = not output.exists()
    file = _lock(output)
    try:
        yield
    finally:
        if fcntl is None:
            file.close()  # because Windows removes no open file
        with suppress(PermissionError):  # because the next writer may have opened it there
            (output / LOCK).unlink(missing_ok=True)  # elsewhere while it is held: `_lock` looks whether it is there
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
            file.close()  # its last owner removed it before it was held
    except OSError as error:
        raise ValueError(f"--output {output} cannot be written: {error.strerror}") from None


def _hold(file: IO[str], output: Path) -> None:
    """Raises ValueError where another process holds it, or there are no locks."""
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            import msvcrt

            file.seek(1 << 20)  # a byte that is not there, so that others may read the rest
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
    """Those in a folder, the newest last. Other files and folders of the user may lie beside them."""
    found = (path for path in output.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name, re.ASCII))
    return sorted(found, key=step_of)


def latest(output: Path) -> Path | None:
    """The newest checkpoint in a folder."""
    return next(reversed(checkpoints(output)), None)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def find(path: Path) -> Path:
    """A checkpoint, or the newest one in the output folder of a run.

    Raises:
        ValueError: there is none.
    """
    found = path if (path / "config.json").exists() else latest(path)
    if found is None:
        raise ValueError(f"there is no checkpoint in {path}")
    return found


def read_settings(checkpoint: Path) -> dict[str, Any]:
    """What settings.json holds.

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
    """Removes all checkpoints in a folder."""
    for link in output.glob("*"):
        if link.is_symlink() and (link.name == LATEST or os.readlink(link).startswith(LATEST)):
            link.unlink()
    for old in checkpoints(output):
        remove_one(old)


def show(output: Path, newest: Path) -> None:
    """Makes `output` itself a model folder: links to the files of LATEST, which is a link that is switched at once."""
    switched = output / f".{LATEST}"
    try:
        switched.unlink(missing_ok=True)
        switched.symlink_to(newest.name)
        os.replace(switched, output / LATEST)
        for path in newest.iterdir():
            shown = output / path.name
            if path.suffix != ".pt" and path.name != TRAINING and not shown.exists() and not shown.is_symlink():
                shown.symlink_to(Path(LATEST, path.name))
    except OSError:  # no links here: `find` knows the newest checkpoint anyway
        switched.unlink(missing_ok=True)


def remove_one(folder: Path) -> None:
    """Removes a checkpoint; a half of one does not look like one."""
    half = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(half, ignore_errors=True)  # of a kill; renaming takes no folder that has files
    shutil.rmtree(folder.rename(half))


def sync(path: Path) -> None:
    """Onto the disk, so that a power cut after the renaming finds the contents too."""
    if os.name != "posix":  # elsewhere folders cannot be opened
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
