"""The entries of a request that waits are read before its turn."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from served import until
from tiny import ask, some_chunks

from ragkv import RagKV, StoreConfig
from ragkv.store.entry.lazy import LazyKV, ReadAhead

Make = Callable[..., RagKV]
CHUNKS = some_chunks(4)


@pytest.fixture
def fresh(make_engine: Make, tmp_path: Path) -> Callable[[], RagKV]:
    """Make an engine over stored chunks, none of them in memory."""
    with make_engine(store=StoreConfig(tmp_path)) as kv:
        kv.precompute(CHUNKS)
    return lambda: make_engine(store=StoreConfig(tmp_path))


def in_memory(kv: RagKV) -> list[str]:
    corpus = kv._reuse.corpus
    behind = corpus.sinks.configured(kv.reuse).fingerprint
    return [text for text in CHUNKS if kv._store.tiers[0].contains(text, behind)]


def asking(kv: RagKV, chunks: list[str]) -> threading.Thread:
    """Ask in a thread, and return when the request waits for the model."""
    before = kv.status().waiting + kv.status().running
    thread = threading.Thread(target=kv.prefill, args=(ask(chunks),))
    thread.start()
    until(lambda: kv.status().waiting + kv.status().running > before)
    return thread


def reading() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "ragkv-read-ahead"]


def test_a_waiting_request_has_its_entries_read(fresh):
    kv = fresh()
    kv.contains(CHUNKS[0])  # its sink is known
    with kv.turn():
        thread = asking(kv, CHUNKS[:2])
        until(lambda: in_memory(kv) == CHUNKS[:2])
        assert thread.is_alive()
    thread.join(30)


def test_only_some_that_wait_have_them_read(fresh, monkeypatch):
    monkeypatch.setattr("ragkv.engine.pipeline._MOST_PRELOADED", 1)
    kv = fresh()
    kv.contains(CHUNKS[0])
    with kv.turn():
        threads = [asking(kv, CHUNKS[:1]), asking(kv, CHUNKS[1:3])]
        until(lambda: in_memory(kv) == CHUNKS[:1])
        time.sleep(0.1)
        assert in_memory(kv) == CHUNKS[:1]
    for thread in threads:
        thread.join(30)
    assert in_memory(kv) == CHUNKS[:3]
    with kv.turn():  # the place is free again
        thread = asking(kv, CHUNKS[3:])
        until(lambda: in_memory(kv) == CHUNKS)
    thread.join(30)


def test_a_reader_who_leaves_stops_the_reading(fresh, monkeypatch):
    kv, load, stop, read = fresh(), LazyKV.load, ReadAhead.stop, list[int]()
    begun, stopped = threading.Event(), threading.Event()
    kv.contains(CHUNKS[0])

    def slowly(entry, index, *, decoded=True):
        begun.set()
        assert stopped.wait(30)
        load(entry, index, decoded=decoded)
        read.append(index)

    def stopping(each):
        each._stopped = True
        if begun.is_set():
            stopped.set()
        stop(each)

    monkeypatch.setattr(LazyKV, "load", slowly)
    monkeypatch.setattr(ReadAhead, "stop", stopping)
    with kv.turn():
        stream = kv.stream(ask(CHUNKS))
        assert begun.wait(30)
        stream.close()
        until(lambda: not reading())
        assert len(read) == 1
    assert list(stream) == []
