"""Copy a store from one place to another, whatever the two backends."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ragkv.model.fingerprint import Fingerprint
from ragkv.store import names
from ragkv.store.backends.base import Blob
from ragkv.store.base import EntryInfo, Terms, has_expired
from ragkv.store.chunk_store import ChunkStore
from ragkv.store.entry.format import decode
from ragkv.store.entry.header import RefusedEntryError, read_header


@dataclass(slots=True)
class Copied:
    """Entries that were written, those left out and why, and the bytes written."""

    entries: int = 0
    existing: int = 0
    damaged: int = 0
    expired: int = 0
    nbytes: int = 0


def copy_store(source: ChunkStore, target: ChunkStore) -> Copied:
    """Put a store's entries into another one; those that are there already stay.

    Documents and expiry are copied with them, contextual versions are not. Every entry is verified
    before it is written. After an interruption copying again goes on.

    Raises
    ------
    StoreError
        One of the stores cannot be read or written.
    """
    done = Copied()
    for info in source.entries():
        if has_expired(info.expires_at, time.time()):
            done.expired += 1
            continue
        key = names.entry_key(names.digest_of_text(info.text), info.fingerprint)
        blob = source.backend.get(key)
        if blob is None:  # deleted meanwhile
            continue
        fingerprint = _verified(blob, info, key)
        if fingerprint is None:
            done.damaged += 1
            continue
        if target.contains(info.text, fingerprint):
            done.existing += 1
        else:
            terms = Terms(expires_at=info.expires_at)
            done.nbytes += target.put_encoded(info.text, fingerprint, [memoryview(blob)], terms)
            done.entries += 1
        for document in info.documents or (None,):
            target.retain(info.text, fingerprint, Terms(document, info.expires_at))
    return done


def _verified(blob: Blob, info: EntryInfo, key: str) -> Fingerprint | None:
    """Return the entry's fingerprint if it is this key's entry and every byte of it holds."""
    try:
        fingerprint = read_header(blob)[0].fingerprint
    except RefusedEntryError:
        return None
    if names.digest_of_fingerprint(fingerprint) != info.fingerprint:
        return None
    found = decode(blob, info.text, fingerprint, copy=True, place=key)
    return None if found.reason else fingerprint
