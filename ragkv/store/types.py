"""Arguments and results of stores."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Generic, NamedTuple, TypeVar

from ragkv.chunk.kv import ChunkKV, LayeredKV
from ragkv.store.entry.lazy import CorruptEntryError

EntryT_co = TypeVar("EntryT_co", bound=LayeredKV, covariant=True)


@dataclass(frozen=True, slots=True)
class Found(Generic[EntryT_co]):
    """Answer to a store's ``open`` and ``get``: an entry, or the reason of a miss.

    ``reason`` is empty on a hit, else one of

    ``absent``
        The text is not stored.
    ``fingerprint``
        The text is stored, but for another model, sink, dtype or codec.
    ``tokens``
        The entry under this text's key was made of another text.
    ``checksum``
        The entry's bytes differ from those written.
    ``format``
        This ragkv does not read the entry's version, or it is no entry.
    ``expired``
        It has expired. ``gc`` deletes it.
    ``unreadable``
        Its bytes are truncated, missing, or cannot be read.

    ``expires_at`` is the time at which a hit becomes a miss, None for never. Tiers store it with
    their copy.
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
    """The document and the expiry time of a stored chunk.

    Attributes
    ----------
    document
        The chunk's document. A chunk can belong to several.
    expires_at
        Seconds since the epoch (``time.time()``) from which on the chunk is a miss; None for
        never. A chunk that is stored several times expires at the latest of the times.
        :attr:`KEEP` does not change the time of a stored chunk; a new chunk never expires.
    revision
        The document's revision; empty where none is given.
    """

    document: str | None = None
    expires_at: float | None = None
    revision: str = ""

    KEEP: ClassVar[float] = -math.inf


class TierUse(NamedTuple):
    """A tier's bytes and hits since the store was opened.

    Attributes
    ----------
    name
        ``device``, ``memory``, ``below`` (the backend), ``prompts`` or ``versions``.
    nbytes
        Bytes in use; None where they are not counted.
    hits
        Entries found; for ``prompts``, prompts that began with rows of earlier ones. ``versions``
        is listed once there is one.
    """

    name: str
    nbytes: int | None
    hits: int


class Room(NamedTuple):
    """Free bytes in the file system of the folder ``place``."""

    nbytes: int
    place: str


class Changes(NamedTuple):
    """Answer to ``changes``.

    Attributes
    ----------
    newest
        The store's change number.
    added, removed
        Texts. One that was deleted and stored again is in both: remove first, then add.
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


def has_expired(expires_at: float | None, now: float) -> bool:
    """Whether a chunk of that expiry time has expired."""
    return expires_at is not None and expires_at <= now


def later(first: float | None, second: float | None) -> float | None:
    """Return the later of two expiry times; None is never."""
    latest = None if first is None or second is None else max(first, second)
    return None if latest == Terms.KEEP else latest
