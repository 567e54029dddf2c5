"""Chunks encoded behind their neighbours, and versions that outlive their engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from store_entries import without_syncs  # noqa: F401
from tiny import FAMILIES, ask, some_chunks, tiny_model
from transformers.cache_utils import DynamicCache

from ragkv import RagKV, ReuseConfig, StoreConfig
from ragkv.engine.stream import Prefilled
from ragkv.errors import ConfigError, StoreFullError
from ragkv.model.calls import cache_argument
from ragkv.model.rotary import rotate
from ragkv.retrieve.neighbours import nearest
from ragkv.store import ChunkStore
from ragkv.store.versions.version import Version

pytestmark = pytest.mark.usefixtures("without_syncs")
Make = Callable[..., RagKV]
A, B, C, D = (f"Part {text} End." for text in some_chunks(4))
ON = ReuseConfig(contextual_versions=True)
ALONE = ReuseConfig(contextual_versions="neighbours")


@pytest.fixture
def make(make_engine: Make, tmp_path: Path) -> Make:
    def made(family: str = "llama", **given: Any) -> RagKV:
        store = StoreConfig(tmp_path / "store", prefix_bytes=0)
        return make_engine(family, **{"reuse": ON, "store": store, **given})

    return made


def kept(engine: RagKV) -> list[Version]:
    return [each.version for each in engine._reuse.versions.kept._all()]


def sources(out: Prefilled) -> list[str]:
    return [use.source for use in out.report.chunks]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_chunk_has_the_rows_of_a_prefill_behind_its_neighbours(make: Make, family: str) -> None:
    engine = make(family, store=StoreConfig(":memory:", prefix_bytes=0))
    report = engine.precompute([A, B, C], neighbours={C: [A, f" {B} "]})
    assert (report.new, report.versions) == (3, 1)
    (version,) = kept(engine)
    assert (version.text, version.prefix, version.by_neighbours) == (C, (A, B), True)
    corpus = engine._reuse.corpus
    sink = corpus.sink_for(engine.reuse, engine._configured({})[1])
    ids = [*sink.ids.tolist()]
    for text in (A, B, C):
        ids += corpus.get(text, sink).entry.token_ids.tolist()
    cache, rows = DynamicCache(), slice(len(ids) - len(version.ranks), len(ids))
    with torch.no_grad():
        model = tiny_model(family)
        model(torch.tensor([ids]), **cache_argument(model, cache))
    loaded, entry = engine.loaded, version.entry
    kinds = loaded.architecture.rope_kinds
    tables = loaded.rotary.tables(kinds, torch.arange(rows.start, rows.stop))
    for at, kind in enumerate(kinds):
        keys = rotate(entry.keys[at], tables[kind])
        torch.testing.assert_close(keys, cache.layers[at].keys[0, :, rows], atol=5e-5, rtol=1e-3)
        values = cache.layers[at].values[0, :, rows]
        torch.testing.assert_close(entry.values[at], values, atol=5e-5, rtol=1e-3)


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral-window"])
def test_it_is_placed_behind_any_chunk_and_exact_at_ratio_1(make: Make, family: str) -> None:
    engine = make(family, reuse=ALONE)
    engine.precompute([A, B, C, D], neighbours={text: [D] for text in (A, B, C)})
    out = engine.prefill(ask([A, B, C]), recompute_ratio=1.0)
    assert sources(out) == ["entry", "version", "version"]
    with torch.no_grad():
        full = engine.model(torch.tensor([out.token_ids])).logits[0, -1]
    assert float((out.logits - full).abs().max()) < 5e-5
    epic = engine.prefill(ask([A, B, C]), method="epic")
    assert sources(epic) == ["entry"] * 3
    engine.wait()
    assert len(kept(engine)) == 3  # the prompts asked for none
    off = engine.prefill(ask([A, B, C]), contextual_versions=False)
    assert sources(off) == ["entry"] * 3


def test_what_a_prompt_left_serves_it_better(make: Make) -> None:
    engine = make()
    engine.precompute([A, B, C], neighbours={B: [C]})
    assert sources(engine.prefill(ask([A, B]))) == ["entry", "version"]
    engine.wait()
    (by_prompt,) = (each for each in kept(engine) if not each.by_neighbours)
    assert by_prompt.prefix == (A,)
    engine.prefill(ask([A, B]))
    uses = {each.version.prefix: each.uses for each in engine._reuse.versions.kept._all()}
    assert uses[(A,)] > 1


def test_versions_outlive_their_engine(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with make() as engine:
        engine.precompute([A, B, C, D], neighbours={D: [B, C]})
        engine.prefill(ask([A, B, C]))
        engine.wait()
        warm = engine.prefill(ask([A, B, C]))
        behind = engine.prefill(ask([A, D]))
        engine.wait()
    assert sources(warm) == ["entry", "version", "version"]
    later = make()
    monkeypatch.setattr("ragkv.engine.versions.compute_versions", _fail)
    out = later.prefill(ask([A, B, C]))
    assert sources(out) == sources(warm)
    assert torch.equal(out.logits, warm.logits)
    assert sources(later.prefill(ask([C, D]))) == ["entry", "version"]
    assert sources(behind) == ["entry", "version"]
    report = later.precompute([A, B, C, D], neighbours={D: [B, C]})
    assert (report.new, report.versions) == (0, 0)


def test_rows_that_memory_has_no_room_for_are_read_again(make: Make, tmp_path: Path) -> None:
    with make(reuse=ALONE) as engine:
        engine.precompute([A, B, C, D], neighbours={B: [D], C: [D]})
        largest = max(each.nbytes for each in kept(engine))
        cold = engine.prefill(ask([A, B, C]))
    small = StoreConfig(tmp_path / "store", prefix_bytes=0, version_bytes=largest + 8192)
    engine = make(store=small, reuse=ALONE)
    for _ in range(3):
        out = engine.prefill(ask([A, B, C]), on_miss="skip")
        assert sources(out) == ["entry", "version", "version"]
        assert torch.equal(out.logits, cold.logits)
    assert engine._reuse.versions.kept.nbytes <= largest + 8192
    assert sum(each.entry is not None for each in kept(engine)) == 1


@pytest.mark.parametrize("gone", [B, C])
@pytest.mark.parametrize("by_other", [False, True], ids=["here", "by another process"])
def test_a_deleted_neighbour_is_in_no_answer_and_on_no_disk(
    make: Make, gone: str, by_other: bool
) -> None:
    engine, other = make(reuse=ALONE), make()
    engine.precompute([A, B, C, D], neighbours={D: [B, C]})
    assert sources(engine.prefill(ask([A, D]))) == ["entry", "version"]
    (other if by_other else engine).forget(gone)
    assert sources(engine.prefill(ask([A, D]))) == ["entry", "entry"]
    assert by_other or kept(engine) == []
    below = engine._store
    while not isinstance(below, ChunkStore):
        below = below.below
    assert list(below.backend.scan("version/")) == []


def test_namespaces_share_no_version(make: Make) -> None:
    one, other = make(namespace="one"), make(namespace="other")
    for engine in (one, other):
        engine.precompute([A, B, C])
    one.precompute([], neighbours={B: [C]})
    assert sources(one.prefill(ask([A, B]))) == ["entry", "version"]
    assert sources(other.prefill(ask([A, B]))) == ["entry", "entry"]


def test_what_cannot_be_behind_is_left_out(make: Make) -> None:
    engine = make()
    report = engine.precompute([A, B], neighbours={A: [A, B], B: ["unknown"], "other": [A], C: []})
    assert report.versions == 0
    assert kept(engine) == []


def test_a_read_only_store_and_a_full_one_keep_versions_in_memory(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make() as engine:
        engine.precompute([A, B, C])
        monkeypatch.setattr(ChunkStore, "put_version", _full)
        assert engine.precompute([], neighbours={B: [C]}).versions == 1
        assert sources(engine.prefill(ask([A, B]))) == ["entry", "version"]
    read_only = StoreConfig(tmp_path / "store", prefix_bytes=0, read_only=True)
    monkeypatch.setattr(ChunkStore, "put_version", _fail)
    reader = make(store=read_only)
    reader._reuse.versions.encode_behind({B: [C]}, _sink(reader))
    assert sources(reader.prefill(ask([A, B]))) == ["entry", "version"]


@pytest.mark.parametrize("wrong", [[A], {A: B}, {A: [1]}, {1: [A]}, "text"])
def test_wrong_neighbours_are_refused(make: Make, wrong: Any) -> None:
    with pytest.raises(ConfigError):
        make().precompute([A, B], neighbours=wrong)


def test_they_need_the_setting_that_places_them(make: Make) -> None:
    engine = make(reuse=ReuseConfig())
    with pytest.raises(ConfigError, match="contextual_versions"):
        engine.precompute([A, B], neighbours={A: [B]})


# ---- which chunks are similar


def test_nearest_is_the_cosine_in_plain_loops() -> None:
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(1500, 8))
    names = [f"text {number}" for number in range(1500)]
    found = nearest(names, vectors, 3)
    unit = vectors / np.linalg.norm(vectors, axis=1)[:, None]
    for at in (0, 7, 1100, 1499):
        others = sorted((n for n in range(1500) if n != at), key=lambda n: -unit[at] @ unit[n])
        assert found[names[at]] == [names[n] for n in others[:3]][::-1]


def test_few_texts_have_few_neighbours_and_none_is_its_own() -> None:
    assert nearest([A, B, A], [[1, 0], [0, 1], [1, 1]], 5) == {A: [B], B: [A]}
    assert nearest([A], [[0.0]], 2) == {A: []}
    assert nearest([], np.zeros((0, 4)), 2) == {}


@pytest.mark.parametrize(
    ("vectors", "count"),
    [([[1.0]], 1), ([1.0, 2.0], 1), ([[1.0], [float("nan")]], 1), ([["x"], ["y"]], 1)]
    + [([[1.0], [2.0]], count) for count in (0, -1, 1.5, True)],
)
def test_wrong_vectors_are_refused(vectors: Any, count: Any) -> None:
    with pytest.raises(ConfigError):
        nearest([A, B], vectors, count)


def _sink(engine: RagKV) -> Any:
    return engine._reuse.corpus.sink_for(engine.reuse, engine._configured({})[1])


def _fail(*_: object, **__: object) -> None:
    raise AssertionError("nothing is computed or written here")


def _full(*_: object, **__: object) -> None:
    raise StoreFullError("no room")
