"""Atomic files: private folders, synced temporary files."""

from __future__ import annotations

import errno
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ragkv.errors import StoreError, StoreFullError

TEMPORARY_PREFIX = "tmp-"
TEMPORARY_LIFETIME_S = 3600.0
"""Age from which on a temporary file has no writer any more."""

_MOST_PARTS = 512  # of one call; Linux takes 1024
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def store_errors(place: Path) -> Iterator[None]:
    """Raise the operating system's errors about ``place`` as StoreError."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        if error.errno in _FULL:
            raise StoreFullError(f"no room left for {place}: {error.strerror}") from error
        raise StoreError(f"cannot use {place}: {error}") from error


def make_private_folder(folder: Path) -> None:
    """Create a folder and its missing parents, each readable only by its owner."""
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
    """Write a synced temporary file into ``folder``; remove it on failure."""
    make_private_folder(folder)
    path = folder / f"{TEMPORARY_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | _BINARY, 0o600)
    try:
        try:
            _write_all(file, parts)
            os.fsync(file)
        finally:
            os.close(file)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return path


def sync_folder(folder: Path) -> None:
    """Make renames and removals in a folder survive a loss of power (POSIX)."""
    if os.name == "nt":  # Windows has no equivalent
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


def _write_all(file: int, parts: Iterable[bytes | bytearray | memoryview]) -> None:
    """Write in few calls: Linux caches long writes in larger pages, which read faster."""
    views = [memoryview(part).cast("B") for part in parts]
    while views:
        written = _write(file, views[:_MOST_PARTS])
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if written:
            views[0] = views[0][written:]


def _write(file: int, views: Sequence[memoryview]) -> int:
    """Write as much as the system takes at once; return the number of bytes."""
    if hasattr(os, "writev"):
        return os.writev(file, views)
    return os.write(file, views[0])  # Windows
