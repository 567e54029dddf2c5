"""Ingestion step by step: what is computed, written and waited for at the same time."""

import threading
import time
from collections.abc import Iterator
from functools import partial

import torch
from tiny import some_chunks

from ragkv.chunk import encode
from ragkv.ingest import encode as encoding
from ragkv.model.architecture import backbone_of
from ragkv.model.pool import Pool
from ragkv.store import TieredStore


def test_a_batch_is_written_while_the_next_is_computed(make_engine, monkeypatch):
    engine = make_engine()
    computed, seen = threading.Semaphore(0), list[bool]()

    def batches(*args: object) -> Iterator[object]:
        for batch in encode.encode_chunks(*args):
            computed.release()
            yield batch

    def put(*args: object, **kwargs: object) -> int:
        if not seen:
            seen.append(computed.acquire(timeout=30) and computed.acquire(timeout=30))
        return stored(*args, **kwargs)

    stored = TieredStore.put
    monkeypatch.setattr(encode, "BATCH_TOKENS_CPU", 1)
    monkeypatch.setattr(encoding, "encode_chunks", batches)
    monkeypatch.setattr(TieredStore, "put", put)
    chunks = some_chunks(3)
    engine.precompute(chunks)
    assert seen == [True]
    assert all(engine.contains(chunk) for chunk in chunks)


def test_a_request_waits_for_a_layer_of_an_ingestion(make_engine):
    engine, chunks = make_engine(), some_chunks(4)
    engine.precompute(chunks[:2])
    layers = backbone_of(engine.loaded.model).layers
    encoding, passes, here = threading.Event(), list[tuple[bool, int]](), threading.get_ident()

    def note(layer: int, *_: object) -> None:
        passes.append((threading.get_ident() == here, layer))
        if not encoding.is_set():
            encoding.set()
            while not engine._lock.is_wanted():
                time.sleep(0.001)

    for at, layer in enumerate(layers):
        layer.register_forward_pre_hook(partial(note, at))
    with Pool(1) as thread:
        thread.submit(engine.precompute, chunks[2:])
        encoding.wait()
        assert engine.prefill("\n\n".join(chunks[:2])).report.tokens.reused
    assert passes.index((False, at)) > passes.index((True, at))  # the last layer
    prompt, other = "\n\n".join([*chunks, "What?"]), make_engine()
    other.precompute(chunks)
    found, expected = (kv.prefill(prompt, method="reuse").logits for kv in (engine, other))
    torch.testing.assert_close(found, expected)
