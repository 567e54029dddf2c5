"""Stats, verify, export and import, over the simplest backend."""

from __future__ import annotations

import io
import json
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from memory_backend import MemoryBackend, Place
from store_entries import FINGERPRINT, OTHER, make_entry, same, without_syncs  # noqa: F401

from ragkv.errors import StoreError
from ragkv.store.base import Terms
from ragkv.store.catalog.names import digest_of_fingerprint, digest_of_text, entry_key, text_key
from ragkv.store.chunk_store import ChunkStore
from ragkv.store.entry.header import canonical, checksum_of
from ragkv.store.operate.archive import export_store, import_store
from ragkv.store.operate.inspect import stats, verify

INT8 = replace(FINGERPRINT, codec="int8")


def key_of(text: str) -> str:
    return entry_key(digest_of_text(text), digest_of_fingerprint(FINGERPRINT))


@pytest.fixture
def store() -> Iterator[ChunkStore]:
    with closing(ChunkStore(MemoryBackend())) as opened:
        opened.put(make_entry("a"), FINGERPRINT, Terms("one"))
        opened.put(make_entry("a", tokens=8), INT8, Terms("two"))
        opened.put(make_entry("b"), FINGERPRINT, Terms(expires_at=time.time() + 1000))
        yield opened


def kinds_of(store: ChunkStore) -> list[tuple[str, str]]:
    return [(problem.key, problem.kind) for problem in verify(store).problems]


def test_stats_count(store: ChunkStore):
    found = stats(store)
    assert (found.texts, found.documents, found.entries, found.expired) == (2, 2, 3, 0)
    assert found.nbytes == sum(info.nbytes for info in store.entries())
    kinds = {kind.fingerprint: kind for kind in found.kinds}
    assert kinds[FINGERPRINT.digest][1:4] == ("float32", "raw", 2)
    assert kinds[INT8.digest][1:4] == ("float32", "int8", 1)
    store.put(make_entry("c"), FINGERPRINT, Terms(expires_at=time.time() - 1))
    assert stats(store).expired == 1


def test_a_whole_store_has_no_problems(store: ChunkStore):
    found = verify(store)
    assert found.sound
    assert not found.problems
    assert found.values == len(list(store.backend.scan("")))
    store.delete("a")
    assert not verify(store).problems


def flipped(store: ChunkStore) -> None:
    data = bytearray(store.backend.get(key_of("b")))
    data[-1] ^= 1
    store.backend.put(key_of("b"), [data])


def cut(store: ChunkStore) -> None:
    store.backend.put(key_of("b"), [store.backend.get(key_of("b"))[:-5]])


def moved(store: ChunkStore) -> None:
    store.backend.put(key_of("b"), [store.backend.get(key_of("a"))])


def no_row(store: ChunkStore) -> None:
    store.backend.put(text_key(digest_of_text("b")), [b"{}"])


def no_log(store: ChunkStore) -> None:
    for key in list(store.backend.scan("log/")):
        if store.backend.get(key.name) == b"+b":
            store.backend.put(key.name, [b"+x"])


@pytest.mark.parametrize(
    ("harm", "kind", "where"),
    [
        (flipped, "damaged", key_of("b")),
        (cut, "damaged", key_of("b")),
        (moved, "foreign", key_of("b")),
        (no_row, "damaged", text_key(digest_of_text("b"))),
        (no_log, "damaged", text_key(digest_of_text("b"))),
    ],
)
def test_damage_is_found_and_healed(
    store: ChunkStore, harm: Callable[[ChunkStore], None], kind: str, where: str
):
    harm(store)
    found = verify(store)
    assert not found.sound
    assert (where, kind) in [(problem.key, problem.kind) for problem in found.problems]
    healed = verify(store, heal=True)
    assert healed.sound
    assert healed.healed == 1
    assert verify(store).sound
    assert not store.contains("b", FINGERPRINT)
    store.put(make_entry("b"), FINGERPRINT)
    store.gc()
    assert not verify(store).problems
    assert same(store.get("b", FINGERPRINT).entry, make_entry("b"))
    assert same(store.get("a", FINGERPRINT).entry, make_entry("a"))
    assert set(store.changes(0)[1]) >= {"a", "b"}


