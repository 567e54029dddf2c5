"""Entries loaded layer by layer while the layers before are computed."""

import gc
import itertools
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from disk_store import DiskStore, tiered
from store_entries import FINGERPRINT, file_of, make_entry, put_texts, same
from tiny import SIZE, ask, some_chunks, tiny_model, tiny_tokenizer

from ragkv import RagKV, StoreConfig
from ragkv.chunk.kv import ChunkKV, LayeredKV
from ragkv.engine.plan import Clock
from ragkv.model.calls import cache_in
from ragkv.splice import place
from ragkv.store import ChunkStore
from ragkv.store.backends.backend import Blob
from ragkv.store.backends.memory import MemoryBackend
from ragkv.store.entry.codecs import codec_of
from ragkv.store.entry.format import encode, open_entry
from ragkv.store.entry.header import read_header
from ragkv.store.entry.lazy import CorruptEntryError, LazyKV, read_ahead
from ragkv.store.tiers.tier import MemoryTier

LAYERS = int(SIZE["num_hidden_layers"])


def opened(entry: ChunkKV, codec: str = "raw", *, damaged: int | None = None) -> LazyKV:
    """Open the entry's bytes, perhaps with a bit of one layer turned."""
    fingerprint = replace(FINGERPRINT, codec=codec)
    data = bytearray(b"".join(encode(entry, fingerprint)))
    if damaged is not None:
        header, start = read_header(data)
        data[start + header.spans[damaged].start] ^= 1
    return open_entry(data, entry.text, fingerprint, copy=True)


class There:
    """Layers that are there, and who is told when one is taken."""

    codec = codec_of("raw")
    dtype = torch.float32

    def __init__(self, entry: ChunkKV, told: Callable[[int], None]) -> None:
        self._kv = torch.stack([entry.keys, entry.values], dim=1)
        self.shape = tuple(self._kv.shape)
        self._told = told
        self.stays = False

    def allocate(self) -> torch.Tensor:
        return self._kv

    def read_layer(self, layer: int, out: torch.Tensor) -> None:
        assert torch.equal(out, self._kv[layer])
        self._told(layer)

    def read_raw(self, layer: int, out: torch.Tensor) -> None:
        out[: self._kv[layer].nbytes] = self._kv[layer].reshape(-1).view(torch.uint8)
        self._told(layer)


def taken_by(entry: ChunkKV, take: Callable[[int], None]) -> LazyKV:
    """Let the entry's layers, which are there, be taken."""
    return LazyKV(entry.text, (entry.token_ids, entry.offsets), There(entry, take))


# ---- one entry


@pytest.mark.parametrize("codec", ["raw", "int8", "int4"])
def test_a_layer_is_read_and_trusted_alone(codec):
    entry = make_entry("text", layers=5, tokens=7)
    whole = opened(entry, codec).whole()
    lazy = opened(entry, codec, damaged=4)
    for index in (3, 0):
        keys, values = lazy.layers(slice(index, index + 1))
        assert torch.equal(keys[0], whole.keys[index])
        assert torch.equal(values[0], whole.values[index])
    with pytest.raises(CorruptEntryError, match="layer 4's checksum") as lost:
        lazy.load(4)
    assert (lost.value.text, lost.value.reason) == ("text", "checksum")
    with pytest.raises(CorruptEntryError, match="layer 4's checksum"):
        lazy.load(1)  # an entry that is damaged anywhere is not used any more


@pytest.mark.parametrize("codec", ["raw", "int8", "int4"])
def test_a_layer_may_stay_as_its_codec_keeps_it(codec):
    entry = make_entry("text", layers=5, tokens=7)
    whole = opened(entry, codec).whole()
    lazy = opened(entry, codec)
    stored = codec_of(codec)
    assert lazy.nbytes == whole.nbytes
    coded = lazy.coded(slice(1, 4))
    assert coded is not None
    assert coded.codec == codec
    assert coded.data.stride(0) % 16 == 0
    for layer, data in zip(range(1, 4), coded.data, strict=True):
        expected = b"".join(stored.encode(entry.keys[layer], entry.values[layer]))
        assert data[: coded.size].numpy().tobytes() == expected
    for index in range(5):  # what is read is not read again to be decoded
        keys, values = lazy.layers(slice(index, index + 1))
        assert torch.equal(keys[0], whole.keys[index])
        assert torch.equal(values[0], whole.values[index])
    assert lazy.coded(slice(2, 4)) is not None
    assert lazy.coded(slice(0, 4)) is None  # layer 0 was decoded at once


