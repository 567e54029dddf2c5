"""The contract that every place of storage keeps."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Generic, NamedTuple, TypeVar

from ragkv.chunk.kv import ChunkKV, LayeredKV
from ragkv.model.fingerprint import Fingerprint
from ragkv.store.entry.lazy import CorruptEntryError

if TYPE_CHECKING:
    from ragkv.store.versions.version import Version


EntryT_co = TypeVar("EntryT_co", bound=LayeredKV, covariant=True)


@dataclass(frozen=True, slots=True)
class Found(Generic[EntryT_co]):
    """Answer to :meth:`Store.open` and :meth:`Store.get`: an entry, or the reason of a miss.

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
    ``codec``
        The package that its codec needs is not installed here; the entry stays.
    ``expired``
        It has expired. ``gc`` deletes it.
    ``unreadable``
        Its bytes, or the place they lie in, cannot be read, are truncated or missing.

    ``expires_at`` is the time at which a hit becomes a miss, None for never; tiers
    keep it with their copy.
    """

    entry: EntryT_co | None
    reason: str = ""
    expires_at: float | None = None

    def load_all(self) -> Found[ChunkKV]:
        """Load all layers of a lazy entry; a corrupt layer makes it a miss."""
        if self.entry is None:
            return Found(None, self.reason)
        try:
            return Found(self.entry.whole(), expires_at=self.expires_at)
        except CorruptEntryError as corrupt:
            return Found(None, corrupt.reason)


@dataclass(frozen=True, slots=True)
class Terms:
    """What a chunk is stored for, and until when.

    Attributes
    ----------
    document
        What the chunk was cut from. A chunk may belong to several documents.
    expires_at
        Seconds since the epoch (``time.time()``) from which on the chunk is a miss; None for
        never. A chunk that is stored several times expires at the latest of the times.
        :attr:`KEEP` leaves the time of a stored chunk as it is; a new chunk gets none.
    revision
        The state of the document that the chunk was cut from; empty where none was named.
    """

    document: str | None = None
    expires_at: float | None = None
    revision: str = ""

    KEEP: ClassVar[float] = -math.inf


class TierUse(NamedTuple):
    """What a tier of a store holds, and has served since it was opened.

    Attributes
    ----------
    name
        ``device``, ``memory``, ``below`` for the store behind them, ``prompts`` or ``versions``.
    nbytes
        Bytes in use; None where they are not counted.
    hits
        Entries that were found; for ``prompts``, prompts that began with former rows. ``versions``
        are listed once there is one.
    """

    name: str
    nbytes: int | None
    hits: int


class Room(NamedTuple):
    """What a store's disk has left: ``nbytes`` in the file system of the folder ``place``."""

    nbytes: int
    place: str


class Changes(NamedTuple):
    """Answer to :meth:`Store.changes`.

    Attributes
    ----------
    newest
        The store's change number.
    added, removed
        Texts. One that was deleted and put again is in both: remove first, then add.
    """

    newest: int
    added: list[str]
    removed: list[str]


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """Metadata of a stored entry.

    Parameters
    ----------
    text
        The chunk.
    fingerprint
        :attr:`Fingerprint.digest <ragkv.model.fingerprint.Fingerprint.digest>` of the model,
        sink and codec.
    nbytes
        Bytes of the stored entry.
    documents
        The documents that the chunk belongs to, sorted.
    expires_at
        Seconds since the epoch; None for never.
    """

    text: str
    fingerprint: str
    nbytes: int
    documents: tuple[str, ...] = ()
    expires_at: float | None = None


