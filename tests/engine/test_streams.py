"""Readers of streams: many in one event loop, and those that leave before the end."""

import asyncio
import gc
import os
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from langchain_ragkv import ChatRagKV
from langchain_ragkv import RagKVLLM as TextModel
from llama_index.core.base.llms.types import ChatMessage
from llama_index.llms.ragkv import RagKVLLM
from tiny import some_chunks

from ragkv import RagKV
from ragkv.errors import ModelInUseError
from ragkv.prompt.render import render

Call = Callable[[str], Coroutine[Any, Any, object]]
READERS = min(32, (os.cpu_count() or 1) + 4) + 4
"""More than the default executor has threads."""


def endless(engine: RagKV) -> RagKV:
    engine.loaded.model.generation_config.eos_token_id = None
    return engine


def calls(kv: RagKV, tokens: int) -> dict[str, Call]:
    """Each framework's ways to ask, for answers of so many tokens."""
    chat = ChatRagKV(kv=kv, max_tokens=tokens)
    text = TextModel(kv=kv, max_tokens=tokens)
    llm = RagKVLLM(kv=kv, max_new_tokens=tokens, context_window=200_000)

    async def read(stream: Any) -> None:
        async for _ in stream:
            pass

    async def completed(prompt: str) -> None:
        await read(await llm.astream_complete(prompt))

    return {
        "chat": chat.ainvoke,
        "chat, streamed": lambda prompt: read(chat.astream(prompt)),
        "text": text.ainvoke,
        "text, streamed": lambda prompt: read(text.astream(prompt)),
        "llama": llm.acomplete,
        "llama, streamed": completed,
    }


WAYS = ("chat", "chat, streamed", "text", "text, streamed", "llama", "llama, streamed")


def test_a_stream_is_read_by_async_for(make_engine):
    engine = make_engine()
    expected = engine.generate("Some words", max_new_tokens=6)

    async def read():
        async with engine.stream("Some words", max_new_tokens=6) as stream:
            assert "".join([piece async for piece in stream]) == expected.text
        assert stream.completion.token_ids == expected.token_ids
        assert [piece async for piece in stream] == []
        failing = engine.stream("", max_new_tokens=6)
        with pytest.raises(ValueError, match="prompt"):
            [piece async for piece in failing]

    asyncio.run(read())


def test_an_async_reader_cannot_wait_for_itself(make_engine, monkeypatch):
    monkeypatch.setattr("ragkv.engine.stream._PATIENCE_S", 0.2)
    engine = make_engine()

    async def read():
        with engine.turn(), pytest.raises(ModelInUseError, match="outside"):
            await anext(engine.stream("Some words", max_new_tokens=3))

    asyncio.run(read())


@pytest.mark.parametrize("way", WAYS)
def test_who_waits_takes_no_thread_of_the_programs(make_engine, way):
    engine = make_engine()
    call = calls(engine, 3)[way]

    async def scenario():
        with engine.turn():  # nobody gets on
            waiting = [asyncio.create_task(call(f"Words {number}")) for number in range(READERS)]
            await asyncio.sleep(0.2)
            await asyncio.wait_for(asyncio.to_thread(time.sleep, 0), timeout=5)
            assert not any(task.done() for task in waiting)
        await asyncio.wait_for(asyncio.gather(*waiting), timeout=60)

    asyncio.run(scenario())