def test_what_interrupted_writers_leave_is_orphaned(store: ChunkStore):
    backend = store.backend
    backend.delete(text_key(digest_of_text("b")))
    backend.delete(key_of("a"))
    backend.delete(entry_key(digest_of_text("a"), digest_of_fingerprint(INT8)))
    found = verify(store, heal=True)
    assert found.sound
    assert found.counts == {"orphaned": 2}
    assert found.healed == 0
    store.gc()
    assert not verify(store).problems


def test_what_is_deleted_while_it_is_verified_is_no_damage():
    place = Place()
    other = ChunkStore(MemoryBackend(place))
    other.put(make_entry("a"), FINGERPRINT)

    class Slow(MemoryBackend):
        asked = 0

        def get(self, key: str) -> bytes | None:
            self.asked += key.startswith("log/")
            if self.asked == 2:  # between the text's row and its change
                other.delete("a")
            return super().get(key)

    assert verify(ChunkStore(Slow(place))).sound
    assert not other.contains("a", FINGERPRINT)


def test_other_versions_are_left_alone(store: ChunkStore):
    names = [key_of("b").replace("-v2", "-v9"), "elsewhere/x", "log/x", "held/x"]
    for name in names:
        store.backend.put(name, [b"later"])
    found = verify(store, heal=True)
    assert found.sound
    assert sorted(p.key for p in found.problems if p.kind == "unknown") == sorted(names)
    assert store.backend.get(names[0]) == b"later"


def carried_texts(store: ChunkStore) -> dict[tuple[str, str], tuple[object, ...]]:
    return {
        (info.text, info.fingerprint): (info.nbytes, info.documents, info.expires_at)
        for info in store.entries()
    }


def test_export_and_import_carry_everything(store: ChunkStore, tmp_path: Path):
    first = export_store(store, tmp_path / "first.tar")
    assert (first.entries, first.damaged) == (3, 0)
    export_store(store, tmp_path / "second.tar")
    assert (tmp_path / "first.tar").read_bytes() == (tmp_path / "second.tar").read_bytes()
    assert (tmp_path / "first.tar").stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first.tar", "second.tar"]
    with closing(ChunkStore(MemoryBackend())) as other:
        done = import_store(other, tmp_path / "first.tar")
        assert (done.entries, done.existing, done.nbytes) == (3, 0, first.nbytes)
        assert carried_texts(other) == carried_texts(store)
        state = dict(other.backend.place.values)
        again = import_store(other, tmp_path / "first.tar")
        assert (again.entries, again.existing) == (0, 3)
        assert other.backend.place.values == state
        assert not verify(other).problems
        assert same(other.get("a", FINGERPRINT).entry, make_entry("a"))
        export_store(other, tmp_path / "third.tar")
    assert (tmp_path / "first.tar").read_bytes() == (tmp_path / "third.tar").read_bytes()


def test_damaged_entries_are_not_carried(store: ChunkStore, tmp_path: Path):
    flipped(store)
    assert (export_store(store, tmp_path / "a.tar").damaged) == 1
    with closing(ChunkStore(MemoryBackend())) as other:
        assert import_store(other, tmp_path / "a.tar").entries == 2
        data = bytearray((tmp_path / "a.tar").read_bytes())
        at = data.index(make_entry("a").keys[0].numpy().tobytes())
        data[at] ^= 1
        (tmp_path / "a.tar").write_bytes(data)
        for info in list(other.entries()):
            other.delete(info.text)
        assert import_store(other, tmp_path / "a.tar").damaged == 1
        assert verify(other).sound
        (tmp_path / "a.tar").write_bytes(data[: at - at % 512 - 1024])
        with pytest.raises(StoreError):
            import_store(other, tmp_path / "a.tar")


