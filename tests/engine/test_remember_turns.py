"""Chats whose head changes with each turn: earlier turns are found as chunks."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import some_chunks

from ragkv import RagKV, ReuseConfig, StoreConfig
from ragkv.engine import turns
from ragkv.errors import ConfigError, StoreFullError
from ragkv.store import open_chunk_store
from ragkv.store.base import TURNS
from ragkv.store.operate.archive import export_store
from ragkv.store.operate.inspect import stats

Make = Callable[..., RagKV]
Messages = list[dict[str, str]]
REMEMBER = ReuseConfig(remember_turns=True)
QUESTIONS = [
    "What is a target list, and where may it stand in an assignment?",
    "And what happens to the items of an iterable on the right hand side?",
    "Which of the two is evaluated first, and how can one tell?",
]


def prompt(head: str, said: list[str], question: str) -> Messages:
    """Return a conversation whose system message is new."""
    roles = ("user", "assistant")
    history = [{"role": roles[at % 2], "content": text} for at, text in enumerate(said)]
    system = {"role": "system", "content": f"Answer from this:\n{head}"}
    return [system, *history, {"role": "user", "content": question}]


def talk(engine: RagKV, **overrides: Any) -> tuple[list[str], Any]:
    """Have three turns; return all that was said and the last answer."""
    said: list[str] = []
    done = None
    for head, question in zip(some_chunks(3), QUESTIONS, strict=True):
        done = engine.generate(prompt(head, said, question), max_new_tokens=40, **overrides)
        said += [question, done.text]
        engine.wait()
    return said, done


def remembered(engine: RagKV) -> list[str]:
    return [info.text for info in engine._store.entries_of(TURNS)]


def long_enough(texts: list[str]) -> list[str]:
    return [text.strip() for text in texts if len(text.strip()) >= 16]


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_the_third_turn_reuses_the_first_two(make_engine: Make, tmp_path: Path, place: str) -> None:
    store = ":memory:" if place == "memory" else str(tmp_path)
    engine = make_engine(store=store, reuse=REMEMBER)
    engine.precompute(some_chunks(3))
    said, done = talk(engine)
    assert remembered(engine) == long_enough(said)
    assert len(remembered(engine)) >= 5
    found = [use.text for use in done.report.chunks]
    assert found == [some_chunks(3)[2], *long_enough(said[:4])]
    assert done.report.misses == ()


def test_by_default_nothing_is_remembered(make_engine: Make) -> None:
    engine = make_engine()
    _, done = talk(engine)
    assert remembered(engine) == []
    assert done.report.chunks == ()


@pytest.mark.parametrize("overrides", [{"on_miss": "skip"}, {"method": "full"}])
def test_what_stores_nothing_remembers_nothing(
    make_engine: Make, overrides: dict[str, str]
) -> None:
    engine = make_engine(reuse=REMEMBER)
    talk(engine, **overrides)
    assert list(engine._store.texts()) == []


def test_a_store_that_is_read_only_remembers_nothing(make_engine: Make, tmp_path: Path) -> None:
    make_engine(store=str(tmp_path)).precompute(some_chunks(1))
    engine = make_engine(store=StoreConfig(tmp_path, read_only=True), reuse=REMEMBER)
    talk(engine)
    assert list(engine._store.texts()) == some_chunks(1)


def test_strings_are_no_turns(make_engine: Make) -> None:
    engine = make_engine(reuse=REMEMBER)
    engine.generate(QUESTIONS[0], max_new_tokens=40)
    engine.wait()
    assert remembered(engine) == []


def test_at_ratio_1_it_is_a_full_prefill(make_engine: Make) -> None:
    engine = make_engine(reuse=REMEMBER)
    said, _ = talk(engine)
    asked = prompt(some_chunks(4)[3], said, "And what is a starred target good for?")
    out = engine.prefill(asked, recompute_ratio=1)
    assert out.report.recomputed_tokens > 50
    full = engine.prefill(asked, method="full")
    assert torch.allclose(out.logits, full.logits, atol=2e-4)


def test_another_namespace_sees_nothing(make_engine: Make, tmp_path: Path) -> None:
    first = make_engine(store=str(tmp_path), namespace="first", reuse=REMEMBER)
    other = make_engine(store=str(tmp_path), namespace="other", reuse=REMEMBER)
    said, _ = talk(first)
    done = other.generate(prompt("Another head.", said, "What?"), max_new_tokens=1)
    assert done.report.chunks == ()
    assert list(other._store.texts()) == []


def test_documents_in_the_question_are_not_remembered(make_engine: Make) -> None:
    """Known ones; between them and after them is what was asked."""
    engine, chunks = make_engine(reuse=REMEMBER), some_chunks(2)
    engine.precompute(chunks[:1])
    engine.prefetch(chunks[1:])  # encoded after the answer, before the turn
    engine.wait()
    content = f"{chunks[0]}\n\n{chunks[1]}\n\nQ: {QUESTIONS[0]}"
    engine.generate([{"role": "user", "content": content}], max_new_tokens=1)
    engine.wait()
    assert remembered(engine) == [f"Q: {QUESTIONS[0]}"]
    parts = [{"type": "text", "text": QUESTIONS[1]}]
    engine.generate([{"role": "user", "content": parts}], max_new_tokens=1)
    engine.wait()
    assert remembered(engine) == [f"Q: {QUESTIONS[0]}", QUESTIONS[1]]
    assert engine.forget_document(TURNS) == 2


def test_turns_expire_and_are_deleted(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(reuse=REMEMBER)
    said, _ = talk(engine)
    for info in engine._store.entries_of(TURNS):
        assert time.time() + 3500 < info.expires_at <= time.time() + 3600
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 4000)
    done = engine.generate(prompt("Head.", said, "Something new to be asked"), max_new_tokens=1)
    assert {miss.reason for miss in done.report.misses} == {"expired"}
    engine.wait()
    assert remembered(engine) == ["Something new to be asked"]


def test_turns_of_a_conversation_that_goes_on_do_not_expire(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(reuse=REMEMBER)
    said, _ = talk(engine)
    now = time.time
    for later in (2000, 4000):
        monkeypatch.setattr(time, "time", lambda later=later: now() + later)
        report = engine.generate(prompt("Head.", said, "Yes?"), max_new_tokens=1).report
        engine.wait()
        assert [use.text for use in report.chunks] == long_enough(said)


@pytest.mark.parametrize("restart", [False, True])
def test_the_oldest_are_deleted(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, restart: bool
) -> None:
    monkeypatch.setattr(turns, "MOST_TURNS", 3)
    engine = make_engine(store=str(tmp_path), reuse=REMEMBER)
    engine.precompute(some_chunks(2))
    said, _ = talk(engine)
    assert remembered(engine) == long_enough(said)[-3:]
    if restart:
        engine.close()
        engine = make_engine(store=str(tmp_path), reuse=REMEMBER)
    kept = remembered(engine)
    nbytes = max(info.nbytes for info in engine._store.entries_of(TURNS))
    monkeypatch.setattr(turns, "MOST_BYTES", 2 * nbytes)
    engine.generate(prompt("Head.", [], "Something new to be asked"), max_new_tokens=1)
    engine.wait()
    assert remembered(engine)[-1] == "Something new to be asked"
    assert remembered(engine)[:-1] == kept[1 - len(remembered(engine)) :]
    assert sum(info.nbytes for info in engine._store.entries_of(TURNS)) <= 2 * nbytes
    assert set(some_chunks(2)) < set(engine._store.texts())


@pytest.mark.parametrize("restart", [False, True])
def test_a_turn_that_becomes_a_chunk_of_the_user_stays(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, restart: bool
) -> None:
    engine = make_engine(store=str(tmp_path), reuse=REMEMBER)
    talk(engine)
    if restart:
        engine.close()
        engine = make_engine(store=str(tmp_path), reuse=REMEMBER)
    assert engine.precompute(QUESTIONS[:1]).new == 1
    assert QUESTIONS[0] not in remembered(engine)
    monkeypatch.setattr(turns, "MOST_TURNS", 0)
    engine.generate(prompt("Head.", [], QUESTIONS[0]), max_new_tokens=1)
    engine.wait()
    assert remembered(engine) == []
    assert engine.contains(QUESTIONS[0])
    assert engine._store.expiry(QUESTIONS[0]) is None


def test_turns_are_no_documents_and_are_not_carried_elsewhere(
    make_engine: Make, tmp_path: Path
) -> None:
    engine = make_engine(store=str(tmp_path / "store"), reuse=REMEMBER)
    engine.precompute(some_chunks(2), document="the manual")
    talk(engine)
    with pytest.raises(ConfigError, match="name the document"):
        engine.precompute(some_chunks(1), document=TURNS)
    store = open_chunk_store(StoreConfig(tmp_path / "store"))
    assert stats(store).documents == 1
    assert export_store(store, tmp_path / "out.tar").entries == 2
    store.close()


def test_a_failure_is_logged(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(reuse=REMEMBER)

    def fail(*_: object) -> None:
        raise StoreFullError("no room left")

    monkeypatch.setattr(engine._store, "put", fail)
    said, _ = talk(engine)
    assert said[-1]
    assert "a turn was not remembered: no room left" in caplog.text


@pytest.mark.parametrize("field", [{"remember_turns": 1}, {"turns_expire_in": 0}])
def test_wrong_settings_are_refused(field: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(field))):
        ReuseConfig(**field)  # type: ignore[arg-type]