@pytest.mark.parametrize("way", WAYS)
def test_who_is_cancelled_lets_go_at_once(make_engine, monkeypatch, way):
    """Whoever runs ends with the next token; those who wait prepare nothing."""
    engine = endless(make_engine(max_running=1))
    call = calls(engine, 100_000)[way]
    prompts = [f"Question {number:02}: {some_chunks(1)[0]}" for number in range(READERS)]
    prepare, prepared, begun = engine._pipeline._planner.plan, [], threading.Event()

    def noted(request, *given, **more):
        prepared.append(render(request.prompt, engine.tokenizer).text)
        begun.set()
        return prepare(request, *given, **more)

    monkeypatch.setattr(engine._pipeline._planner, "plan", noted)

    async def scenario():
        tasks = {prompt: asyncio.create_task(call(prompt)) for prompt in prompts}
        assert await asyncio.to_thread(begun.wait, 10)
        (runs,) = [prompt for prompt in prompts if prompt in prepared[0]]
        for prompt in sorted(prompts, key=lambda each: each == runs):
            tasks[prompt].cancel()  # who runs comes last: its end lets the next one begin at once
        began = time.monotonic()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        assert time.monotonic() - began < 2

    asyncio.run(scenario())
    assert engine.generate("Words", max_new_tokens=1).report.steps["wait"] < 5
    assert len(prepared) == 2


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_time_spent_waiting_counts(make_engine, *, asynchronous):
    engine = make_engine()
    chat = ChatRagKV(kv=engine, max_tokens=3, timeout=0.3)

    async def ask():
        if asynchronous:
            await chat.ainvoke("Words")
        else:
            await asyncio.to_thread(chat.invoke, "Words")

    async def scenario():
        with engine.turn():
            began = time.monotonic()
            with pytest.raises(TimeoutError, match=r"0\.3"):
                await ask()
            assert time.monotonic() - began < 5

    asyncio.run(scenario())
    assert chat.invoke("Words", timeout=60).content


LONG = {"max_new_tokens": 100_000}


def test_a_request_that_is_cancelled_while_it_waits_prepares_nothing(make_engine, monkeypatch):
    engine = make_engine()
    prepared: list[object] = []
    monkeypatch.setattr(
        engine._pipeline._planner, "plan", lambda *given, **_: prepared.append(given)
    )
    with engine.turn():
        stream = engine.stream("Words", **LONG)
        closing = threading.Thread(target=stream.close, daemon=True)
        closing.start()
        assert stream._running.cancelled.wait(10)
    closing.join(10)
    assert not closing.is_alive()
    assert list(stream) == []
    assert prepared == []
    with pytest.raises(RuntimeError, match="to its end"):
        _ = stream.completion


def test_a_stream_that_nobody_holds_ends(make_engine):
    engine = make_engine()
    engine.loaded.model.generation_config.eos_token_id = None
    for _ in engine.stream("Some words to begin with", **LONG):
        break
    gc.collect()
    done = threading.Thread(target=engine.close, daemon=True)  # waits for what is under way
    done.start()
    done.join(20)
    assert not done.is_alive()


@pytest.mark.parametrize("wrapper", [ChatRagKV, TextModel])
def test_a_model_that_nobody_reads_ends(make_engine, wrapper):
    engine = make_engine()
    engine.loaded.model.generation_config.eos_token_id = None
    for _ in wrapper(kv=engine, max_tokens=100_000).stream("Some words"):
        break
    gc.collect()
    assert engine.generate("Words", max_new_tokens=1).report.steps["wait"] < 5


@pytest.mark.parametrize("call", ["acomplete", "achat"])
def test_a_call_that_is_cancelled_lets_go_of_the_model(make_engine, call):
    engine = make_engine()
    engine.loaded.model.generation_config.eos_token_id = None
    llm = RagKVLLM(kv=engine, max_new_tokens=100_000, context_window=200_000)
    asked = "Some words" if call == "acomplete" else [ChatMessage(content="Some words")]

    async def give_up():
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(getattr(llm, call)(asked), 0.3)

    asyncio.run(give_up())
    assert engine.generate("Words", max_new_tokens=1).report.steps["wait"] < 5


def test_a_stream_cannot_wait_for_its_own_reader(make_engine, monkeypatch):
    monkeypatch.setattr("ragkv.engine.stream._PATIENCE_S", 0.2)
    engine = make_engine()
    alone = engine.generate("Words", max_new_tokens=3).text
    ready = engine.stream("Words", max_new_tokens=3)
    ready._thread.join(10)
    with engine.turn():
        assert "".join(ready) == alone
        stream = engine.stream("Words", max_new_tokens=3)
        with stream, pytest.raises(ModelInUseError, match="outside"):
            next(stream)
        waiting = engine.stream("Words", max_new_tokens=3)
    assert "".join(waiting) == alone
    assert list(stream) == []
