"""Nothing is lost where a store fails for a moment, or others work at the same time."""

import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from disk_store import DiskStore, tiered
from store_entries import FINGERPRINT, make_entry
from tiny import some_chunks, tiny_model, tiny_tokenizer

from ragkv import RagKV
from ragkv.errors import StoreError
from ragkv.store.backends.backend import Bytes
from ragkv.store.backends.disk import _SUFFIX
from ragkv.store.backends.memory import MemoryBackend, Place
from ragkv.store.backends.redis import _without_password
from ragkv.store.chunk_store import ChunkStore
from ragkv.store.entry.format import encode
from ragkv.store.entry.header import sealed, unsealed
from ragkv.store.names import digest_of_text, entry_key
from ragkv.store.operate import copy_store
from ragkv.store.tiered import TieredStore
from ragkv.store.tiers.eviction import Eviction
from ragkv.store.tiers.tier import MemoryTier
from ragkv.store.types import Terms

SUPPORT = Path(__file__).parents[1] / "support"


class Flaky(MemoryBackend):
    """Fails at the last of so many scans; all are right again afterwards."""

    fails_in = 0

    def scan(self, prefix: str, after: str = "") -> object:
        if self.fails_in:
            self.fails_in -= 1
            if not self.fails_in:
                raise StoreError("timeout")
        return super().scan(prefix, after)


def test_a_deletion_is_learnt_of_after_a_fault():
    place = Place()
    backend = Flaky(place)
    store = tiered(backend)
    store.put(make_entry("secret"), FINGERPRINT)
    seen, _, _ = store.changes(0)
    ChunkStore(MemoryBackend(place)).delete("secret")
    backend.fails_in = 1
    with pytest.raises(StoreError, match="timeout"):
        store.changes(seen)
    store.changes(seen)
    assert store.get("secret", FINGERPRINT).reason == "absent"


def test_a_finder_learns_of_a_deletion_after_a_fault(make_engine, monkeypatch, caplog):
    engine, chunks = make_engine(), some_chunks(3)
    engine.precompute(chunks)
    prompt = "\n\n".join([*chunks, "What?"])
    engine.prefill(prompt)
    engine.forget(chunks[0])

    def away(_):
        raise StoreError("timeout")

    with monkeypatch.context() as patch:
        patch.setattr(engine._store, "changes", away)
        assert engine.prefill(prompt, on_miss="skip").report.tokens.reused
    assert "cannot read the store's changes: timeout" in caplog.text
    assert engine.prefill(prompt, on_miss="skip").report.misses == ()
    assert [span.text for span in engine._reuse.corpus.find(prompt)] == chunks[1:]


def test_a_server_that_is_away_leaves_the_tiers_as_they_are():
    backend = Flaky(Place())
    store = tiered(backend)
    store.put(make_entry("a"), FINGERPRINT)
    seen, _, _ = store.changes(0)
    store.put(make_entry("b"), FINGERPRINT, Terms("d"))
    store.keep_only("d", ["b"])  # the tiers have looked, and a finder has not
    backend.fails_in = 1
    with pytest.raises(StoreError):
        store.changes(seen)
    assert set(store.tiers[0].texts()) == {"a", "b"}


def test_what_is_put_beside_a_collection_stays():
    place = Place()
    writer = ChunkStore(MemoryBackend(place))

    class Slow(MemoryBackend):
        writes = True

        def delete(self, key):
            if self.writes and key.startswith("text/"):
                self.writes = False  # between what is looked for and what is removed
                writer.put(make_entry("a"), FINGERPRINT, Terms("d"))
            return super().delete(key)

    store = ChunkStore(Slow(place))
    store.catalog.add("a", Terms("d"))  # a writer was interrupted here once
    store.gc()
    assert writer.contains("a", FINGERPRINT)
    assert [info.documents for info in writer.entries()] == [("d",)]
    seen, texts, _ = ChunkStore(MemoryBackend(place)).changes(0)
    assert texts == ["a"]
    assert seen


def test_a_victim_that_another_thread_forgets_is_no_error():
    size = len(encode(make_entry("a", tokens=40), FINGERPRINT)[0]) + 6000
    store = ChunkStore(MemoryBackend(budget=2 * size + 4000), eviction=Eviction(1 << 20))

    class Lock:
        def __init__(self):
            self.lock = threading.Lock()
            self.left = 0

        def __enter__(self):
            self.lock.acquire()

        def __exit__(self, *_):
            self.lock.release()
            if self.left:
                self.left -= 1
                store._eviction._policy.remove("a")

    for text in "ab":
        store.put(make_entry(text, tokens=40), FINGERPRINT)
    assert store._eviction is not None
    store._eviction._lock = lock = Lock()
    lock.left = 10
    assert store.put(make_entry("c", tokens=40), FINGERPRINT)
    assert len(list(store.texts())) == 2