class Store(ABC):
    """Keeps ChunkKVs of one namespace by (text, fingerprint).

    All methods may be called from several threads, and several processes may open
    the same place. ``open`` and ``get`` never raise for what they find there: a torn, tampered,
    foreign or unknown entry is a miss with its reason. A writable store also deletes an
    entry that can never be read, so that ``contains`` is False and the next precompute
    writes it again.
    """

    remote: bool = False
    """Whether entries cross a network: several at once take no longer than one."""

    @abstractmethod
    def open(self, text: str, fingerprint: Fingerprint) -> Found[LayeredKV]:
        """Return the chunk's entry if its whole fingerprint agrees; its layers may be lazy.

        A lazy layer is verified when it is read: a corrupt one raises
        :class:`ragkv.store.entry.lazy.CorruptEntryError` there.
        """

    def get(self, text: str, fingerprint: Fingerprint) -> Found[ChunkKV]:
        """Return the chunk's entry with all layers loaded and verified."""
        return self.open(text, fingerprint).load_all()

    @abstractmethod
    def put(self, entry: ChunkKV, fingerprint: Fingerprint, terms: Terms = Terms()) -> int:
        """Write an entry atomically and return its bytes.

        An entry of the same text and fingerprint is replaced. The tensors may be views
        and may lie on any device; entries come back on the CPU. The bytes are 0 where a
        tier has not admitted the entry.

        Raises
        ------
        StoreFullError
            The disk or the quota is full; nothing of the entry remains.
        StoreError
            The place cannot be written, or the entry does not fit its fingerprint.
        """

    @abstractmethod
    def retain(self, text: str, fingerprint: Fingerprint, terms: Terms) -> bool:
        """Apply ``terms`` to a stored entry, as ``put`` would, without writing its bytes.

        Returns whether the entry is stored; otherwise it has to be put.

        Raises
        ------
        StoreError
            The place cannot be written.
        """

    @abstractmethod
    def contains(self, text: str, fingerprint: Fingerprint) -> bool:
        """Whether an entry is stored and has not expired, without reading its tensors."""

    @abstractmethod
    def expiry(self, text: str) -> float | None:
        """Return the time from which on the chunk is a miss; None for never or for no chunk."""

    @abstractmethod
    def documents(self, text: str) -> list[str]:
        """Return the documents that the chunk belongs to, sorted; none for no chunk."""

    @abstractmethod
    def delete(self, text: str) -> int:
        """Delete the chunk's entries under every fingerprint; return how many."""

    @abstractmethod
    def keep_only(self, document: str, texts: Iterable[str], revision: str | None = None) -> int:
        """Reduce a document's chunks to ``texts``; return the number of deleted chunks.

        Chunks of no other document are deleted, under every fingerprint. This is for a
        document that was ingested again: its new chunks are put first. Chunks of the given
        revision stay, too: other calls, and other processes, put them.
        """

    def forget_document(self, document: str) -> int:
        """Delete the chunks that belong to this document alone; return how many."""
        return self.keep_only(document, ())

    @abstractmethod
    def entries(self) -> Iterator[EntryInfo]:
        """Yield the metadata of all entries, expired ones included."""

    def room(self) -> Room | None:
        """Return what the disk has left; None where that is not known, as of a server."""
        return None

    def gc(self) -> int:
        """Delete expired chunks and the remains of crashed writers; return the deleted chunks."""
        now = time.time()
        expired = {e.text for e in self.entries() if has_expired(e.expires_at, now)}
        return sum(self.delete(text) > 0 for text in expired)

    def put_version(self, version: Version) -> int:
        """Write a version's rows and return their bytes: 0 where the store keeps none.

        They are deleted with any of its chunks.

        Raises
        ------
        StoreFullError, StoreError
            As :meth:`put`.
        """
        del version
        return 0

    def versions(self, text: str, fingerprint: Fingerprint) -> list[Version]:
        """Return the stored versions of a chunk's entry, without their rows; never raise."""
        del text, fingerprint
        return []

    def read_version(self, version: Version) -> ChunkKV | None:
        """Return a version's rows; None where they are not stored, or damaged; never raise."""
        del version
        return None

    def delete_version(self, version: Version) -> None:
        """Delete a version's rows, if they are stored; raises StoreError."""
        del version

    @abstractmethod
    def changes(self, since: int) -> Changes:
        """Return the texts added and removed after change ``since``, by any process.

        Change numbers only grow, starting from 0 for an empty store. Finders and tiers follow
        a store by this feed. A text that was added and deleted meanwhile may be missing from
        ``added``; one that was put again may be in it, and other added texts in ``removed``.

        Raises
        ------
        StoreError
            The place cannot be read: call again with the same number, or deletions are missed.
        """

    def load_seconds(self, text: str, fingerprint: Fingerprint, nbytes: int) -> float | None:
        """Return the seconds that ``get`` is expected to take for an entry of ``nbytes`` of KV.

        0 for an entry in memory, None before anything was measured.
        """
        del text, fingerprint, nbytes
        return None

    def was_evicted(self, text: str) -> bool:
        """Whether this process evicted the chunk, lately, and it is not stored again."""
        del text
        return False

    def fingerprints(self, text: str) -> list[Fingerprint]:
        """Return what the chunk is stored for; never raise."""
        del text
        return []

    def make_room(self) -> bool:
        """Empty the tier on the model's device; return whether it had anything.

        Its entries are still in the tiers below.
        """
        return False

    def tiers_in_use(self) -> tuple[TierUse, ...]:
        """Return what the tiers hold and have served, the fastest first."""
        return ()

    @abstractmethod
    def texts(self) -> Iterator[str]:
        """Yield all chunk texts in the namespace, each once."""

    @abstractmethod
    def close(self) -> None:
        """Release files and connections; the store cannot be used afterwards."""


def has_expired(expires_at: float | None, now: float) -> bool:
    """Whether a chunk of that expiry time has expired."""
    return expires_at is not None and expires_at <= now


def later(first: float | None, second: float | None) -> float | None:
    """Return the later of two expiry times; None is never."""
    latest = None if first is None or second is None else max(first, second)
    return None if latest == Terms.KEEP else latest
