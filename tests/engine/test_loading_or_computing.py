"""Loading or computing, where bytes come slowly."""

import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pytest
import torch
from disk_store import tiered
from store_entries import FINGERPRINT, make_entry
from tiny import some_chunks, tiny_model, tiny_tokenizer

from ragkv import RagKV, StoreConfig
from ragkv.chunk.sinks import Sink
from ragkv.config import MEMORY
from ragkv.decode.prefill import full_prefill
from ragkv.store import ChunkStore, TieredStore
from ragkv.store.backends.backend import Blob
from ragkv.store.backends.memory import MemoryBackend
from ragkv.store.names import digest_of_text, entries_of
from ragkv.store.tiered import Rate, is_slower

Make = Callable[..., RagKV]


class Planted(MemoryBackend):
    """A place whose bytes take as long as a test says."""

    delay, gets = 0.0, 0

    def get_many(self, keys: Iterable[str]) -> Iterator[Blob | None]:
        names = list(keys)
        if names and names[-1].startswith("kv/"):
            self.gets += 1
            time.sleep(self.delay)
        return super().get_many(names)


def sink_of(engine: RagKV) -> Sink:
    return engine._reuse.corpus.sinks.configured(engine.reuse)


@pytest.fixture
def served(make_engine: Make) -> tuple[RagKV, Planted]:
    """An engine without memory tier, whose rates are 1 ms a token and as planted."""
    engine, below = make_engine(store=StoreConfig(MEMORY, history_bytes=0)), Planted()
    engine.precompute(some_chunks(6))
    for text in engine._store.texts():
        entry = engine._reuse.corpus.get(text, sink_of(engine)).entry
        assert entry is not None
        ChunkStore(below).put(entry, sink_of(engine).fingerprint)
    engine._store = engine._reuse.corpus.store = tiered(below, 0)
    engine._reuse.corpus.prefill_rate = rate(tokens=1000, seconds=1.0)
    engine._reuse.corpus.record_speed = lambda tokens, seconds: None
    return engine, below


def rate(tokens: float, seconds: float, samples: int = 3) -> Rate:
    made = Rate()
    for _ in range(samples):
        made.add(tokens, seconds)
    return made


def ask(chunks: list[str]) -> str:
    return "\n\n".join([*chunks, "Question: what is bound? Answer:"])


def test_a_rate_follows_what_is_measured():
    made = Rate()
    for count in range(3):
        assert made.seconds(10) is None, count
        made.add(100, 1.0)
    assert made.seconds(50) == pytest.approx(0.5)
    for _ in range(30):
        made.add(100, 4.0)
    assert made.seconds(50) == pytest.approx(2.0, rel=0.01)


def test_only_what_was_measured_can_be_slower():
    assert is_slower(1.3, 1.0)
    assert not is_slower(1.2, 1.0)
    assert not is_slower(None, 0.0)
    assert not is_slower(9.0, None)


def test_tiers_measure_what_comes_from_below_and_count_memory_as_nothing():
    below = Planted()
    store = tiered(below)
    entry = make_entry("a")
    ChunkStore(below).put(entry, FINGERPRINT)
    assert store.load_seconds("a", FINGERPRINT, entry.nbytes) is None
    below.delay = 0.02
    began = time.perf_counter()
    for _ in range(3):
        store.tiers[0].delete("a")
        store.get("a", FINGERPRINT)
        store.get("nothing", FINGERPRINT)  # what is not there says nothing
    took = time.perf_counter() - began
    assert store.load_seconds("a", FINGERPRINT, entry.nbytes) == 0.0
    store.tiers[0].delete("a")
    found = store.load_seconds("a", FINGERPRINT, entry.nbytes)
    assert found is not None
    assert 0.02 <= found < took


def test_what_loads_slowly_is_computed_and_the_report_says_so(served):
    engine, below = served
    chunks = some_chunks(6)
    engine._store.load_rate = rate(tokens=1, seconds=1.0)  # 1 byte a second
    out = engine.prefill(ask(chunks[:3]))
    assert [miss.reason for miss in out.report.misses] == ["slower"] * 3
    assert [miss.chunk for miss in out.report.misses] == [chunk[:80] for chunk in chunks[:3]]
    assert out.report.tokens.reused == out.report.tokens.recomputed == 0
    full, _ = full_prefill(engine.loaded, np.array(out.token_ids))
    torch.testing.assert_close(out.logits, full, atol=1e-4, rtol=1e-4)
    engine.wait()
    assert below.gets == 3  # afterwards, in the background: the speed is measured again
    assert engine.contains(chunks[0])


def test_the_next_time_it_lies_in_memory(served):
    engine, below = served
    chunks = some_chunks(2)
    engine._store = engine._reuse.corpus.store = tiered(below, 1 << 30)
    engine._store.load_rate = rate(tokens=1, seconds=1.0)
    assert engine.generate(ask(chunks), max_new_tokens=1).report.tokens.reused == 0
    engine.wait()
    report = engine.generate(ask(chunks), max_new_tokens=1, recompute_ratio=0.0).report
    assert report.misses == ()
    assert report.tokens.reused > 50


@pytest.mark.parametrize("why", ["fast", "always", "load unknown", "prefill unknown"])
def test_it_is_loaded_where_that_is_faster_asked_for_or_not_known(served, why):
    engine, _ = served
    fast = rate(tokens=1e12, seconds=1.0)
    slow = rate(tokens=1.0, seconds=1.0)
    engine._store.load_rate = {"fast": fast, "load unknown": Rate()}.get(why, slow)
    if why == "prefill unknown":
        engine._reuse.corpus.prefill_rate = Rate()
    engine._reuse.corpus.loads_always = why == "always"
    report = engine.prefill(ask(some_chunks(3)), recompute_ratio=0.0).report
    assert report.misses == ()
    assert report.tokens.reused > 100


def test_what_is_not_stored_is_absent_and_not_slower(served):
    engine, below = served
    chunks = some_chunks(3)
    engine._reuse.corpus.find("")
    (key,) = below.scan(entries_of(digest_of_text(chunks[1])))
    below.delete(key.name)
    engine._store.load_rate = rate(tokens=1, seconds=1.0)
    report = engine.prefill(ask(chunks), on_miss="skip").report
    assert [miss.reason for miss in report.misses] == ["slower", "absent", "slower"]


def test_both_rates_are_measured_in_use(make_engine, tmp_path):
    chunks = some_chunks(6)
    with RagKV(tiny_model(), tiny_tokenizer(), store=tmp_path) as engine:
        engine.precompute(chunks)
        assert engine._reuse.corpus.prefill_rate._samples >= 1
    engine = make_engine(store=tmp_path)
    engine._reuse.corpus.loads_always = True
    for count in range(1, 4):
        engine.prefill(ask(chunks[: 2 * count]), recompute_ratio=1.0)
    assert engine._reuse.corpus.prefill_rate.seconds(1) is not None
    store = engine._store
    assert isinstance(store, TieredStore)
    assert store.load_rate._samples == 6