@pytest.mark.parametrize("codec", ["raw", "int8", "int4"])
def test_a_damaged_layer_is_not_handed_on_as_it_is(codec):
    lazy = opened(make_entry("text", layers=5, tokens=7), codec, damaged=3)
    assert lazy.coded(slice(0, 2)) is not None
    with pytest.raises(CorruptEntryError, match="layer 3's checksum"):
        lazy.coded(slice(2, 5))
    with pytest.raises(CorruptEntryError, match="layer 3's checksum"):
        lazy.whole()


def test_a_layer_is_read_once_in_whatever_form_it_is_wanted():
    entry = make_entry("text", layers=3)
    taken: list[int] = []
    lazy = taken_by(entry, taken.append)
    wholes: list[LayeredKV] = []
    lazy.on_loaded(lambda found, _: wholes.append(found))
    lazy.load(0)
    lazy.load(1, decoded=False)
    lazy.load(1)
    assert not wholes
    lazy.load(2, decoded=False)
    assert taken == [0, 1, 2]
    assert same(lazy.whole(), entry)
    assert (taken, wholes) == ([0, 1, 2], [lazy])


def test_each_layer_is_taken_once_and_nobody_waits_for_another():
    entry = make_entry("text", layers=3)
    taken: list[int] = []
    go_on = threading.Event()

    def read_layer(layer):
        if layer == 1:
            assert go_on.wait(10)
        taken.append(layer)

    lazy = taken_by(entry, read_layer)
    wholes: list[tuple[LayeredKV, float]] = []
    lazy.on_loaded(lambda *found: wholes.append(found))
    waiting = [threading.Thread(target=lazy.load, args=(1,), daemon=True) for _ in range(3)]
    for thread in waiting:
        thread.start()
    lazy.load(0)
    lazy.load(2)
    assert taken == [0, 2]
    assert not wholes
    go_on.set()
    for thread in waiting:
        thread.join()
    assert taken == [0, 2, 1]
    ((whole, seconds),) = wholes
    assert same(whole.whole(), entry)
    assert seconds > 0


def test_the_first_layers_of_all_entries_come_first():
    order: list[tuple[str, int]] = []
    done = threading.Event()
    entries = []
    for name in "ab":
        entry = make_entry(name, layers=3)

        def read_layer(layer, name=name):
            order.append((name, layer))

        lazy = taken_by(entry, read_layer)
        lazy.on_loaded(lambda entry, _: done.set() if entry.text == "b" else None)
        entries.append(lazy)
    with read_ahead(entries):
        assert done.wait(10)
    assert order == [(name, layer) for layer in range(3) for name in "ab"]


def test_reading_ahead_stops_with_its_block():
    entry = make_entry("text", layers=100)
    taken: list[int] = []
    begun, ends = threading.Event(), threading.Event()

    def read_layer(layer):
        begun.set()
        assert ends.wait(10)
        taken.append(layer)

    with read_ahead([taken_by(entry, read_layer)]):
        assert begun.wait(10)
        threading.Timer(0.1, ends.set).start()
    assert taken == [0]


# ---- stores


def test_loaded_entries_enter_the_tier_and_corrupt_ones_are_deleted(tmp_path):
    below = DiskStore(tmp_path, mapped=False)
    tier = MemoryTier(1 << 20)
    with_tier = tiered(tmp_path, tier)
    put_texts(below, ("good", "bad"), tokens=50)
    path = file_of(below, "bad")
    raw = bytearray(path.read_bytes())
    raw[-50 * 12 - 1] ^= 1  # the last layer's last byte
    path.write_bytes(raw)

    good = with_tier.open("good", FINGERPRINT).entry
    assert isinstance(good, LazyKV)
    good.load(0)
    assert not tier.contains("good", FINGERPRINT)
    good.load(1)
    assert same(tier.get("good", FINGERPRINT).entry, make_entry("good", tokens=50))
    assert with_tier.open("good", FINGERPRINT).entry is tier.get("good", FINGERPRINT).entry

    bad = with_tier.open("bad", FINGERPRINT).entry
    assert bad is not None
    bad.load(0)
    assert below.contains("bad", FINGERPRINT)
    with pytest.raises(CorruptEntryError):
        bad.load(1)
    assert not below.contains("bad", FINGERPRINT)
    assert not tier.contains("bad", FINGERPRINT)
    assert with_tier.open("bad", FINGERPRINT).reason == "absent"
    with_tier.close()


