"""A store in one tar file: to carry it elsewhere, whatever the backend.

First comes ``ragkv-store.json``, then, sorted, for each text ``kv/<text>/row.json`` (expiry,
documents) and its entries, ``kv/<text>/<fingerprint>-v2.safetensors``, and last ``end.json``.
Entries prove their own bytes, a row has its checksum beside it, and the end says how many
entries there are. The same entries give the same file, byte by byte.
"""

from __future__ import annotations

import io
import json
import os
import re
import secrets
import tarfile
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import IO, NamedTuple

from ragkv.errors import MissingDependencyError, StoreError
from ragkv.store.backends.base import Blob
from ragkv.store.backends.files import store_errors
from ragkv.store.base import EntryInfo, Terms, has_expired
from ragkv.store.catalog import names
from ragkv.store.chunk_store import ChunkStore
from ragkv.store.entry.format import decode
from ragkv.store.entry.header import Header, RefusedEntryError, canonical, checksum_of, read_header

ARCHIVE_FORMAT = 1
_FIRST, _END = "ragkv-store.json", "end.json"
_ROW = re.compile(r"kv/([0-9a-f]{64})/row\.json")
_ENTRY = re.compile(r"(kv/[0-9a-f]{64}/[0-9a-f]{32}-v[0-9]+)\.safetensors")
_LONGEST_ROW = 1 << 26
"""A row has the names of all documents that hold its text."""


@dataclass(slots=True)
class Carried:
    """What was carried: entries, those left out as damaged, expired or there already, and bytes."""

    entries: int = 0
    damaged: int = 0
    expired: int = 0
    existing: int = 0
    nbytes: int = 0


class _ArchiveRow(NamedTuple):
    expires_at: float | None = None
    documents: tuple[str, ...] = ()


def export_store(store: ChunkStore, path: Path) -> Carried:
    """Write all entries that are whole into a new tar file, readable by its owner alone.

    Those whose time is over are left out, and the turns of chats.

    Raises
    ------
    StoreError
        The store cannot be read or the file not written; nothing of it is left.
    MissingDependencyError
        Entries are in a codec whose package is not installed.
    """
    if path.exists() and not path.is_file():
        raise StoreError(f"{path} is there, and no file: name one that may be written")
    carried = Carried()
    infos = sorted(store.entries(), key=lambda info: (_digest(info), info.fingerprint))
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with store_errors(path):
            file = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            with os.fdopen(file, "wb") as raw:
                with tarfile.open(fileobj=raw, mode="w") as tar:
                    _add(tar, _FIRST, canonical({"format": ARCHIVE_FORMAT}).encode())
                    for digest, found in groupby(infos, _digest):
                        _export_text(store, tar, digest, list(found), carried)
                    _add(tar, _END, _end(carried.entries))
                raw.flush()
                os.fsync(raw.fileno())
            temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink()
    return carried


def import_store(store: ChunkStore, path: Path) -> Carried:
    """Put the entries of a tar file into a store; those that are there already stay.

    Every entry is verified before it is written. A damaged one is left out and counted.

    Raises
    ------
    StoreError
        The file cannot be read, holds anything but what ``export_store`` writes, or the store
        cannot be written. What was imported before stays; importing again goes on.
    """
    carried = Carried()
    try:
        with tarfile.open(path, mode="r|") as tar:
            ended = _import(store, tar, carried)
    except (tarfile.TarError, EOFError) as error:
        raise StoreError(f"{path} is no whole tar file: {error}") from error
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
    if not ended:
        raise StoreError(f"{path} is cut short or damaged: what came before was imported")
    return carried


def _export_text(
    store: ChunkStore, tar: tarfile.TarFile, digest: str, infos: list[EntryInfo], carried: Carried
) -> None:
    if has_expired(infos[0].expires_at, time.time()):
        return
    row = {"documents": infos[0].documents, "expires_at": infos[0].expires_at}
    checksum = checksum_of(f"{digest} {canonical(row)}".encode())
    _add(tar, f"kv/{digest}/row.json", canonical({**row, "checksum": checksum}).encode())
    for info in infos:
        key = names.entry_key(digest, info.fingerprint)
        blob = store.backend.get(key)
        if blob is None or _whole(blob, key) is None:
            carried.damaged += 1
            continue
        _add(tar, f"{key}.safetensors", blob)
        carried.entries += 1
        carried.nbytes += len(blob)


