"""An operator's tools: count, verify and copy a store's contents."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from blake3 import blake3

from ragkv.errors import StoreError
from ragkv.model.fingerprint import Fingerprint
from ragkv.store.backends.backend import Backend, Blob
from ragkv.store.chunk_store import ChunkStore
from ragkv.store.entry.format import decode
from ragkv.store.entry.header import NO_VERSION, RefusedEntryError, read_header
from ragkv.store.names import (
    CLEARED,
    OWNER,
    Change,
    TextRow,
    change_of,
    digest_of_fingerprint,
    digest_of_text,
    entries_of,
    entry_key,
    log_key,
    parse_behind_key,
    parse_entry_key,
    text_key,
)
from ragkv.store.stored_versions import to_field, version_in
from ragkv.store.types import EntryInfo, Terms, has_expired

_WAITS_S = (0.01, 0.05)
"""Waits before another look: a deletion removes a value's file before its row."""


class Kind(NamedTuple):
    """The entries of one model, sink and codec.

    ``dtype`` and ``codec`` are read from one header; they are empty where it cannot be read.
    """

    fingerprint: str
    dtype: str
    codec: str
    entries: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Stats:
    """Contents of a namespace. Sizes are in bytes; ``entries`` includes expired ones."""

    texts: int
    documents: int
    entries: int
    nbytes: int
    expired: int
    kinds: tuple[Kind, ...]


Damage = Literal["damaged", "foreign", "orphaned", "unknown"]
_HARMFUL = ("damaged", "foreign")


class Problem(NamedTuple):
    """A value that disagrees with its key.

    ``damaged``
        The bytes of the value or of its key differ from those written.
    ``foreign``
        It is whole, but was written for another text or model: it was moved.
    ``orphaned``
        An interrupted write left it: an entry or a note without its text's row, or a row
        without entries. It is harmless, and ``gc`` removes it.
    ``unknown``
        Its key belongs to a different version. It is never touched.
    """

    key: str
    kind: Damage
    detail: str


@dataclass(slots=True)
class Findings:
    """Result of :func:`verify`: values and bytes read, values removed, and problems.

    The next precompute stores the removed chunks again.
    """

    values: int = 0
    nbytes: int = 0
    healed: int = 0
    problems: list[Problem] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        """Problems by kind."""
        return dict(Counter(problem.kind for problem in self.problems))

    @property
    def sound(self) -> bool:
        """Whether nothing damaged or foreign is left."""
        return sum(problem.kind in _HARMFUL for problem in self.problems) == self.healed


def stats(store: ChunkStore) -> Stats:
    """Count a store's contents. One header is read for each kind of entry.

    Raises
    ------
    StoreError
        The place cannot be read.
    """
    now = time.time()
    infos = list(store.entries())
    kinds = []
    for fingerprint in sorted({info.fingerprint for info in infos}):
        same = [info for info in infos if info.fingerprint == fingerprint]
        all_of_text = store.fingerprints(same[0].text)
        made = next(((f.dtype, f.codec) for f in all_of_text if f.digest == fingerprint), ("", ""))
        nbytes = sum(info.nbytes for info in same)
        kinds.append(Kind(fingerprint, *made, len(same), nbytes))
    return Stats(
        texts=len({info.text for info in infos}),
        documents=len({document for info in infos for document in info.documents}),
        entries=len(infos),
        nbytes=sum(info.nbytes for info in infos),
        expired=sum(has_expired(info.expires_at, now) for info in infos),
        kinds=tuple(kinds),
    )


def verify(store: ChunkStore, *, heal: bool = False) -> Findings:
    """Read every value and its checksums.

    Other processes can use the store meanwhile; a value that they are writing can be counted as
    orphaned.

    Parameters
    ----------
    heal
        Remove damaged and foreign values.

    Raises
    ------
    StoreError
        The place cannot be read, or ``heal`` cannot write to it.
    """
    findings = Findings()
    backend = store.backend
    for key, nbytes in list(backend.damaged_keys()):
        findings.values += 1
        findings.nbytes += nbytes
        findings.problems.append(Problem(ascii(key), "damaged", "not a key"))
        if heal:
            backend.delete(key)
    if heal and findings.problems:
        findings.healed = len(findings.problems) - len(list(backend.damaged_keys()))
    for key, nbytes in backend.scan(""):
        blob, problem = _looked_at(backend, key)
        if blob is None and problem is None:  # deleted meanwhile
            continue
        findings.values += 1
        findings.nbytes += nbytes
        if problem is None:
            continue
        findings.problems.append(problem)
        if heal and problem.kind in _HARMFUL and blob is not None:
            findings.healed += int(backend.delete_unchanged(key, blob))
    return findings


