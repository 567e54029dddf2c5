"""The loading speed of a store, against plain memory-mapped files with the same bytes."""

from __future__ import annotations

import os
import secrets
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ragkv.chunk.kv import ChunkKV
from ragkv.config import StoreConfig
from ragkv.errors import StoreError
from ragkv.model.fingerprint import Fingerprint
from ragkv.store import open_chunk_store
from ragkv.store.backends import folder_of, namespace_folder

_FINGERPRINT = Fingerprint("bandwidth", "bandwidth", "bandwidth", "bfloat16")
_LAYERS, _HEADS, _WIDTH = 24, 2, 64
_TOKEN_BYTES = 2 * _LAYERS * _HEADS * _WIDTH * 2


class Pair(NamedTuple):
    """MB/s of the store and of the memory map."""

    store: float
    memmap: float

    @property
    def share(self) -> float:
        """The store's bandwidth as a share of the memory map's."""
        return self.store / self.memmap

    def to_dict(self) -> dict[str, float]:
        """Return plain JSON-ready types."""
        return {"store": self.store, "memmap": self.memmap, "share": self.share}


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Medians over the rounds, in MB (10^6 bytes) of keys and values a second.

    ``cold`` is None where no files of the store can be dropped from the page cache.
    ``megabytes`` is of all entries, ``chunk_megabytes`` of each.
    """

    megabytes: float
    chunk_megabytes: float
    rounds: int
    warm: Pair
    cold: Pair | None

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON-ready types."""
        cold = None if self.cold is None else self.cold.to_dict()
        return asdict(self) | {"warm": self.warm.to_dict(), "cold": cold}


def bandwidth(
    place: str | Path | None,
    *,
    megabytes: float = 64,
    chunk_megabytes: float = 8,
    rounds: int = 5,
) -> Bandwidth:
    """Put random entries into a namespace of their own, load them in turn, delete them.

    Every ``get`` verifies all checksums and copies the entry, and
    no tier keeps it. The memory maps are of plain files, one with the keys and values of
    each entry, in the store's folder, or in the folder for temporary files where the store
    is no folder; they are copied into memory, too, and nothing verifies them.

    Cold means that the files' pages were dropped from the page cache
    (``posix_fadvise(POSIX_FADV_DONTNEED)``) after they were synced. What the drive, its
    controller or a virtual machine's host keep in their own memory stays there. Warm means
    that the same files have just been read.

    Parameters
    ----------
    place
        A folder or an address, as :class:`ragkv.config.StoreConfig` takes it.
    megabytes
        10^6 bytes of keys and values to load in each round, one entry at least.
    chunk_megabytes
        10^6 bytes of keys and values of each entry.
    rounds
        How often each is timed, store and map in turn.

    Raises
    ------
    ConfigError, StoreError
        The place cannot be used, or has no room.
    """
    folder = folder_of(place)
    config = StoreConfig(place)
    tokens = max(1, round(chunk_megabytes * 1e6 / _TOKEN_BYTES))
    count = max(1, round(megabytes * 1e6 / (tokens * _TOKEN_BYTES)))
    namespace = f"bandwidth-{secrets.token_hex(8)}"
    texts = [f"entry {number}" for number in range(count)]
    with (
        _removed_after(None if folder is None else namespace_folder(folder, namespace)),
        closing(open_chunk_store(config, namespace)) as store,
        tempfile.TemporaryDirectory(prefix="bandwidth-", dir=folder) as beside,
    ):
        plain = [Path(beside) / str(number) for number in range(count)]
        nbytes = 0
        try:
            for number, (text, path) in enumerate(zip(texts, plain, strict=True)):
                entry = _entry(number, text, tokens)
                store.put(entry, _FINGERPRINT)
                with path.open("wb") as file:
                    file.write(entry.keys.view(torch.uint8).numpy().data)
                    file.write(entry.values.view(torch.uint8).numpy().data)
                    file.flush()
                    os.fsync(file.fileno())
                nbytes += entry.nbytes

            def load() -> None:
                for text in texts:
                    if store.get(text, _FINGERPRINT).entry is None:
                        raise StoreError("an entry that was just put is not there")

            def copy() -> None:
                for path in plain:
                    np.array(np.memmap(path, dtype=np.uint8, mode="r"))

            cold = None
            if folder is not None and hasattr(os, "posix_fadvise"):
                cold = _pair(load, copy, nbytes, rounds, before=lambda: _forget(folder))
            load()
            warm = _pair(load, copy, nbytes, rounds)
        finally:
            for text in texts:
                store.delete(text)
    return Bandwidth(nbytes / 1e6, nbytes / 1e6 / count, rounds, warm, cold)


@contextmanager
def _removed_after(folder: Path | None) -> Iterator[None]:
    try:
        yield
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _pair(
    load: Callable[[], None],
    copy: Callable[[], None],
    nbytes: int,
    rounds: int,
    before: Callable[[], None] = lambda: None,
) -> Pair:
    seconds: dict[Callable[[], None], list[float]] = {load: [], copy: []}
    for _ in range(rounds):
        for step, taken in seconds.items():
            before()
            start = time.perf_counter()
            step()
            taken.append(time.perf_counter() - start)
    speeds = [nbytes / 1e6 / statistics.median(taken) for taken in seconds.values()]
    return Pair(*speeds)


def _entry(number: int, text: str, tokens: int) -> ChunkKV:
    shape = (2, _LAYERS, _HEADS, tokens, _WIDTH)
    draw = torch.Generator().manual_seed(number)
    keys, values = torch.randn(shape, generator=draw).to(torch.bfloat16)
    ids = np.arange(tokens, dtype=np.int32)
    return ChunkKV(text, ids, np.stack([ids, ids + 1], axis=1), keys, values)


def _forget(folder: Path) -> None:
    """Ask the system to drop the files' pages, but not an index's: closing it ends its locks."""
    for path in _files(folder):
        if path.parent.name == "index":
            continue
        file = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def _files(folder: Path) -> Iterable[Path]:
    return (path for path in folder.rglob("*") if path.is_file())
