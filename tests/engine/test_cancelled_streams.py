"""Readers who leave before an answer is there."""

import asyncio
import gc
import threading

import pytest
from langchain_ragkv import ChatRagKV
from langchain_ragkv import RagKVLLM as TextModel
from llama_index.core.base.llms.types import ChatMessage
from llama_index.llms.ragkv import RagKVLLM

from ragkv.errors import ModelInUseError

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

    async def give_up() -> None:
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
