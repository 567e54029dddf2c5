"""Files that are whole or not there: private folders, synced temporary files."""

from __future__ import annotations

import errno
import os
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ragkv.errors import StoreError, StoreFullError

TEMPORARY_PREFIX = "tmp-"
TEMPORARY_LIFETIME_S = 3600.0
"""A temporary file older than this has lost its writer."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def store_errors(place: Path) -> Iterator[None]:
    """Raise what the operating system says about ``place`` as a StoreError."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        if error.errno in _FULL:
            raise StoreFullError(f"no room left for {place}: {error.strerror}") from error
        raise StoreError(f"cannot use {place}: {error}") from error


def make_private_folder(folder: Path) -> None:
    """Create a folder and its missing parents, each readable by its owner alone."""
    if folder.is_dir():
        return
    make_private_folder(folder.parent)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if not folder.is_dir():
            raise
    sync_folder(folder.parent)


def write_temporary(folder: Path, parts: Iterable[bytes | bytearray | memoryview]) -> Path:
    """Write a synced temporary file into ``folder``; on failure nothing is left of it."""
    make_private_folder(folder)
    path = folder / f"{TEMPORARY_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | _BINARY, 0o600)
    try:
        try:
            for part in parts:
                _write_all(file, part)
            os.fsync(file)
        finally:
            os.close(file)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return path


def sync_folder(folder: Path) -> None:
    """Make renames and removals in a folder survive a loss of power (POSIX)."""
    if os.name == "nt":  # there is no such thing on Windows
        return
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def is_abandoned(path: Path) -> bool:
    """Whether a temporary file is older than its writer can be."""
    try:
        return time.time() - path.stat().st_mtime > TEMPORARY_LIFETIME_S
    except FileNotFoundError:
        return False


_BINARY = getattr(os, "O_BINARY", 0)


def _write_all(file: int, part: bytes | bytearray | memoryview) -> None:
    view = memoryview(part).cast("B")
    while view:
        view = view[os.write(file, view) :]
