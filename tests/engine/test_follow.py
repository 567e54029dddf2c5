"""A retrieval in stages, and what is computed meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pausing import Pause, speculating_threads
from tiny import ask, some_chunks

from ragkv import RagKV
from ragkv.retrieve.following import afollow, follow

Make = Callable[..., RagKV]
CHUNKS = some_chunks(4)


@pytest.fixture
def engine(make_engine: Make) -> RagKV:
    kv = make_engine()
    kv.precompute(CHUNKS)
    return kv


def stages(*lists: list[str]) -> Iterator[list[str]]:
    yield from lists


def settled(kv: RagKV) -> None:
    for thread in speculating_threads():
        thread.join(30)
    assert not kv.status().running


@pytest.mark.parametrize("is_async", [False, True])
def test_the_last_list_is_the_result_and_its_prompt_is_computed(
    engine: RagKV, is_async: bool
) -> None:
    lists = CHUNKS[:2], CHUNKS[1:3], CHUNKS[1:3], CHUNKS[2:]
    if is_async:
        found = asyncio.run(afollow(engine, stages(*lists), ask))
    else:
        found = follow(engine, stages(*lists), ask)
    settled(engine)
    assert found == CHUNKS[2:]
    report = engine.status().speculations
    assert (report.started, report.cancelled, report.finished >= 1) == (3, 2, True)
    assert engine.generate(ask(found), max_new_tokens=3).report.ahead_s > 0


def test_the_prompt_is_computed_while_a_reranker_works(engine: RagKV) -> None:
    started: list[float] = []

    def reranked() -> Iterator[list[str]]:
        yield CHUNKS[:3]
        for thread in speculating_threads():
            thread.join(30)
        started.append(engine.status().speculations.finished)
        yield CHUNKS[:3]

    found = follow(engine, reranked(), ask)
    assert started == [1]
    assert engine.generate(ask(found), max_new_tokens=3).report.ahead_s > 0


def test_no_list_at_all(engine: RagKV) -> None:
    assert follow(engine, stages(), ask) == []
    assert engine.status().speculations.started == 0


@pytest.mark.parametrize("where", ["search", "prompt"])
def test_an_error_ends_the_speculation(engine: RagKV, where: str) -> None:
    def broken() -> Iterator[list[str]]:
        yield CHUNKS[:2]
        if where == "search":
            raise RuntimeError("planted")
        yield []

    def prompt(found: Any) -> Any:
        return ask(found) if found else 1 / 0

    with pytest.raises(RuntimeError if where == "search" else ZeroDivisionError):
        follow(engine, broken(), prompt)
    settled(engine)
    assert engine.status().speculations.cancelled == 1
    assert engine._requests.nbytes == 0


def test_a_cancelled_task_ends_the_speculation(engine: RagKV) -> None:
    pause, searching, go = Pause(engine), threading.Event(), threading.Event()

    def slow() -> Iterator[list[str]]:
        yield CHUNKS[:2]
        searching.set()
        go.wait(30)
        yield CHUNKS[2:]

    async def leave() -> None:
        task = asyncio.create_task(afollow(engine, slow(), ask))
        await asyncio.to_thread(searching.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go.set()
        pause.go.set()

    asyncio.run(leave())
    settled(engine)
    assert engine.status().speculations.finished == engine.status().speculations.used == 0
    assert engine._requests.nbytes == 0
