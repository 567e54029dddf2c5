"""Versions from ingestion: each chunk is also computed behind the chunks before it."""

import healed_runs as runs
import numpy as np
import pytest
import torch
from healed_runs import A, B, C, D
from store_entries import without_syncs  # noqa: F401
from tiny import FAMILIES, some_chunks

from ragkv import ReuseConfig, StoreConfig
from ragkv.engine import healing
from ragkv.errors import ConfigError, StoreFullError
from ragkv.store.stored_versions import StoredVersions

make_engine = runs.make_engine
on_disk = runs.on_disk
pytestmark = runs.pytestmark
CONTEXTS = {(D, A), (D, A, B), (D, A, B, C), (B, C, D)}


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma2", "gpt-oss"])
def test_versions_are_those_of_a_healed_run(make_engine, family):
    ingesting, asked = make_engine(family), runs.ingested(make_engine(family))
    report = ingesting.precompute([A, B, C, D], neighbours=True)
    assert (report.new, report.versions) == (4, 4)
    assert runs.contexts(ingesting) == CONTEXTS
    runs.healed(asked, [D, A, B, C], [B, C, D])
    of_healing = {(*each.prefix, each.text): each for each in runs.versions(asked)}
    for found in runs.versions(ingesting):
        expected = of_healing[*found.prefix, found.text]
        assert (found.path, found.first) == (expected.path, expected.first)
        np.testing.assert_allclose(found.inter, expected.inter, rtol=1e-4, atol=1e-6)
        assert found.impact == pytest.approx(expected.impact, rel=1e-4)
        rows, others = (each._reuse.versions._rows_of(found) for each in (ingesting, asked))
        torch.testing.assert_close(rows.keys, others.keys, atol=5e-5, rtol=1e-3)
        torch.testing.assert_close(rows.values, others.values, atol=5e-5, rtol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_ratio_1_is_a_full_prefill_whatever_version_is_placed(make_engine, family):
    engine = make_engine(family)
    engine.precompute([A, B, C, D], neighbours=True)
    for chunks in ([A, B, D, C], [C, A, B]):
        out = runs.once_more(engine, chunks, recompute_ratio=1.0)
        assert runs.sources(out) == ["entry"] + ["version"] * (len(chunks) - 1)
        assert runs.distance(engine, out) < runs.TOLERANCE


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_another_process_takes_them_and_computes_none_again(on_disk, tmp_path, monkeypatch, codec):
    store = StoreConfig(tmp_path / "store", codec=codec)
    with on_disk(store=store) as engine:
        report = engine.precompute([A, B, C], neighbours=True)
        assert report.versions == len(runs.stored(engine)) == 3
        folder = [path.stat().st_size for path in store.path.rglob("*") if path.is_file()]
        assert 0.9 * report.bytes < sum(folder) < 1.5 * report.bytes + 200_000
        assert engine._reuse.history.in_use()[0].nbytes == 0
    other = on_disk(store=store)
    out = runs.once_more(other, [B, A, C])
    assert runs.sources(out) == ["entry", "version", "version"]
    assert runs.distance(other, out) < runs.distance(
        other, runs.once_more(other, [B, A, C], history=False)
    )
    report = other.precompute([A, B, C, D], neighbours=True)
    assert (report.new, report.existing, report.versions) == (1, 3, 1)
    monkeypatch.setattr(healing, "repair_forward", runs.fail)
    assert other.precompute([A, B, C, D], neighbours=True).versions == 0


def test_windows_shrink_to_what_fits(make_engine, monkeypatch):
    chunks, engine = some_chunks(5), make_engine()
    tokens = len(engine.tokenize(chunks[0]))
    monkeypatch.setattr(healing, "_WINDOW_TOKENS", 3 * tokens)
    assert engine.precompute(chunks, neighbours=True).versions == 5
    assert {len(each.prefix) for each in runs.versions(engine)} <= {1, 2}
    monkeypatch.setattr(healing, "_WINDOW_TOKENS", tokens)
    other = make_engine()
    assert other.precompute(chunks, neighbours=True).versions == 0
    assert other.precompute(chunks[:1], neighbours=True).versions == 0


def test_short_and_repeated_chunks_are_left_out(make_engine):
    engine = make_engine()
    report = engine.precompute([A, "short", A, B], neighbours=True)
    assert (report.new, report.skipped, report.versions) == (2, 1, 2)
    assert runs.contexts(engine) == {(B, A), (A, B)}


def test_what_keeps_no_versions_is_refused_before_anything_is_encoded(make_engine):
    without = make_engine(reuse=ReuseConfig(history=False))
    for engine, given in (
        (without, {}),
        (make_engine(), {"method": "full"}),
        (make_engine(store=StoreConfig(":memory:", history_bytes=0)), {}),
    ):
        with pytest.raises(ConfigError, match="neighbours=True needs"):
            engine.precompute([A, B], neighbours=True, **given)
        assert not engine.contains(A)


def test_a_full_store_ends_the_call_and_keeps_the_rest(on_disk, monkeypatch):
    engine, put = on_disk(), StoredVersions.put

    def once(self, version, rows):
        monkeypatch.setattr(StoredVersions, "put", runs.store_full)
        return put(self, version, rows)

    monkeypatch.setattr(StoredVersions, "put", once)
    with pytest.raises(StoreFullError):
        engine.precompute([A, B, C], neighbours=True)
    monkeypatch.setattr(StoredVersions, "put", put)
    with on_disk() as other:
        assert all(map(other.contains, [A, B, C]))
        assert other.precompute([A, B, C], neighbours=True).versions == 2


def test_a_prompt_is_answered_between_two_windows(make_engine, monkeypatch):
    engine, asked = make_engine(), []
    run = engine._reuse.corpus.passes.run

    def interrupted(compute):
        asked.append(runs.once_more(engine, [B, A]))  # their first window computes these rows
        return run(compute)

    engine.precompute([A, B])
    monkeypatch.setattr(engine._reuse.corpus.passes, "run", interrupted)
    assert engine.precompute([A, B], neighbours=True).versions == 2
    assert runs.sources(asked[0]) == ["entry", "entry"]
    runs.assert_exact(engine, asked[-1])