def test_what_a_script_without_close_missed_is_stored(tmp_path):
    script = """
import sys
from tiny import some_chunks, tiny_model, tiny_tokenizer
from ragkv import RagKV
kv, chunks = RagKV(tiny_model(), tiny_tokenizer(), store=sys.argv[1]), some_chunks(3)
kv.prefetch(chunks)
kv.generate(" ".join([*chunks, "What?"]), max_new_tokens=2)
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=SUPPORT)
    assert (done.stdout, "Traceback" in done.stderr) == ("", False)
    with RagKV(tiny_model(), tiny_tokenizer(), store=tmp_path) as kv:
        assert all(map(kv.contains, some_chunks(3)))


def test_the_files_of_others_are_not_swept(tmp_path):
    with closing(DiskStore(tmp_path)) as store:
        store.put(make_entry("a", tokens=500), FINGERPRINT)
        (mine,) = store.folder.glob(f"*/*/*{_SUFFIX}")
    elsewhere = tmp_path / "weights"
    elsewhere.mkdir()
    kept = elsewhere / mine.name.replace(mine.name[2], "0" if mine.name[2] != "0" else "1")
    kept.touch()
    link = mine.parent.parent / ("00" if mine.parent.name != "00" else "01")
    link.symlink_to(elsewhere)
    others = mine.parent / f"model{_SUFFIX}"
    others.touch()
    orphan = mine.with_name(mine.name[: -len(_SUFFIX) - 16] + "0" * 16 + _SUFFIX)
    orphan.touch()
    with closing(DiskStore(tmp_path)) as store:
        assert store.contains("a", FINGERPRINT)
    assert [path.exists() for path in (mine, kept, others, orphan)] == [True, True, True, False]


def test_costs_that_fail_leave_memory_usable():
    def costs(_, tokens):
        if tokens == 7:
            raise ValueError("no such size")
        return float(tokens)

    tier = MemoryTier(1 << 20, costs=costs)
    with pytest.raises(ValueError, match="no such size"):
        tier.put(make_entry("a", tokens=7), FINGERPRINT)
    assert tier.get("a", FINGERPRINT) is None
    tier.put(make_entry("a", tokens=5), FINGERPRINT)
    assert tier.get("a", FINGERPRINT) is not None


@pytest.mark.parametrize("field", ["shape", "versions"])
def test_headers_that_are_too_deep_are_refused(field):
    store = ChunkStore(MemoryBackend())
    store.put(make_entry("a"), FINGERPRINT)
    encoded = encode(make_entry("a"), FINGERPRINT)
    table, whole = unsealed(encoded[0]), b"".join(encoded)
    table["__metadata__"][field] = "[" * 100_000
    parts: Sequence[Bytes] = [sealed(table) + whole[len(encoded[0]) :]]
    store.backend.put(entry_key(digest_of_text("a"), FINGERPRINT.digest), parts)
    assert store.get("a", FINGERPRINT).reason == "format"


def test_a_chunk_that_very_many_documents_hold_is_copied():
    store, other = ChunkStore(MemoryBackend()), ChunkStore(MemoryBackend())
    documents = tuple(f"{number:04}-{'name' * 300}" for number in range(1000))
    for document in documents:
        store.put(make_entry("a"), FINGERPRINT, Terms(document))
    copy_store(store, other)
    assert [info.documents for info in other.entries()] == [documents]


@pytest.mark.parametrize(
    "url",
    [
        "redis://:hunter@2@host:1/0",
        "redis://u:hunter/2@host:1/0",
        "redis://u:hunter?2@host:1/0",
        "redis://host:1/0?password=hunter2",
        "redis://host:1/0?db=1&password=hunter@2",
    ],
)
def test_messages_about_a_server_show_no_password(url):
    assert _without_password(url) == "redis://host:1/0"


def test_an_interrupt_at_any_line_of_a_load_leaves_nobody_waiting():
    place = Place()
    ChunkStore(MemoryBackend(place)).put(make_entry("a"), FINGERPRINT)
    code, line = TieredStore.get.__code__, 0

    def interrupt(frame, event, _):
        nonlocal left
        if frame.f_code is not code:
            return None
        left -= event == "line"
        if event == "line" and not left:
            raise KeyboardInterrupt
        return interrupt

    while True:
        line += 1
        left, store = line, tiered(MemoryBackend(place))
        sys.settrace(interrupt)
        try:
            store.get("a", FINGERPRINT)
            break
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        for again in (store.get, store.open):
            with ThreadPoolExecutor(1) as pool:
                looking = pool.submit(again, "a", FINGERPRINT)
                assert looking.result(timeout=5).entry is not None, line
    assert line > 10