def test_a_chunk_deleted_while_it_loads_does_not_come_back(tmp_path):
    with_tier = tiered(tmp_path)
    with_tier.put(make_entry("text"), replace(FINGERPRINT, codec="int8"))
    lazy = with_tier.open("text", replace(FINGERPRINT, codec="int8")).entry
    assert isinstance(lazy, LazyKV)
    with_tier.delete("text")
    lazy.whole()
    assert not with_tier.tiers[0].contains("text", replace(FINGERPRINT, codec="int8"))
    with_tier.close()


class FarBackend(MemoryBackend):
    """Answers after a while, and counts the reads of entries that wait at once.

    Attributes
    ----------
    together
        Reads of entries wait until so many have come.
    """

    remote = True

    def __init__(self) -> None:
        super().__init__()
        self.changed = threading.Condition()
        self.waiting = self.most = self.together = 0
        self.seconds = 0.0

    def get_many(self, keys: Iterable[str]) -> Iterator[Blob | None]:
        names = list(keys)
        if any(name.startswith("kv/") for name in names):
            with self.changed:
                self.waiting += 1
                self.most = max(self.most, self.waiting)
                self.changed.notify_all()
                assert self.changed.wait_for(lambda: self.most >= self.together, 30)
            time.sleep(self.seconds)
            with self.changed:
                self.waiting -= 1
        return super().get_many(names)


def test_the_way_from_below_counts_as_loading():
    backend = FarBackend()
    below = ChunkStore(backend, mapped=False)
    with_tier = tiered(backend)
    texts = ["a", "b", "c"]
    put_texts(below, texts)
    backend.seconds = 0.05
    began = time.perf_counter()
    for text in texts:
        opened = with_tier.open(text, FINGERPRINT).entry
        assert opened is not None
        opened.whole()
    took = time.perf_counter() - began
    taken = with_tier.load_rate.seconds(make_entry("a").nbytes)
    assert taken is not None
    assert 0.05 < taken < took
    with_tier.close()


# ---- requests


@pytest.mark.parametrize("prefetched", [False, True])
def test_chunks_that_are_far_come_side_by_side(make_engine, monkeypatch, *, prefetched):
    backend = FarBackend()

    def make_store(*_, **__):
        return tiered(backend, 1 << 26)

    monkeypatch.setattr("ragkv.engine.engine.open_store", make_store)
    chunks = some_chunks(6)
    make_engine().precompute(chunks)
    backend.seconds, backend.together = 0.2, len(chunks)
    engine = make_engine()
    if prefetched:
        engine.prefetch(chunks)
        engine.wait()
        assert backend.most == len(chunks)
        backend.most = backend.together = 0
    report = engine.prefill(ask(chunks)).report
    assert len(report.chunks) == len(chunks)
    assert backend.most == (0 if prefetched else len(chunks))
    assert prefetched or report.steps["load"] >= 0.2


@pytest.mark.parametrize("damaged", [False, True])
def test_nothing_keeps_an_entry_after_its_request(tmp_path, monkeypatch, *, damaged):
    """A folder must be free to be unmounted, and memory to be used again, without ``gc``."""
    chunks = some_chunks(3)
    with RagKV(tiny_model(), tiny_tokenizer(), store=tmp_path) as engine:
        engine.precompute(chunks)
    if damaged:
        damage(tmp_path, chunks[1], 2)
    alive: list[weakref.ref[LazyKV]] = []
    made = LazyKV.__init__

    def note(self, *args, **kwargs):
        made(self, *args, **kwargs)
        alive.append(weakref.ref(self))

    monkeypatch.setattr(LazyKV, "__init__", note)
    gc.disable()
    try:
        store = StoreConfig(path=tmp_path, memory_bytes=0, history_bytes=0)
        with RagKV(tiny_model(), tiny_tokenizer(), store=store) as engine:
            engine.generate(ask(chunks), max_new_tokens=2, on_miss="skip")
            engine.prefill(ask(chunks), on_miss="skip")
            assert len(alive) == (3 + 2 + 2 if damaged else 3 + 3)
            assert not any(entry() for entry in alive)
    finally:
        gc.enable()


