"""Chunks that belong to documents, and chunks that expire: in every store, and by the engine."""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
from disk_store import tiered
from store_entries import FINGERPRINT, OTHER, make_entry, put_texts, same, without_syncs  # noqa: F401
from tiny import some_chunks

from ragkv import StoreConfig
from ragkv.errors import ConfigError, StoreError
from ragkv.store import ChunkStore
from ragkv.store.backends.backend import Bytes
from ragkv.store.backends.memory import MemoryBackend, Place
from ragkv.store.operate import verify
from ragkv.store.types import Terms

pytestmark = pytest.mark.usefixtures("without_syncs")


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000_000.0
        monkeypatch.setattr(time, "time", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def found(store: ChunkStore, text: str) -> bool:
    """Whether a text is there, by every method that could say so."""
    lookup = store.get(text, FINGERPRINT)
    assert store.contains(text, FINGERPRINT) == (lookup.entry is not None)
    assert lookup.entry is None or same(lookup.entry, make_entry(text))
    return lookup.entry is not None


def test_a_forgotten_documents_chunks_go_unless_another_holds_them(store):
    for text, document in [("a", "one"), ("b", "one"), ("c", "two"), ("d", None)]:
        store.put(make_entry(text), FINGERPRINT, Terms(document))
    store.put(make_entry("a"), OTHER)
    assert store.retain("b", FINGERPRINT, Terms("two"))
    assert not store.retain("b", OTHER, Terms("three"))
    assert not store.retain("x", FINGERPRINT, Terms("two"))
    held = {(info.text, info.fingerprint): info.documents for info in store.entries()}
    assert held == {
        ("a", FINGERPRINT.digest): ("one",),
        ("a", OTHER.digest): ("one",),
        ("b", FINGERPRINT.digest): ("one", "two"),
        ("c", FINGERPRINT.digest): ("two",),
        ("d", FINGERPRINT.digest): (),
    }
    of = {text: store.documents(text) for text in "abdx"}
    assert of == {"a": ["one"], "b": ["one", "two"], "d": [], "x": []}
    since = store.changes(0)[0]
    assert store.forget_document("one") == 1
    assert store.changes(since).removed == ["a"]
    assert [found(store, text) for text in "abcd"] == [False, True, True, True]
    assert store.get("a", OTHER).reason == "absent"
    assert store.forget_document("one") == 0
    assert store.forget_document("two") == 2
    assert list(store.texts()) == ["d"]


def test_an_edited_document_leaves_no_stale_chunk(store):
    put_texts(store, "abc", Terms("one"))
    store.put(make_entry("b"), FINGERPRINT, Terms("two"))
    store.put(make_entry("d"), FINGERPRINT, Terms("one"))
    assert store.keep_only("one", ["a", "d", "never put"]) == 1
    assert sorted(store.texts()) == ["a", "b", "d"]
    assert store.keep_only("one", ["a", "d"]) == 0
    assert store.forget_document("two") == 1
    assert sorted(store.texts()) == ["a", "d"]


@pytest.mark.parametrize("document", ["", "a/b", "../x", "ü\ud83d", "x" * 5000])
def test_any_text_names_a_document(store, document):
    store.put(make_entry("a"), FINGERPRINT, Terms(document))
    assert [info.documents for info in store.entries()] == [(document,)]
    assert store.forget_document(document) == 1


def test_a_deleted_chunk_is_nobodys(store):
    store.put(make_entry("a"), FINGERPRINT, Terms("one"))
    store.delete("a")
    store.put(make_entry("a"), FINGERPRINT)
    assert [info.documents for info in store.entries()] == [()]
    assert store.forget_document("one") == 0
    assert found(store, "a")


def test_what_expires_is_a_miss_and_then_gone(store, clock):
    store.put(make_entry("a"), FINGERPRINT, Terms(expires_at=clock.now + 10))
    store.put(make_entry("b"), FINGERPRINT)
    lookup = store.get("a", FINGERPRINT)
    assert lookup.expires_at == clock.now + 10
    assert store.get("b", FINGERPRINT).expires_at is None
    assert {info.text: info.expires_at for info in store.entries()} == {
        "a": clock.now + 10,
        "b": None,
    }
    assert store.gc() == 0
    clock.now += 10
    assert store.get("a", FINGERPRINT).reason == "expired"
    assert not store.contains("a", FINGERPRINT)
    assert not store.retain("a", FINGERPRINT, Terms())
    assert found(store, "b")
    assert store.gc() == 1
    assert store.get("a", FINGERPRINT).reason == "absent"
    assert list(store.texts()) == ["b"]


def test_the_latest_time_counts(store, clock):
    store.put(make_entry("a"), FINGERPRINT, Terms(expires_at=clock.now + 10))
    assert store.retain("a", FINGERPRINT, Terms(expires_at=clock.now + 5))
    assert store.retain("a", FINGERPRINT, Terms(expires_at=clock.now + 20))
    store.put(make_entry("a"), FINGERPRINT, Terms(expires_at=clock.now + 15))
    clock.now += 19
    assert found(store, "a")
    clock.now += 1
    assert not found(store, "a")
    store.put(make_entry("a"), FINGERPRINT, Terms(expires_at=clock.now + 10))
    assert found(store, "a")
    assert store.retain("a", FINGERPRINT, Terms())
    assert store.get("a", FINGERPRINT).expires_at is None


def test_a_put_may_leave_the_time_of_what_is_there(store, clock):
    time_of = partial(store.get, fingerprint=FINGERPRINT)
    store.put(make_entry("a"), FINGERPRINT, Terms(expires_at=Terms.KEEP))
    assert time_of("a").expires_at is None
    store.put(make_entry("b"), FINGERPRINT, Terms(expires_at=clock.now + 10))
    store.put(make_entry("b"), OTHER, Terms(expires_at=Terms.KEEP))
    store.put(make_entry("b"), FINGERPRINT, Terms(expires_at=Terms.KEEP))
    assert store.retain("b", FINGERPRINT, Terms("one", Terms.KEEP))
    assert (time_of("b").expires_at, store.expiry("b")) == (clock.now + 10,) * 2
    clock.now += 10
    assert time_of("b").reason == "expired"
    assert store.get("b", replace(OTHER, dtype="float16")).reason == "expired"
    store.put(make_entry("b"), FINGERPRINT, Terms(expires_at=Terms.KEEP))
    assert not found(store, "b")
    store.put(make_entry("b"), FINGERPRINT)
    assert found(store, "b")


def test_a_clock_that_is_set_back_only_lengthens_a_life(store, clock):
    store.put(make_entry("a"), FINGERPRINT, Terms(expires_at=clock.now + 10))
    clock.now -= 10_000
    assert found(store, "a")
    clock.now += 10_009
    assert found(store, "a")


def test_leftovers_are_collected(tmp_path):
    backend = MemoryBackend()
    store = ChunkStore(backend)
    put_texts(store, "abcd", Terms("one"))
    keys = {
        info.text: key.name for info, key in zip(store.entries(), backend.scan("kv/"), strict=True)
    }
    backend.delete(keys["a"])  # a crash after the registration, or a damaged entry
    backend.delete(keys["b"].replace("kv/", "text/").rpartition("/")[0])  # a crash while deleting
    assert store.gc() == 1
    assert {key.name for key in backend.scan("kv/")} == {keys["c"], keys["d"]}
    assert len(list(backend.scan("text/"))) == len(list(backend.scan("held/"))) == 2
    assert len(list(backend.scan("document/"))) == 2
    store.catalog.compact_log(kept=1)
    assert len(list(backend.scan("log/"))) == 3  # c, d, and the newest change
    assert ChunkStore(backend).changes(0)[1] == ["c", "d"]


def test_a_changes_number_is_never_used_again():
    place = Place()
    first = ChunkStore(MemoryBackend(place))
    put_texts(first, "abc")
    first.delete("a")
    first.catalog.compact_log(kept=1)  # numbers below those of b and c are free now
    seen, _, _ = first.changes(0)
    second = ChunkStore(MemoryBackend(place))  # a new process
    second.put(make_entry("d"), FINGERPRINT)
    assert first.changes(seen)[:2] == (seen + 1, ["d"])


def test_a_text_that_is_deleted_while_its_time_is_written_is_found():
    place = Place()
    other = ChunkStore(MemoryBackend(place))

    class Slow(MemoryBackend):
        def put(self, key, parts):
            if key.startswith("text/") and place.values.get(key) not in (None, parts[0]):
                other.delete("a")  # between what is read and what is written
            super().put(key, parts)

    store = ChunkStore(Slow(place))
    store.put(make_entry("a"), FINGERPRINT, Terms(expires_at=time.time() + 10))
    store.put(make_entry("a"), FINGERPRINT, Terms(expires_at=time.time() + 60))
    assert other.changes(0)[1] == ["a"]
    assert verify(store).sound


class Failing(MemoryBackend):
    """Fails once, at one kind of change."""

    fails: tuple[str, str] | None = None

    def _fail(self, method: str, key: str) -> None:
        if self.fails is not None and (method, key[:3]) == self.fails:
            self.fails = None
            raise StoreError("the server is gone")

    def put(self, key: str, parts: Sequence[Bytes]) -> None:
        self._fail("put", key)
        super().put(key, parts)

    def put_if_absent(self, key: str, parts: Sequence[Bytes]) -> bool:
        self._fail("put_if_absent", key)
        return super().put_if_absent(key, parts)

    def delete(self, key: str) -> bool:
        self._fail("delete", key)
        return super().delete(key)


@pytest.mark.parametrize("mend", [lambda store: store.delete("secret"), ChunkStore.gc])
@pytest.mark.parametrize(
    "fails", [("delete", "kv/"), ("put", "log"), ("put_if_absent", "log"), ("delete", "hel")]
)
def test_a_deletion_that_was_cut_short_is_completed(fails, mend):
    place = Place()
    backend = Failing(place)
    store = ChunkStore(backend)
    other = tiered(MemoryBackend(place))  # a process
    store.put(make_entry("secret"), FINGERPRINT, Terms("one"))
    seen, _, _ = other.changes(0)
    assert found(other, "secret")
    backend.fails = fails
    with pytest.raises(StoreError):
        store.delete("secret")
    mend(store)
    moved, _, _ = other.changes(seen)
    assert moved > seen
    assert not found(other, "secret")
    assert not [key for key, value in place.values.items() if b"secret" in value]
    assert {key.split("/")[0] for key in place.values} == {"store", "log"}


def test_a_text_without_a_row_leaves_the_log():
    backend = MemoryBackend()
    store = ChunkStore(backend)
    put_texts(store, ("secret", "b"))
    for key in [*backend.scan("kv/"), *backend.scan("text/")]:
        if b"secret" in backend.get(key.name):
            backend.delete(key.name)
    seen, _, _ = store.changes(0)
    store.gc()
    assert store.changes(seen).removed == ["secret"]
    assert not any(b"secret" in value for value in backend.place.values.values())
    assert ChunkStore(backend).changes(0)[1] == ["b"]


def test_parts_of_one_revision_stay_and_those_of_another_go(store):
    one, two = Terms("book", revision="one"), Terms("book", revision="two")
    for text in ("a", "b", "c"):
        store.put(make_entry(text), FINGERPRINT, one)
    assert store.keep_only("book", ["c"], "one") == 0  # another call gave a and b
    store.put(make_entry("d"), FINGERPRINT, two)
    assert store.retain("b", FINGERPRINT, two)
    store.retain("c", FINGERPRINT, Terms("other"))
    assert store.keep_only("book", ["d"], "two") == 1
    assert [found(store, text) for text in "abcd"] == [False, True, True, True]
    assert store.documents("c") == ["other"]
    assert store.keep_only("book", ["d"]) == 1  # the whole document
    assert store.forget_document("book") == 1
    assert store.forget_document("other") == 1


# ---- by the engine


def test_an_engine_s_calls_for_one_revision_add_up(make_engine):
    chunks = some_chunks(5)
    kv = make_engine()
    for part in (chunks[:2], chunks[2:4]):
        assert kv.precompute(part, document="book", revision="1").removed == 0
    assert kv.precompute(chunks[:1], document="book", revision="2").removed == 3
    assert kv.precompute(chunks[4:], document="book", revision="2").removed == 0
    assert [kv.contains(text) for text in chunks] == [True, False, False, False, True]
    for wrong in ({"revision": "1"}, {"document": "book", "revision": 1}):
        with pytest.raises(ConfigError, match="revision must be a string"):
            kv.precompute(chunks, **wrong)


def test_precompute_and_forget_documents(make_engine, tmp_path):
    first, second, third = some_chunks(3)
    kv = make_engine(store=tmp_path)
    assert kv.precompute([first, second], document="one").new == 2
    assert kv.precompute([second], document="two").existing == 1
    prompt = f"{first}\n\n{second}\n\n{third}\n\nWhat is assigned?"
    assert len(kv.prefill(prompt).report.chunks) == 2
    edited = kv.precompute([second, third], document="one")
    assert (edited.new, edited.existing, edited.removed) == (1, 1, 1)
    assert [kv.contains(text) for text in (first, second, third)] == [False, True, True]
    report = kv.prefill(prompt).report
    assert len(report.chunks) == 2
    assert not report.misses  # the stale chunk is not even looked for
    assert kv.forget(document="one") == 1
    assert [kv.contains(text) for text in (first, second, third)] == [False, True, False]


def test_precompute_what_expires(make_engine, tmp_path, clock):
    first, second = some_chunks(2)
    kv = make_engine(store=tmp_path)
    kv.precompute([first], expires_in=60)
    kv.precompute([first, second])  # what is there keeps its time
    prompt = f"{first}\n\n{second}\n\nWhat is assigned?"
    expected = kv.prefill(prompt, method="full").logits
    assert len(kv.prefill(prompt).report.chunks) == 2
    clock.now += 60
    kv.prefetch([first, second])
    answer = kv.prefill(prompt, recompute_ratio=1)
    assert [miss.reason for miss in answer.report.misses] == ["expired", "ratio"]
    assert answer.logits.sub(expected).abs().max() < 1e-3
    kv.wait()
    assert not kv.contains(first)  # nothing but precompute() brings it back
    assert kv.precompute([first], expires_in=60).new == 1
    assert len(kv.prefill(prompt).report.chunks) == 2


def test_nothing_but_a_time_that_is_given_changes_a_time(make_engine, tmp_path, clock):
    first, second = some_chunks(2)
    kv = make_engine(store=StoreConfig(tmp_path, memory_bytes=0))
    kv.precompute([first, second], expires_in=60)
    kv.precompute([first], document="one")
    for path in tmp_path.rglob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    prompt = f"{first}\n\n{second}\n\nWhat is assigned?"
    other = make_engine("mistral", store=StoreConfig(tmp_path, memory_bytes=0))
    for engine in (kv, other):  # one mends its entries, the other makes its own
        assert len(engine.prefill(prompt).report.misses) == 2
        engine.wait()
        assert not engine.prefill(prompt).report.misses
    times = [info.expires_at for info in kv._store.entries()]
    assert times == [clock.now + 60] * 4
    clock.now += 60
    other.precompute([second], document="two")
    assert [kv.contains(text) for text in (first, second)] == [False, True]


def test_a_chunk_that_could_not_be_forgotten_is_found(make_engine, tmp_path):
    chunks = some_chunks(1)
    make_engine(store=tmp_path).precompute(chunks)
    kv = make_engine(store=StoreConfig(tmp_path, read_only=True))
    prompt = f"{chunks[0]}\n\nWhat is assigned?"
    assert kv.prefill(prompt).report.chunks
    with pytest.raises(StoreError, match="read_only"):
        kv.forget(chunks[0])
    assert kv.prefill(prompt).report.chunks


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), True, "60", 10**400])
def test_wrong_times(make_engine, wrong):
    with pytest.raises(ConfigError, match="expires_in"):
        make_engine().precompute(some_chunks(1), expires_in=wrong)
    with pytest.raises(ConfigError, match="document"):
        make_engine().precompute(some_chunks(1), document=5)


def test_what_is_no_text_is_refused(make_engine, tmp_path):
    kv, (chunk,) = make_engine(), some_chunks(1)
    calls = (kv.forget, kv.contains, lambda name: kv.forget(document=name))
    for call in calls:
        for wrong in (None, 5):
            with pytest.raises(ConfigError, match=r"must be a string, not|one of them$"):
                call(wrong)
    with pytest.raises(ConfigError, match="lone surrogate"):
        kv.precompute([chunk, f"{chunk} \ud800"])
    assert not kv.contains(chunk)
    with pytest.raises(ConfigError, match="namespace must be"):
        make_engine(store=tmp_path, namespace=5)
    with pytest.raises(ConfigError, match="store path"):
        make_engine(store="a\0b")
