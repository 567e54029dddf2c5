"""A store over another one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ragkv.chunk.kv import ChunkKV
from ragkv.model.fingerprint import Fingerprint
from ragkv.store.base import Changes, EntryInfo, Room, Store, Terms, TierUse

if TYPE_CHECKING:
    from ragkv.store.versions.version import Version


class StoreOver(Store):
    """A store over another one, to which it delegates every call that a subclass does not define.

    Parameters
    ----------
    below
        Any store. Closed together with this one.
    """

    def __init__(self, below: Store) -> None:
        self.below = below
        self.remote = below.remote

    def retain(self, text: str, fingerprint: Fingerprint, terms: Terms) -> bool:  # noqa: D102
        return self.below.retain(text, fingerprint, terms)

    def contains(self, text: str, fingerprint: Fingerprint) -> bool:  # noqa: D102
        return self.below.contains(text, fingerprint)

    def expiry(self, text: str) -> float | None:  # noqa: D102
        return self.below.expiry(text)

    def documents(self, text: str) -> list[str]:  # noqa: D102
        return self.below.documents(text)

    def keep_only(  # noqa: D102
        self, document: str, texts: Iterable[str], revision: str | None = None
    ) -> int:
        return self.below.keep_only(document, texts, revision)

    def entries(self) -> Iterator[EntryInfo]:  # noqa: D102
        return self.below.entries()

    def was_evicted(self, text: str) -> bool:  # noqa: D102
        return self.below.was_evicted(text)

    def fingerprints(self, text: str) -> list[Fingerprint]:  # noqa: D102
        return self.below.fingerprints(text)

    def room(self) -> Room | None:  # noqa: D102
        return self.below.room()

    def make_room(self) -> bool:  # noqa: D102
        return self.below.make_room()

    def tiers_in_use(self) -> tuple[TierUse, ...]:  # noqa: D102
        return self.below.tiers_in_use()

    def gc(self) -> int:  # noqa: D102
        return self.below.gc()

    def put_version(self, version: Version) -> int:  # noqa: D102
        return self.below.put_version(version)

    def versions(self, text: str, fingerprint: Fingerprint) -> list[Version]:  # noqa: D102
        return self.below.versions(text, fingerprint)

    def read_version(self, version: Version) -> ChunkKV | None:  # noqa: D102
        return self.below.read_version(version)

    def delete_version(self, version: Version) -> None:  # noqa: D102
        self.below.delete_version(version)

    def changes(self, since: int) -> Changes:  # noqa: D102
        return self.below.changes(since)

    def load_seconds(  # noqa: D102
        self, text: str, fingerprint: Fingerprint, nbytes: int
    ) -> float | None:
        return self.below.load_seconds(text, fingerprint, nbytes)

    def texts(self) -> Iterator[str]:  # noqa: D102
        return self.below.texts()

    def close(self) -> None:  # noqa: D102
        self.below.close()
