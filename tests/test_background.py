"""What an engine remembers of the chunks that were named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from threads import each_in_a_thread
from tiny import some_chunks

from ragkv import RagKV
from ragkv.background import MOST_NAMED

Make = Callable[..., RagKV]


def test_what_the_store_has_needs_no_remembering(make_engine: Make) -> None:
    engine, chunks = make_engine(), some_chunks(3)
    engine.precompute(chunks[:2])
    engine.prefetch(chunks)
    engine.wait()
    assert engine._background.named == [chunks[2]]
    engine.generate("\n\n".join(chunks), max_new_tokens=1)
    engine.wait()
    assert engine._background.named == []
    assert engine.contains(chunks[2])


def test_the_last_named_are_remembered(make_engine: Make) -> None:
    engine = make_engine()
    first, *others = [f"A text that no prompt has, number {i}." for i in range(MOST_NAMED + 20)]

    def name(texts: list[str]) -> None:
        engine.prefetch(texts)

    engine.prefetch([first])
    each_in_a_thread(name, [others[at::10] for at in range(10)])
    assert len(engine._background.named) == MOST_NAMED
    assert first not in engine._background.named
    engine.prefetch(["fresh"])
    again = engine._background.named[0]
    engine.prefetch([again])
    assert engine._background.named[-2:] == ["fresh", again]


def test_what_fails_there_is_said(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, chunks = make_engine(), some_chunks(3)
    engine.precompute(chunks[:2])

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no memory left")

    engine.prefetch(chunks)
    engine.wait()
    monkeypatch.setattr(engine._corpus, "encode", fail)
    assert engine.generate("\n\n".join(chunks), max_new_tokens=1).token_ids
    engine.wait()
    assert "no memory left" in caplog.text
