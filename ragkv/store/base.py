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

    ``reason`` is empty on a hit, otherwise one of

    ``absent``
        The text is not stored.
    ``fingerprint``
        The text is stored, but for another model, sink, dtype or codec.
    ``tokens``
        The entry under this text's key is of another text, so of other tokens.
    ``checksum``
        The entry's bytes are not those that were written.
    ``format``
        It is an entry of a version that this ragkv does not read, or no entry.
    ``unreadable``
        Its file, or the store's index, cannot be read, is cut short or missing.
    """

    entry: ChunkKV | None
    reason: str = ""


class Store(ABC):
    """Keeps ChunkKVs of one namespace by (text, fingerprint).

    All methods may be called from several threads, and several processes may open
    the same place. ``get`` never raises for what it finds there: a torn, tampered,
    foreign or unknown entry is a miss with its reason. Where the store may write, an
    entry that will never be readable is also removed, so that ``contains`` says False
    and the next precompute puts it back.
    """

    @abstractmethod
    def get(self, text: str, fingerprint: Fingerprint) -> Lookup:
        """Return the chunk's entry if its whole fingerprint and checksum agree."""

    @abstractmethod
    def put(self, entry: ChunkKV, fingerprint: Fingerprint) -> int:
        """Write an entry atomically and return the bytes it takes.

        An entry of the same text and fingerprint is replaced. The tensors may be views
        and may lie on any device; entries come back on the CPU. The bytes are 0 where a
        store that may forget entries has not kept this one.

        Raises
        ------
        StoreFullError
            The disk or the quota is full; nothing of the entry remains.
        StoreError
            The place cannot be written, or the entry does not fit its fingerprint.
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
