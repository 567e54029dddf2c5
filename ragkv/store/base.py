"""The contract that every place of storage keeps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from ragkv.chunk.kv import ChunkKV
from ragkv.model.fingerprint import Fingerprint


@dataclass(frozen=True, slots=True)
class Lookup:
    """Answer to :meth:`Store.get`: an entry, or the reason why there is none.

    ``reason`` is one of ``absent``, ``fingerprint``, ``tokens``, ``checksum``,
    ``format``, ``unreadable``; empty on a hit.
    """

    entry: ChunkKV | None
    reason: str = ""


class Store(ABC):
    """Keeps ChunkKVs of one namespace by (text, fingerprint).

    All methods may be called from several threads, and several processes may open
    the same place. ``get`` never raises for what it finds there: a torn, tampered,
    foreign or unknown entry is a miss with its reason.
    """

    @abstractmethod
    def get(self, text: str, fingerprint: Fingerprint) -> Lookup:
        """Return the chunk's entry if its whole fingerprint and checksum agree."""

    @abstractmethod
    def put(self, entry: ChunkKV, fingerprint: Fingerprint) -> int:
        """Write an entry atomically and return the bytes it takes.

        Raises
        ------
        StoreFullError
            The disk or the quota is full; nothing of the entry remains.
        StoreError
            The place cannot be written.
        """

    @abstractmethod
    def contains(self, text: str, fingerprint: Fingerprint) -> bool:
        """Whether an entry is there, without reading its tensors."""

    @abstractmethod
    def delete(self, text: str) -> int:
        """Remove the chunk's entries under every fingerprint; return how many."""

    @abstractmethod
    def changes(self, since: int) -> tuple[int, list[str]]:
        """Return the store's change number and the texts put after ``since``.

        Change numbers only grow, starting from 0 for an empty store. This is how a
        finder learns of chunks, its own process's and other processes'. A text that
        was deleted meanwhile may be missing from the list.
        """

    @abstractmethod
    def texts(self) -> Iterator[str]:
        """All chunk texts in the namespace, each once."""

    @abstractmethod
    def close(self) -> None:
        """Release files and connections; the store can not be used afterwards."""
