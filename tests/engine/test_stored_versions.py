"""Versions of chunks outlive their engine, in the store, and go with the chunks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from store_entries import without_syncs  # noqa: F401
from tiny import ask, some_chunks
from unshared import QUERY

from ragkv import RagKV, ReuseConfig, StoreConfig
from ragkv.engine.stream import Prefilled
from ragkv.errors import ConfigError, StoreFullError
from ragkv.store.versions.stored import StoredVersions
from ragkv.store.versions.version import Version

pytestmark = pytest.mark.usefixtures("without_syncs")
Make = Callable[..., RagKV]
A, B, C = (f"Part {text} End." for text in some_chunks(3))
ON = ReuseConfig(method=QUERY)
USED = ["entry", "version", "version"]


@pytest.fixture
def make(make_engine: Make, tmp_path: Path) -> Make:
    def made(**given: Any) -> RagKV:
        store = StoreConfig(tmp_path / "store")
        return make_engine(**{"reuse": ON, "store": store, **given})

    return made


def kept(engine: RagKV) -> list[Version]:
    return [each.version for each in engine._reuse.versions.kept._all()]


def sources(out: Prefilled) -> list[str]:
    return [use.source for use in out.report.chunks]


def captured(engine: RagKV) -> RagKV:
    """Have the versions of B behind A, and of C behind both, computed."""
    engine.precompute([A, B, C], document="handbook")
    engine.prefill(ask([A, B, C]))
    engine.wait()
    return engine


def test_versions_outlive_their_engine(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with captured(make()) as engine:
        warm = engine.prefill(ask([A, B, C]))
    assert sources(warm) == USED
    monkeypatch.setattr("ragkv.engine.versions.compute_versions", _fail)
    out = make().prefill(ask([A, B, C]))
    assert sources(out) == USED
    assert torch.equal(out.logits, warm.logits)


def test_rows_that_memory_has_no_room_for_are_read_again(make: Make, tmp_path: Path) -> None:
    with captured(make()) as engine:
        largest = max(each.nbytes for each in kept(engine))
        cold = engine.prefill(ask([A, B, C]))
    small = StoreConfig(tmp_path / "store", history_bytes=largest + 8192)
    engine = make(store=small)
    for _ in range(3):
        out = engine.prefill(ask([A, B, C]))
        assert sources(out) == USED
        assert torch.equal(out.logits, cold.logits)
    assert engine._reuse.versions.kept.nbytes <= largest + 8192
    assert sum(each.entry is not None for each in kept(engine)) == 1


@pytest.mark.parametrize("gone", [A, B])
@pytest.mark.parametrize("by_other", [False, True], ids=["here", "by another process"])
def test_a_deleted_chunk_is_in_no_answer_and_on_no_disk(
    make: Make, gone: str, by_other: bool
) -> None:
    engine, other = captured(make()), make()
    below = engine._store
    assert len(list(below.backend.scan("version/"))) == 2
    (other if by_other else engine).forget(gone)
    out = engine.prefill(ask([A, B, C]), on_miss="skip")
    assert sources(out) == ["entry", "entry"]
    assert list(below.backend.scan("version/")) == []


def test_namespaces_share_no_version(make: Make) -> None:
    one, other = captured(make(namespace="one")), make(namespace="other")
    other.precompute([A, B, C])
    assert sources(one.prefill(ask([A, B, C]))) == USED
    assert sources(other.prefill(ask([A, B, C]))) == ["entry"] * 3


def test_a_read_only_store_and_a_full_one_keep_versions_in_memory(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StoredVersions, "put", _full)
    with captured(make()) as engine:
        assert sources(engine.prefill(ask([A, B, C]))) == USED
    monkeypatch.setattr(StoredVersions, "put", _fail)
    reader = make(store=StoreConfig(tmp_path / "store", read_only=True))
    reader.prefill(ask([A, B, C]))
    reader.wait()
    assert sources(reader.prefill(ask([A, B, C]))) == USED


def test_what_was_for_neighbours_is_refused(make: Make) -> None:
    with pytest.raises(ConfigError, match=r"neighbours is no setting.*method='cachecraft'"):
        make().precompute([A], neighbours={A: [B]})


def _fail(*_: object, **__: object) -> None:
    raise AssertionError("nothing is computed or written here")


def _full(*_: object, **__: object) -> None:
    raise StoreFullError("no room")
