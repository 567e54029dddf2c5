"""The log of changes, and deletions."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NoReturn

import pytest
from disk_store import DiskStore, tiered
from store_entries import FINGERPRINT, make_entry, put_texts
from tiny import some_chunks, tiny_model, tiny_tokenizer

from ragkv import RagKV, StoreConfig
from ragkv.errors import StoreFullError
from ragkv.store import open_store
from ragkv.store.backends.index import Index
from ragkv.store.tiers.tier import size_of


class Unread(dict[str, str]):
    """Texts that may be looked up, but not gone through."""

    def _refuse(self, *_: object) -> NoReturn:
        raise AssertionError("all texts are read")

    __iter__ = __or__ = __ror__ = keys = items = values = _refuse


def test_a_poll_reads_none_of_the_texts_that_are_known(store):
    put_texts(store, "abc")
    newest, added, _ = store.changes(0)
    assert added == ["a", "b", "c"]
    store._seen = Unread(store._seen)
    assert store.changes(newest) == (newest, [], [])
    store.put(make_entry("d"), FINGERPRINT)
    store.delete("a")
    assert store.changes(newest)[1:] == (["d"], ["a"])


def test_many_changes_are_read_in_few_queries(tmp_path, monkeypatch):
    with closing(DiskStore(tmp_path)) as store:
        for number in range(60):
            store.catalog.add(f"text {number}" + "long " * 2000 * (number % 2))
        queries = []
        query = Index._query
        monkeypatch.setattr(
            Index, "_query", lambda self, *given: queries.append(given) or query(self, *given)
        )
        added = store.changes(0).added
    assert [len(text) > 4096 for text in added] == [False, True] * 30
    assert len(queries) < 40  # those in files take one each


def test_a_long_text_is_one_change(store):
    store.put(make_entry("long " * 2000), FINGERPRINT)
    store.put(make_entry("long " * 2000), FINGERPRINT)
    assert store.changes(0).newest == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of three megabytes; the test is skipped where none can be mounted."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(tmp_path)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:  # noqa: PLW1510
        pytest.skip("no file system can be mounted here")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def fill(place: Path) -> None:
    """Leave not a byte."""
    for size in (1 << 16, 1 << 12, 1):
        with (place / f"filler-{size}").open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                pass


def test_chunks_are_forgotten_without_a_byte_left(small_disk):
    chunks = some_chunks(8)
    store = StoreConfig(path=small_disk / "store", memory_bytes=0)
    for _ in range(2):  # what keeps room for that is there again afterwards
        with RagKV(tiny_model(), tiny_tokenizer(), store=store) as engine:
            engine.precompute(chunks, document="d")
            fill(small_disk)
            with pytest.raises(StoreFullError):
                engine.precompute([" ".join(chunks)])
            assert engine.forget(chunks[0])
            assert engine.contains(chunks[1])
            assert engine.forget(document="d") == 7
            assert not any(engine.contains(chunk) for chunk in chunks)
        for file in small_disk.glob("filler-*"):
            file.unlink()


def test_a_place_that_was_filled_again_further_than_before(tmp_path):
    with closing(tiered(tmp_path)) as ours:
        ours.put(make_entry("a"), FINGERPRINT)
        seen, _, _ = ours.changes(0)
        shutil.rmtree(next(tmp_path.iterdir()))
        with closing(DiskStore(tmp_path)) as theirs:
            put_texts(theirs, "bcd")
        newest, texts, _ = ours.changes(seen)
        assert texts == ["b", "c", "d"]
        assert newest > seen
        assert "a" in ours.changes(seen).removed
        assert ours.get("a", FINGERPRINT).reason == "absent"
        assert ours.get("b", FINGERPRINT).entry is not None
        assert ours.changes(newest)[:2] == (newest, [])


def test_a_full_store_writes_no_more_rows_than_it_takes_and_forgets(tmp_path):
    """Each try that was refused used to leave two rows in the log."""
    size = size_of(make_entry("a", tokens=60))
    config = StoreConfig(tmp_path, memory_bytes=0, disk_bytes=4 * size)
    with closing(open_store(config)) as store:
        for number in range(60):
            store.put(make_entry(f"{number}", tokens=60), FINGERPRINT)
        newest, _, _ = store.changes(0)
        assert 1 <= len(list(store.texts())) <= 4
        assert newest <= 2 * 60
    with closing(open_store(StoreConfig(tmp_path, disk_bytes=1))) as store:
        before, _, _ = store.changes(0)
        with pytest.raises(StoreFullError):
            store.put(make_entry("another", tokens=60), FINGERPRINT)
        assert store.changes(0)[0] == before
