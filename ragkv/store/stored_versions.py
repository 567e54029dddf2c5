"""Contextual versions in a store: their rows, and the header field that describes each."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any

import numpy as np

from ragkv.chunk.kv import ChunkKV
from ragkv.errors import StoreError
from ragkv.model.fingerprint import Fingerprint
from ragkv.store.backends.backend import length_of
from ragkv.store.chunk_store import ChunkStore
from ragkv.store.entry.format import encode, open_entry
from ragkv.store.entry.header import Header, RefusedEntryError, canonical, read_header
from ragkv.store.entry.lazy import CorruptEntryError
from ragkv.store.names import digest_of_text, text_key, version_key, versions_of
from ragkv.store.version import Version

_log = logging.getLogger(__name__)
_WRONG = (KeyError, TypeError, ValueError, OverflowError, RecursionError, AttributeError, Warning)


class StoredVersions:
    """The versions of a store's chunks.

    A version is deleted with any of its chunks. A store in memory keeps none, since the engine has
    them, and a remote store none, since each prompt would wait for a list of them.
    """

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self._backend = store.backend
        self.keeps = not (store.backend.private or store.backend.remote)

    def put(self, version: Version, rows: ChunkKV) -> int:
        """Write a version's rows if all of its chunks are stored; return the bytes, or 0.

        Keys are rotated from position ``version.first`` on, as computed, unless the codec is lossy.

        Raises
        ------
        StoreFullError, StoreError
            As :meth:`ragkv.store.chunk_store.ChunkStore.put`.
        """
        if not self.keeps:
            return 0
        if self._store.read_only:
            raise StoreError("the store was opened read_only")
        parts = encode(rows, version.stored_as, to_field(version))
        key = _key_of(version)
        self._backend.check_room(key, length_of(parts))
        self._store.catalog.note_behind(version.prefix, key)
        self._backend.put(key, parts)
        texts = (version.text, *version.prefix)
        if any(self._backend.size(text_key(digest_of_text(text))) is None for text in texts):
            self._backend.delete(key)  # one was deleted meanwhile
            return 0
        return length_of(parts)

    def of(self, text: str, fingerprint: Fingerprint) -> list[Version]:
        """Return the versions of a chunk's entry; never raise."""
        found = list[Version]()
        if not self.keeps:
            return found
        try:
            keys = [key.name for key in self._backend.scan(versions_of(digest_of_text(text)))]
            for key, blob in zip(keys, self._backend.get_many(keys), strict=True):
                if blob is None:
                    continue
                try:
                    version = version_in(read_header(blob)[0])
                except RefusedEntryError as refused:
                    self._store.refuse(key, blob, refused)
                    continue
                own = (version.text, version.fingerprint, _key_of(version))
                if own == (text, fingerprint, key):
                    found.append(version)
        except (OSError, ValueError) as error:  # can be temporary
            _log.warning("cannot read the versions of a chunk: %s", error)
        return found

    def read(self, version: Version) -> ChunkKV | None:
        """Return a version's rows as put; None if absent or damaged; never raise."""
        key = _key_of(version)
        try:
            blob = self._backend.get(key) if self.keeps else None
            if blob is None:
                return None
            try:
                field = to_field(version)
                return open_entry(blob, version.text, version.stored_as, field, copy=True).whole()
            except RefusedEntryError as refused:
                self._store.refuse(key, blob, refused)
            except CorruptEntryError as corrupt:
                self._store.refuse(key, blob, RefusedEntryError(corrupt.reason, str(corrupt)))
        except (OSError, ValueError) as error:  # can be temporary
            _log.warning("cannot read the version %s: %s", key, error)
        return None

    def delete(self, version: Version) -> None:
        """Delete a version's rows; their notes stay until ``gc``; raises StoreError."""
        self._backend.delete(_key_of(version))


def _key_of(version: Version) -> str:
    return version_key(digest_of_text(version.text), version.stored_as.digest)


def to_field(version: Version) -> str:
    """Return the header's field ``versions``: a JSON list of one object."""
    about = {
        "sink": version.fingerprint.sink,
        "prefix": [_escaped(text) for text in version.prefix],
        "inter": version.inter.tolist(),
        "intra": version.intra,
        "impact": version.impact,
        "ranks": version.ranks.tolist(),
        "path": version.path,
        "first": version.first,
        "expires_at": version.expires_at,
    }
    return canonical([about])


def version_in(header: Header) -> Version:
    """Return the version of a header.

    Raises
    ------
    RefusedEntryError
        The field was not made by :func:`to_field`, or is of another fingerprint.
    """
    try:
        (about,) = json.loads(header.version)
        version = _version(header, about)
        ranks, behind = sorted(version.ranks.tolist()), len(version.prefix)
        whole = len(version.inter) == behind > 0 and ranks == list(range(header.tokens))
        whole = whole and 0 <= version.first < 1 << 31
    except _WRONG as error:
        raise RefusedEntryError("format", f"a version's fields: {error!r}") from error
    if not whole or to_field(version) != header.version or version.stored_as != header.fingerprint:
        raise RefusedEntryError("format", "a version's fields do not fit one another")
    return version


def _version(header: Header, about: dict[str, Any]) -> Version:
    return Version(
        header.text,
        replace(header.fingerprint, sink=about["sink"]),
        tuple(text.encode("ascii").decode("unicode_escape") for text in about["prefix"]),
        np.array(about["inter"], dtype=np.float64),
        float(about["intra"]),
        float(about["impact"]),
        np.array(about["ranks"], dtype=np.int64),
        str(about["path"]),
        int(about["first"]),
        about["expires_at"],
    )


def _escaped(text: str) -> str:
    """Return ASCII that preserves lone surrogates, even two in a row."""
    return text.encode("unicode_escape").decode("ascii")