@dataclass(slots=True)
class Copied:
    """Counts of written, existing, damaged and expired entries, and the bytes written."""

    entries: int = 0
    existing: int = 0
    damaged: int = 0
    expired: int = 0
    nbytes: int = 0


def copy_store(source: ChunkStore, target: ChunkStore) -> Copied:
    """Copy a store's entries to another store; existing entries stay.

    Documents, revisions and expiry are copied too, contextual versions are not. Every entry is
    verified before it is written. Copying again continues after an interruption.

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
        digest = digest_of_text(info.text)
        key = entry_key(digest, info.fingerprint)
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
        held = source.catalog.held_by(digest)
        for document in info.documents or (None,):
            terms = Terms(document, info.expires_at, held.get(document or "", ""))
            target.retain(info.text, fingerprint, terms)
    return done


def _looked_at(backend: Backend, key: str) -> tuple[Blob | None, Problem | None]:
    """Read a value and its problem, if any; try again in case it is just being deleted."""
    for wait in (*_WAITS_S, None):
        try:
            blob = backend.get(key)
            wrong = None if blob is None else _problem(backend, key, blob)
        except StoreError as error:
            blob, wrong = None, ("damaged", f"cannot be read: {error}")
        if wrong is None or wrong[0] != "damaged" or wait is None:
            break
        time.sleep(wait)
    return blob, wrong and Problem(key, *wrong)


_Wrong = tuple[Damage, str] | None


def _problem(backend: Backend, key: str, blob: Blob) -> _Wrong:
    room, _, rest = key.partition("/")
    if room in {"kv", "version"}:
        return _problem_of_entry(backend, key, blob)
    if room == "text":
        return _problem_of_text(backend, blob, rest)
    if room == "behind":
        return _problem_of_note(backend, key)
    if room in {"held", "document"}:
        return _problem_of_holder(backend, key, blob)
    if key in {OWNER, CLEARED} or change_of(key):
        return None  # opening checks the owner; the log is compared with texts' rows
    return "unknown", "no key of this version"


def _problem_of_entry(backend: Backend, key: str, blob: Blob) -> _Wrong:
    digests = parse_entry_key(key)
    if digests is None:
        return "unknown", "an entry of another version"
    try:
        header, _ = read_header(blob)
        version = to_field(version_in(header)) if key.startswith("version/") else NO_VERSION
    except RefusedEntryError as refused:
        return "damaged", f"{refused} ({refused.reason})"
    text, fingerprint = header.text, header.fingerprint
    if (digest_of_text(text), digest_of_fingerprint(fingerprint)) != digests:
        return "foreign", "an entry of another text or model"
    reason = decode(blob, text, fingerprint, version, copy=True, place=key).reason
    if reason:
        return "damaged", reason
    if _row(backend, digests[0]) is None:
        return "orphaned", "an entry whose text is not registered"
    return None


def _problem_of_note(backend: Backend, key: str) -> _Wrong:
    found = parse_behind_key(key)
    if found is None or parse_entry_key(found[1]) is None:
        return "unknown", "no key of this version"
    if backend.size(found[1]) is None or _row(backend, found[0]) is None:
        return "orphaned", "a note of a deleted version or text"
    return None


def _problem_of_text(backend: Backend, blob: Blob, digest: str) -> _Wrong:
    row = TextRow.parse(blob, digest)
    if row is None:
        return "damaged", "no row of this text"
    if Change.parse(backend.get(log_key(row.change))).text != row.text:
        if _row(backend, digest) != row:  # deleted or added again meanwhile
            return None
        return "damaged", f"change {row.change} is of another text: no finder sees this one"
    if not any(backend.scan(entries_of(digest))):
        return "orphaned", "a text without entries"
    return None


def _problem_of_holder(backend: Backend, key: str, blob: Blob) -> _Wrong:
    room, first, *rest = key.split("/")
    if len(rest) != 1:
        return "unknown", "no key of this version"
    text, document = (first, rest[0]) if room == "held" else (rest[0], first)
    if room == "held" and blake3(blob).hexdigest() != document:
        return "damaged", "the name of another document"
    if _row(backend, text) is None:
        return "orphaned", "a document's note of a text that is not registered"
    return None


def _row(backend: Backend, digest: str) -> TextRow | None:
    return TextRow.parse(backend.get(text_key(digest)), digest)


def _verified(blob: Blob, info: EntryInfo, key: str) -> Fingerprint | None:
    """Return the entry's fingerprint; None if it is damaged or of another key."""
    try:
        fingerprint = read_header(blob)[0].fingerprint
    except RefusedEntryError:
        return None
    if digest_of_fingerprint(fingerprint) != info.fingerprint:
        return None
    found = decode(blob, info.text, fingerprint, copy=True, place=key)
    return None if found.reason else fingerprint
