"""The keys of a store's rows and entries in a backend.

=============================  =====================================================
``store``                      ``{"format": 2, "namespace": name}``
``text/<text>``                ``{"text": ..., "change": n, "expires_at": ...}``
``log/<n>``                    ``+`` and the text that change ``n`` added, or ``-`` and
                               the digest of a removed text; empty if obsolete
``cleared``                    the highest number of a change that was removed
``held/<text>/<document>``     the name of a document that holds the text
``document/<document>/<text>`` the same, from the document's side: its revision, or empty
``kv/<text>/<fingerprint>-v2`` an entry, see :mod:`ragkv.store.entry.format`
``version/<version>``          the same of a contextual version, ``<text>/<fingerprint>-v2``
``behind/<other>/<version>``   empty: that version was computed behind this text
=============================  =====================================================

``<text>``, ``<other>`` and ``<document>`` are digests.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import NamedTuple

from blake3 import blake3

from ragkv.model.fingerprint import Fingerprint
from ragkv.store.backends.backend import Blob
from ragkv.store.entry.header import FORMAT_VERSION

LAYOUT = 2
"""Version of the rows."""

OWNER = "store"
CLEARED = "cleared"
_VERSION = f"-v{FORMAT_VERSION}"


def digest_of_text(text: str) -> str:
    """Return the digest of any text, lone surrogates included."""
    return blake3(to_bytes(text)).hexdigest()


def text_key(digest: str) -> str:
    """Return the key of a text's row."""
    return f"text/{digest}"


def held_key(text: str, document: str) -> str:
    """Return the key of a text's document; both are digests."""
    return f"held/{text}/{document}"


def holds_key(document: str, text: str) -> str:
    """Return the key of a document's text; both are digests."""
    return f"document/{document}/{text}"


def entry_key(text: str, fingerprint: str) -> str:
    """Return an entry's key from the digests of its text and fingerprint."""
    return f"kv/{text}/{fingerprint}{_VERSION}"


def entries_of(text: str) -> str:
    """Return the prefix of the keys of all entries of a text, in any format."""
    return f"kv/{text}/"


def parse_entry_key(key: str) -> tuple[str, str] | None:
    """Return the digests in an entry's or version's key; None for another format."""
    parts = key.removesuffix(_VERSION).split("/")
    return (parts[1], parts[2]) if len(parts) == 3 and key.endswith(_VERSION) else None


def version_key(text: str, fingerprint: str) -> str:
    """Return a version's key from the digests of its text and its own fingerprint."""
    return f"version/{text}/{fingerprint}{_VERSION}"


def versions_of(text: str) -> str:
    """Return the prefix of the keys of all versions of a text."""
    return f"version/{text}/"


def behind_key(other: str, version: str) -> str:
    """Return the key of the note that a version, by its key, was computed behind a text."""
    return f"behind/{other}/{version.removeprefix('version/')}"


def parse_behind_key(key: str) -> tuple[str, str] | None:
    """Return the text's digest and the version's key; None for any other key."""
    room, _, rest = key.partition("/")
    other, _, version = rest.partition("/")
    return (other, f"version/{version}") if room == "behind" and version else None


def log_key(change: int) -> str:
    """Return the key of a change."""
    return f"log/{change:020}"


def change_of(key: str) -> int:
    """Return a change's number; 0 for any other key."""
    number = key.removeprefix("log/")
    return int(number) if len(number) == 20 and number.isdecimal() else 0


@lru_cache(maxsize=64)
def digest_of_fingerprint(fingerprint: Fingerprint) -> str:
    """Return the fingerprint's digest, cached since it is slow to compute."""
    return fingerprint.digest


class Change(NamedTuple):
    """A row of the log: an added text, or the digest of a removed one."""

    text: str | None = None
    digest: str = ""

    def to_bytes(self) -> bytes:
        """Return the row."""
        return f"-{self.digest}".encode() if self.text is None else b"+" + to_bytes(self.text)

    @classmethod
    def parse(cls, data: Blob | None) -> Change:
        """Return the change in a row; an empty one for damaged data."""
        try:
            row = to_text(data or b"")
        except ValueError:
            return cls()
        return cls(text=row[1:]) if row.startswith("+") else cls(digest=row[1:])


class TextRow(NamedTuple):
    """A text's row.

    Attributes
    ----------
    text
        The chunk.
    change
        Number of the change that added it.
    expires_at
        Seconds since the epoch; None for never.
    """

    text: str
    change: int
    expires_at: float | None

    def to_bytes(self) -> bytes:
        """Return the row as JSON."""
        return to_bytes(json.dumps(self._asdict(), ensure_ascii=False))

    @classmethod
    def parse(cls, data: Blob | None, digest: str) -> TextRow | None:
        """Return the row of the text with this digest; None for other data."""
        if data is None:
            return None
        try:
            row = cls(**json.loads(to_text(data)))
            fits = (
                type(row.text) is str
                and type(row.change) is int
                and type(row.expires_at) in {float, int, type(None)}
                and digest_of_text(row.text) == digest
            )
        except (ValueError, TypeError, RecursionError):
            return None
        return row if fits else None


def to_bytes(text: str) -> bytes:
    """Encode any text, lone surrogates included."""
    return text.encode("utf-8", "surrogatepass")


def to_text(data: Blob) -> str:
    """Decode bytes made by :func:`to_bytes`.

    Raises
    ------
    ValueError
        They are no such bytes.
    """
    return bytes(data).decode("utf-8", "surrogatepass")
