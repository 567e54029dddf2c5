"""What an operator asks of a store: what is in it, and whether all of it is whole."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from blake3 import blake3

from ragkv.errors import StoreError
from ragkv.store import names
from ragkv.store.backends.base import Backend, Blob
from ragkv.store.base import has_expired
from ragkv.store.chunk_store import ChunkStore
from ragkv.store.entry.format import decode
from ragkv.store.entry.header import NO_VERSION, RefusedEntryError, read_header
from ragkv.store.names import TextRow, digest_of_fingerprint, digest_of_text, parse_entry_key
from ragkv.store.versions.stored import to_field, version_in

_WAITS_S = (0.01, 0.05)
"""A value that another process removes loses its file before its row."""


class Kind(NamedTuple):
    """The entries of one model, sink and codec; ``dtype`` and ``codec`` are of one of them.

    They are empty where its header cannot be read.
    """

    fingerprint: str
    dtype: str
    codec: str
    entries: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Stats:
    """What a namespace holds. Sizes are in bytes; expired entries are among the entries."""

    texts: int
    documents: int
    entries: int
    nbytes: int
    expired: int
    kinds: tuple[Kind, ...]


Damage = Literal["damaged", "foreign", "orphaned", "unknown"]
_HARMFUL = ("damaged", "foreign")


class Problem(NamedTuple):
    """A value that is not what its key says.

    ``damaged``
        Its bytes are not those that were written, or not all of them; or its key's.
    ``foreign``
        It is whole, but of another text or model: somebody moved it.
    ``orphaned``
        An interrupted writer left it: an entry or a note without its text's row, a row
        without entries. It does no harm, and ``gc`` removes it.
    ``unknown``
        Its key belongs to a different version. It is never touched.
    """

    key: str
    kind: Damage
    detail: str


@dataclass(slots=True)
class Findings:
    """What :func:`verify` found.

    ``values`` and ``nbytes`` were read, ``healed`` removed; the next precompute puts those
    chunks back.
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
    """Count what a store holds; of the entries, one header a kind is read.

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

    Other processes may use the store meanwhile; what they are just writing may be
    counted as orphaned.

    Parameters
    ----------
    heal
        Remove what is damaged or foreign.

    Raises
    ------
    StoreError
        The place cannot be read, or not written where ``heal`` has to.
    """
    findings = Findings()
    backend = store.backend
    for key, nbytes in list(backend.damaged_keys()):
        findings.values += 1
        findings.nbytes += nbytes
        findings.problems.append(Problem(ascii(key), "damaged", "no key, any more"))
        if heal:
            backend.delete(key)
    if heal and findings.problems:
        findings.healed = len(findings.problems) - len(list(backend.damaged_keys()))
    for key, nbytes in backend.scan(""):
        blob, problem = _looked_at(backend, key)
        if blob is None and problem is None:  # it went meanwhile
            continue
        findings.values += 1
        findings.nbytes += nbytes
        if problem is None:
            continue
        findings.problems.append(problem)
        if heal and problem.kind in _HARMFUL and blob is not None:
            findings.healed += _remove(backend, key, blob)
    return findings


def _looked_at(backend: Backend, key: str) -> tuple[Blob | None, Problem | None]:
    """Read a value and say what is wrong with it; what is just going is looked at again."""
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
    if key in {names.OWNER, names.CLEARED} or names.change_of(key):
        return None  # opening checks the first; texts' rows are compared with the others
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
    found = names.parse_behind_key(key)
    if found is None or parse_entry_key(found[1]) is None:
        return "unknown", "no key of this version"
    if backend.size(found[1]) is None or _row(backend, found[0]) is None:
        return "orphaned", "a note of a version or text that is gone"
    return None


def _problem_of_text(backend: Backend, blob: Blob, digest: str) -> _Wrong:
    row = TextRow.parse(blob, digest)
    if row is None:
        return "damaged", "no row of this text"
    if names.Change.parse(backend.get(names.log_key(row.change))).text != row.text:
        if _row(backend, digest) != row:  # it went, or came again, meanwhile
            return None
        return "damaged", f"change {row.change} is of another text: none finds this one"
    if not any(backend.scan(names.entries_of(digest))):
        return "orphaned", "a text without entries"
    return None


def _problem_of_holder(backend: Backend, key: str, blob: Blob) -> _Wrong:
    room, first, *rest = key.split("/")
    if len(rest) != 1:
        return "unknown", "no key of this version"
    text, document = (first, rest[0]) if room == "held" else (rest[0], first)
    if room == "held" and blake3(blob).hexdigest() != document:
        return "damaged", "not the document's name"
    if _row(backend, text) is None:
        return "orphaned", "a document's note of a text that is not registered"
    return None


def _row(backend: Backend, digest: str) -> TextRow | None:
    return TextRow.parse(backend.get(names.text_key(digest)), digest)


def _remove(backend: Backend, key: str, seen: Blob) -> bool:
    """Remove a value, unless it was written again since it was read."""
    now = backend.get(key)
    return now is None or (memoryview(now) == memoryview(seen) and backend.delete(key))
