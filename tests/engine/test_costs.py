"""What prefills cost is measured once for a store, a model and a machine."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import ask, some_chunks

from ragkv import RagKV, StoreConfig
from ragkv.engine import costs
from ragkv.model import machine
from ragkv.store.tiers.costs import CostTable

Make = Callable[..., RagKV]
FOUND = CostTable((0,), (16, 64), ((0.25, 0.5),))
MEASURE = costs.PrefillCosts.measure


@pytest.fixture(autouse=True)
def _in_short(_nothing_measured: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs.PrefillCosts, "measure", MEASURE)
    monkeypatch.setattr(costs, "BUDGET_S", 0.0)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Measure nothing; note the models for which it was to be done."""
    models: list[object] = []

    def note(loaded: object, *_: object, **__: object) -> CostTable:
        models.append(loaded)
        return FOUND

    monkeypatch.setattr(costs, "measure_costs", note)
    return models


def use(engine: RagKV) -> object:
    """Ingest and answer; return the costs that are known then."""
    engine.precompute(some_chunks(2))
    engine.wait()
    engine.generate("\n\n".join(some_chunks(2)), max_new_tokens=1)
    engine.wait()
    return engine._reuse.corpus.costs


def test_the_knowledge_tree_is_ranked_by_them(make_engine: Make, measured: list[object]) -> None:
    """In seconds, as what comes later is: before, every token counted 1."""
    engine = make_engine()
    costs_of = engine._reuse.background._costs
    costs_of._wanted = False
    for question in ("Why?", "Why not?"):
        engine.generate(ask(some_chunks(2), question), max_new_tokens=4)
        engine.wait()
    tree = engine._reuse.conversations._tree
    assert tree._policy._ranks
    assert all(rank[0] >= 1 for rank in tree._policy._ranks.values())
    costs_of.measure()
    assert measured
    assert all(rank[0] < 1 for rank in tree._policy._ranks.values())
    for node, record in tree._policy._records.items():
        assert record.seconds == FOUND(node.start, record.tokens)


def files(folder: Path) -> list[Path]:
    return list((folder / "costs").glob("*"))


def test_measured_once_and_read_at_the_second_opening(
    make_engine: Make, measured: list[object], tmp_path: Path
) -> None:
    first = make_engine(store=str(tmp_path))
    assert first._reuse.corpus.costs is None
    assert use(first) == FOUND
    assert len(measured) == 1
    assert len(files(tmp_path)) == 1
    second = make_engine(store=StoreConfig(tmp_path), namespace="another")
    assert second._reuse.corpus.costs == FOUND
    assert second._store.memory._costs == FOUND
    assert use(second) == FOUND
    assert len(measured) == 1
    make_engine("qwen3", store=str(tmp_path)).precompute(some_chunks(1))
    assert len(measured) == 2


@pytest.mark.parametrize("seconds", [[["x"]], [[0.1, float("nan")]], [[0.1, -1.0]]])
@pytest.mark.parametrize("damage", ["cut", "list", "foreign", "seconds"])
def test_a_damaged_file_is_measured_again(
    make_engine: Make, measured: list[object], tmp_path: Path, damage: str, seconds: object
) -> None:
    use(make_engine(store=str(tmp_path)))
    (file,) = files(tmp_path)
    found = json.loads(file.read_text())
    file.write_text(
        {
            "cut": file.read_text()[:-20],
            "list": "[]",
            "foreign": json.dumps({**found, "device": "another, 64 threads"}),
            "seconds": json.dumps({**found, "costs": {**found["costs"], "seconds": seconds}}),
        }[damage]
    )
    engine = make_engine(store=str(tmp_path))
    assert engine._reuse.corpus.costs is None
    assert use(engine) == FOUND
    assert len(measured) == 2
    assert json.loads(file.read_text()) == found


def test_another_machine_or_thread_count_is_measured(
    make_engine: Make,
    measured: list[object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(make_engine(store=str(tmp_path)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 128)
    use(make_engine(store=str(tmp_path)))
    monkeypatch.setattr(machine, "_processor", lambda: "another")
    use(make_engine(store=str(tmp_path)))
    assert len(measured) == len(files(tmp_path)) == 3


def test_a_read_only_store_is_read_and_not_written(
    make_engine: Make, measured: list[object], tmp_path: Path
) -> None:
    store = StoreConfig(tmp_path, read_only=True)
    make_engine(store=StoreConfig(tmp_path, costs=lambda _, new: new)).precompute(some_chunks(2))
    assert use(make_engine(store=store)) == FOUND
    assert files(tmp_path) == []
    use(make_engine(store=str(tmp_path)))
    assert use(make_engine(store=store)) == FOUND
    assert len(measured) == 2


def test_a_store_without_a_folder_keeps_them_in_memory(
    make_engine: Make, measured: list[object], tmp_path: Path
) -> None:
    for _ in range(2):
        assert use(make_engine(store=StoreConfig(":memory:"))) == FOUND
    assert len(measured) == 2
    assert files(tmp_path) == []


def test_a_mere_rate_is_measured_again_the_next_time(make_engine: Make, tmp_path: Path) -> None:
    """There was no time for more: ``BUDGET_S`` is 0 here."""
    costs = use(make_engine(store=str(tmp_path)))
    assert isinstance(costs, CostTable)
    assert costs.is_flat
    assert files(tmp_path) == []


def test_the_users_own_win(make_engine: Make, measured: list[object], tmp_path: Path) -> None:
    use(make_engine(store=str(tmp_path)))

    def own(_: int, new: int) -> float:
        return 7.0 * new

    engine = make_engine(store=StoreConfig(tmp_path, costs=own))
    assert use(engine) is own
    assert engine._store.memory._costs is own
    assert len(measured) == 1


def test_a_file_that_cannot_be_written_is_logged(
    make_engine: Make, measured: list[object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "costs").write_text("a file")
    assert use(make_engine(store=str(tmp_path))) == FOUND
    assert measured
    assert "were not kept" in caplog.text


def test_it_ends_when_the_engine_closes(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """After the pass under way."""
    monkeypatch.setattr(costs, "BUDGET_S", 1e9)
    monkeypatch.setattr(costs, "PASS_S", 1e9)
    monkeypatch.setattr(costs, "CACHED", (0, *range(1, 2000)))
    engine = make_engine(store=str(tmp_path))
    began = threading.Event()
    entered = costs.PrefillCosts._turn

    def begin(self: costs.PrefillCosts) -> object:
        began.set()
        return entered(self)

    monkeypatch.setattr(costs.PrefillCosts, "_turn", begin)
    engine.precompute(some_chunks(1))
    assert began.wait(30)
    engine.close()
    assert files(tmp_path) == []


def test_requests_go_between_the_passes(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has the model stops the measuring, and not the other way round."""
    monkeypatch.setattr(costs, "BUDGET_S", 1e9)
    monkeypatch.setattr(costs, "PASS_S", 1e9)
    engine = make_engine()
    with engine.turn():
        engine.precompute(some_chunks(1))
        engine.generate("What now?", max_new_tokens=2)
        assert engine._reuse.corpus.costs is None
    engine.wait()
    table = engine._reuse.corpus.costs
    assert isinstance(table, CostTable)
    assert (table.cached, table.new) == (costs.CACHED, costs.NEW)