def _import(store: ChunkStore, tar: tarfile.TarFile, carried: Carried) -> bool:
    """Import member by member; return whether the file was whole."""
    row, text, ended = _ArchiveRow(), "", False
    for number, member in enumerate(tar):
        content = tar.extractfile(member) if member.isreg() else None
        found = _ROW.fullmatch(member.name), _ENTRY.fullmatch(member.name)
        if content is None or ended or (number == 0) != (member.name == _FIRST):
            raise _refused(member)
        if number == 0:
            _check_first(content)
        elif found[0]:
            text, row = found[0][1], _read_row(content, found[0][1], member)
        elif found[1] and text and member.name.startswith(f"kv/{text}/"):
            _import_entry(store, found[1][1], content.read(), row, carried)
        elif member.name == _END:
            ended = content.read(_LONGEST_ROW) == _end(
                carried.entries + carried.existing + carried.damaged + carried.expired
            )
        else:
            raise _refused(member)
    return ended


def _import_entry(
    store: ChunkStore, key: str, data: bytes, row: _ArchiveRow, carried: Carried
) -> None:
    header = _whole(data, key)
    if header is None:
        carried.damaged += 1
        return
    if has_expired(row.expires_at, time.time()):
        carried.expired += 1
        return
    text, fingerprint = header.text, header.fingerprint
    if store.contains(text, fingerprint):
        carried.existing += 1
    else:
        store.put_encoded(text, fingerprint, [data], Terms(expires_at=row.expires_at))
        carried.entries += 1
        carried.nbytes += len(data)
    for document in row.documents or (None,):
        store.retain(text, fingerprint, Terms(document, row.expires_at))


def _whole(blob: Blob, key: str) -> Header | None:
    """Return the entry's header if it is this key's entry and every byte of it holds."""
    try:
        header, _ = read_header(memoryview(blob))
    except RefusedEntryError as refused:
        if refused.reason == "codec":
            raise MissingDependencyError(f"{key} cannot be checked: {refused}") from refused
        return None
    digests = names.digest_of_text(header.text), names.digest_of_fingerprint(header.fingerprint)
    if names.entry_key(*digests) != key:
        return None
    lookup = decode(blob, header.text, header.fingerprint, copy=True, place=key)
    return None if lookup.reason else header


def _add(tar: tarfile.TarFile, name: str, content: Blob) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), 0o600
    tar.addfile(member, io.BytesIO(content))


def _end(entries: int) -> bytes:
    return canonical({"entries": entries}).encode()


def _check_first(content: IO[bytes]) -> None:
    try:
        found = json.loads(content.read(_LONGEST_ROW))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or found.get("format") != ARCHIVE_FORMAT:
        raise StoreError(
            f"an export of format {found!r}, and this ragkv reads {ARCHIVE_FORMAT}: use the ragkv "
            "that wrote it"
        )


def _read_row(content: IO[bytes], digest: str, member: tarfile.TarInfo) -> _ArchiveRow:
    try:
        row = json.loads(content.read(_LONGEST_ROW))
        checksum = row.pop("checksum")
        read = _ArchiveRow(_time(row["expires_at"]), _names(row["documents"]))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise _refused(member) from None
    if checksum != checksum_of(f"{digest} {canonical(row)}".encode()):
        raise StoreError(f"{member.name} was damaged: its checksum does not hold")
    return read


def _time(value: object) -> float | None:
    if value is None:
        return None
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not float(value) > Terms.KEEP
    ):
        raise ValueError("no time")
    return value


def _names(values: object) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError("no documents")
    return tuple(values)


def _refused(member: tarfile.TarInfo) -> StoreError:
    return StoreError(
        f"{member.name!r} does not belong into an export of ragkv's: nothing more is read"
    )


def _digest(info: EntryInfo) -> str:
    return names.digest_of_text(info.text)
