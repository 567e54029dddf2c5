"""Engines whose runs are healed, and what they have then."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from exact import reference
from store_entries import without_syncs  # noqa: F401
from tiny import ask, some_chunks

from ragkv import Completion, RagKV, ReuseConfig, StoreConfig
from ragkv.engine.healing import Healing
from ragkv.engine.stream import Prefilled
from ragkv.errors import StoreFullError
from ragkv.store.version import Version

pytestmark = pytest.mark.usefixtures("without_syncs")
Make = Callable[..., RagKV]
CHUNKS = A, B, C, D = [f"Part {text} End." for text in some_chunks(4)]
TOLERANCE = 5e-5
LAYERS = 4
IDLE = "ragkv-idle"


@pytest.fixture
def make_engine(make_engine: Make) -> Make:
    """Make engines that use history, unlike those of other tests."""
    return lambda *family, **given: make_engine(*family, **{"reuse": ReuseConfig(), **given})


@pytest.fixture
def on_disk(make_engine: Make, tmp_path: Path) -> Make:
    def made(**given: Any) -> RagKV:
        return make_engine(**{"store": StoreConfig(tmp_path / "store"), **given})

    return made


def healed(engine: RagKV, *runs: list[str], **given: Any) -> RagKV:
    """Ask for runs twice, and wait until they are computed."""
    for chunks in runs:
        for question in ("\n\nWhat now?", "\n\nAnd then?"):
            engine.prefill(ask(chunks, question), **given)
        engine.wait()
    return engine


def ingested(engine: RagKV, chunks: list[str] = CHUNKS) -> RagKV:
    engine.precompute(chunks)
    return engine


def once_more(engine: RagKV, chunks: list[str], **given: Any) -> Prefilled:
    return engine.prefill(ask(chunks, "\n\nWhy so?"), **{"on_miss": "skip", **given})


def versions(engine: RagKV) -> list[Version]:
    by_chunk = engine._reuse.versions.kept._by_chunk.values()
    return sorted((each.version for own in by_chunk for each in own), key=lambda v: len(v.prefix))


def contexts(engine: RagKV) -> set[tuple[str, ...]]:
    return {(*each.prefix, each.text) for each in versions(engine)}


def stored(engine: RagKV) -> list[str]:
    return [key.name for key in engine._store.backend.scan("version/")]


def healing(engine: RagKV) -> Healing:
    return engine._reuse.healing


def sources(out: Prefilled | Completion) -> list[str]:
    return [use.source for use in out.report.chunks]


def distance(engine: RagKV, out: Prefilled) -> float:
    return float((out.logits - reference(engine, out.token_ids)).abs().max())


def assert_exact(engine: RagKV, out: Prefilled) -> None:
    report = out.report
    assert sources(out) == ["history"] * len(report.chunks)
    assert report.chunks[-1].end <= report.tokens.sink + report.tokens.history_exact
    assert report.tokens.recomputed == report.tokens.reused == 0
    assert distance(engine, out) < TOLERANCE


def fail(*_: object, **__: object) -> None:
    raise AssertionError("nothing is computed or written here")


def store_full(*_: object, **__: object) -> None:
    raise StoreFullError("no room")