def test_a_chunk_that_stands_twice_is_loaded_once(tmp_path):
    first, second = some_chunks(2)
    with RagKV(tiny_model(), tiny_tokenizer(), store=tmp_path) as engine:
        engine.precompute([first, second])
    with RagKV(tiny_model(), tiny_tokenizer(), store=tmp_path) as engine:
        loaded: list[str] = []
        store = engine._reuse.corpus.store
        kept = store.open
        store.open = lambda text, fingerprint: loaded.append(text) or kept(text, fingerprint)
        report = engine.prefill(ask([first, second, first])).report
        assert [use.text for use in report.chunks] == [first, second, first]
        assert loaded == [first, second]


def damage(folder: Path, chunk: str, layer: int) -> None:
    """Turn a bit of one layer of the chunk's entry."""
    for path in folder.rglob("*.safetensors"):
        raw = bytearray(path.read_bytes())
        header = 8 + int.from_bytes(raw[:8], "little")
        words = max(re.findall("[a-z ]+", chunk), key=len)
        if words.encode() not in raw[:header]:
            continue
        tokens = (len(raw) - header) // (LAYERS * 2 * 2 * 16 * 4 + 12)
        raw[header + layer * tokens * 2 * 2 * 16 * 4 + 5] ^= 1
        path.write_bytes(raw)
        return
    raise AssertionError("the chunk is not stored")


@pytest.mark.parametrize("layer", [0, LAYERS - 1])
@pytest.mark.parametrize("memory", [0, 1 << 24])
@pytest.mark.parametrize("way", ["prefill", "generate", "stream"])
def test_a_layer_that_is_lost_on_the_way_costs_its_chunk_and_nothing_else(
    tmp_path, layer, memory, way
):
    first, second, third = some_chunks(3)
    prompt = ask([first, second, third])
    store = StoreConfig(path=tmp_path / "damaged", memory_bytes=memory)
    fresh = StoreConfig(path=tmp_path / "fresh")
    with RagKV(tiny_model(), tiny_tokenizer(), store=fresh) as engine:
        engine.precompute([first, second, third])
        engine.forget(second)
        expected = engine.prefill(prompt, on_miss="skip").logits
        answer = engine.generate(prompt, max_new_tokens=6, on_miss="skip")
    with RagKV(tiny_model(), tiny_tokenizer(), store=store) as engine:
        engine.precompute([first, second, third])
    damage(tmp_path / "damaged", second, layer)
    with RagKV(tiny_model(), tiny_tokenizer(), store=store) as engine:
        if way == "prefill":
            out = engine.prefill(prompt)
            report = out.report
            assert torch.equal(out.logits, expected)
        elif way == "generate":
            completion = engine.generate(prompt, max_new_tokens=6)
            report = completion.report
            assert completion.token_ids == answer.token_ids
        else:
            stream = engine.stream(prompt, max_new_tokens=6)
            assert "".join(stream) == answer.text
            report = stream.completion.report
        assert [(miss.chunk, miss.reason) for miss in report.misses] == [(second[:80], "checksum")]
        assert [use.text for use in report.chunks] == [first, third]
        assert sum(report.steps.values()) == pytest.approx(report.ttft_s)
        engine.wait()  # it is encoded again
        assert len(engine.prefill(prompt).report.chunks) == 3


def test_layers_are_placed_as_they_are_wanted(make_engine, monkeypatch):
    monkeypatch.setattr(place, "_LAYERS_AT_ONCE", 1)
    engine = make_engine()
    chunks = some_chunks(2)
    engine.precompute(chunks)
    awaited: list[list[bool]] = []

    def look(*_):
        cache = engine_cache[0]
        awaited.append([layer.awaited is not None for layer in cache.layers])

    engine_cache: list[object] = []
    hooks = [
        layer.register_forward_pre_hook(
            lambda _, args, given: engine_cache.append(cache_in(given)) or look(),
            with_kwargs=True,
        )
        for layer in engine.loaded.model.model.layers
    ]
    try:
        engine.prefill(ask(chunks), method="reuse", recompute_ratio=0.0)
    finally:
        for hook in hooks:
            hook.remove()
    assert awaited == [[index >= before for index in range(LAYERS)] for before in range(LAYERS)]


def test_a_step_within_a_step_is_counted_once(monkeypatch):
    ticks = SimpleNamespace(perf_counter=itertools.count().__next__)
    monkeypatch.setattr("ragkv.engine.plan.time", ticks)
    clock = Clock()
    with clock.step("outer"):
        with clock.step("inner"):
            pass
        with clock.step("inner"), clock.step("innermost"):
            pass
    assert clock.steps == {"outer": 3, "inner": 1 + 2, "innermost": 1}
