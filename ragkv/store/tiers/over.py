"""A store over another one, to which it hands on what it does not do itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ragkv.model.fingerprint import Fingerprint
from ragkv.store.base import EntryInfo, Store


class StoreOver(Store):
    """Hands calls on; what becomes of entries (get, open, put, delete) its classes say.

    Parameters
    ----------
    below
        Any store. Closed together with this one.
    """

    def __init__(self, below: Store) -> None:
        self.below = below
        self.far = below.far

    def hold(
        self,
        text: str,
        fingerprint: Fingerprint,
        *,
        document: str | None = None,
        expires_at: float | None = None,
    ) -> bool:
        """Hold the chunk below."""
        return self.below.hold(text, fingerprint, document=document, expires_at=expires_at)

    def contains(self, text: str, fingerprint: Fingerprint) -> bool:
        """Whether the entry is below."""
        return self.below.contains(text, fingerprint)

    def expiry(self, text: str) -> float | None:
        """Return the time of the chunk below."""
        return self.below.expiry(text)

    def keep_only(self, document: str, texts: Iterable[str]) -> int:
        """Let the store below decide."""
        return self.below.keep_only(document, texts)

    def entries(self) -> Iterator[EntryInfo]:
        """Entries of the store below."""
        return self.below.entries()

    def make_room(self) -> bool:
        """Ask the store below."""
        return self.below.make_room()

    def gc(self) -> int:
        """Remove what has expired below."""
        return self.below.gc()

    def changes(self, since: int) -> tuple[int, list[str]]:
        """Return the changes of the store below."""
        return self.below.changes(since)

    def deletions(self, since: int) -> list[str]:
        """Return the deletions of the store below."""
        return self.below.deletions(since)

    def load_seconds(self, text: str, fingerprint: Fingerprint, nbytes: int) -> float | None:
        """Return what the store below says."""
        return self.below.load_seconds(text, fingerprint, nbytes)

    def texts(self) -> Iterator[str]:
        """Texts of the store below."""
        return self.below.texts()

    def close(self) -> None:
        """Close the store below."""
        self.below.close()