def test_a_file_that_ends_too_early_is_refused(store: ChunkStore, tmp_path: Path):
    export_store(store, tmp_path / "a.tar")
    with tarfile.open(tmp_path / "a.tar") as tar:
        members = [(m.name, tar.extractfile(m).read()) for m in tar]  # type: ignore[union-attr]
    with closing(ChunkStore(MemoryBackend())) as other:
        for without in (-1, -2):
            kept = [member for member in members if member is not members[without]]
            with pytest.raises(StoreError, match="cut short"):
                import_store(other, tar_of(tmp_path / "b.tar", *kept))
        tar_of(tmp_path / "b.tar", *members, members[-1])
        with pytest.raises(StoreError, match="does not belong"):
            import_store(other, tmp_path / "b.tar")


def tar_of(path: Path, *members: tuple[tarfile.TarInfo | str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name) if isinstance(name, str) else name
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


FIRST = ("ragkv-store.json", json.dumps({"format": 1}).encode())
LINK = tarfile.TarInfo(f"kv/{'0' * 64}/row.json")
LINK.type, LINK.linkname = tarfile.SYMTYPE, "anything"
ROW = b'{"checksum":"","documents":[],"expires_at":null}'


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ([], "cut short"),
        ([("a.txt", b"")], "does not belong"),
        ([("ragkv-store.json", b'{"format": 2}')], "format"),
        ([("ragkv-store.json", b"[]")], "format"),
        ([FIRST, FIRST], "does not belong"),
        ([FIRST, ("../kv/x", b"")], "does not belong"),
        ([FIRST, ("/etc/passwd", b"")], "does not belong"),
        ([FIRST, (LINK, b"")], "does not belong"),
        ([FIRST, (f"kv/{'0' * 64}/row.json", b"{}")], "does not belong"),
        ([FIRST, (f"kv/{'0' * 64}/row.json", ROW)], "checksum"),
        ([FIRST, (f"kv/{'0' * 64}/{'0' * 32}-v2.safetensors", b"")], "does not belong"),
    ],
)
def test_foreign_files_are_refused(tmp_path: Path, members: list[tuple[str, bytes]], said: str):
    path = tar_of(tmp_path / "a.tar", *members)
    with closing(ChunkStore(MemoryBackend())) as store:
        with pytest.raises(StoreError, match=said):
            import_store(store, path)
        assert not list(store.entries())


@pytest.mark.parametrize(
    "wrong",
    [
        {"documents": [1]},
        {"documents": "ab"},
        {"expires_at": "soon"},
        {"expires_at": True},
        {"expires_at": 10**400},
        {"expires_at": float("nan")},
        {"expires_at": -float("inf")},
    ],
)
def test_rows_that_make_no_sense_are_refused(tmp_path: Path, wrong: dict[str, object]):
    row = {"documents": [], "expires_at": None, **wrong}
    checksum = checksum_of(f"{'0' * 64} {canonical(row)}".encode())
    member = f"kv/{'0' * 64}/row.json", canonical({**row, "checksum": checksum}).encode()
    path = tar_of(tmp_path / "a.tar", FIRST, member)
    with (
        closing(ChunkStore(MemoryBackend())) as store,
        pytest.raises(StoreError, match=r"row.json' does not belong"),
    ):
        import_store(store, path)


def test_files_that_are_no_tar(tmp_path: Path, store: ChunkStore):
    (tmp_path / "a.tar").write_bytes(b"no tar at all" * 100)
    export_store(store, tmp_path / "b.tar")
    data = (tmp_path / "b.tar").read_bytes()
    (tmp_path / "b.tar").write_bytes(data[:4000])
    for name in ("a.tar", "b.tar", "none.tar"):
        with pytest.raises(StoreError, match=name):
            import_store(store, tmp_path / name)
    with pytest.raises(StoreError):
        export_store(store, tmp_path / "no folder" / "c.tar")
