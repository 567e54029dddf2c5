"""Ingestion step by step: what is computed, written and waited for at the same time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from tiny import some_chunks

from ragkv import RagKV
from ragkv.chunk import encode
from ragkv.engine import corpus
from ragkv.store import TieredStore

Make = Callable[..., RagKV]


def test_a_batch_is_written_while_the_next_is_computed(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    computed, seen = threading.Semaphore(0), list[bool]()

    def batches(*args: object) -> Iterator[object]:
        for batch in encode.encode_chunks(*args):  # type: ignore[arg-type]
            computed.release()
            yield batch

    def put(*args: object, **kwargs: object) -> int:
        if not seen:
            seen.append(computed.acquire(timeout=30) and computed.acquire(timeout=30))
        return stored(*args, **kwargs)  # type: ignore[arg-type]

    stored = TieredStore.put
    monkeypatch.setattr(encode, "BATCH_TOKENS_CPU", 1)
    monkeypatch.setattr(corpus, "encode_chunks", batches)
    monkeypatch.setattr(TieredStore, "put", put)
    chunks = some_chunks(3)
    engine.precompute(chunks)
    assert seen == [True]
    assert all(engine.contains(chunk) for chunk in chunks)


def test_a_request_waits_for_one_batch_of_an_ingestion(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    computed: list[object] = []
    begun = threading.Event()

    def batches(*args: object) -> Iterator[object]:
        for batch in encode.encode_chunks(*args):  # type: ignore[arg-type]
            time.sleep(0.01)
            computed.append(batch)
            begun.set()
            yield batch

    monkeypatch.setattr(encode, "BATCH_TOKENS_CPU", 1)
    monkeypatch.setattr(corpus, "encode_chunks", batches)
    chunks = list(dict.fromkeys(some_chunks(60)))
    ingestion = threading.Thread(target=engine.precompute, args=(chunks,), daemon=True)
    ingestion.start()
    assert begun.wait(30)
    before = len(computed)
    engine.prefill("Hello", on_miss="skip")
    assert len(computed) - before <= 3
    ingestion.join()
    assert len(computed) > 20
