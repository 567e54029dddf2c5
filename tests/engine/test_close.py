"""Closing an engine while others still use it, and using one that is closed."""

import threading
from pathlib import Path

import pytest
from tiny import some_chunks, tiny_model, tiny_tokenizer

from ragkv import RagKV, ReuseConfig, StoreConfig
from ragkv.engine.stream import CompletionStream
from ragkv.errors import ClosedError, ModelInUseError, RagKVError

CHUNKS = some_chunks(3)
PROMPT = "\n\n".join(CHUNKS) + "\n\nWhat now?"


def an_engine(path: Path | None = None) -> RagKV:
    store = ":memory:" if path is None else StoreConfig(path=path, memory_bytes=0)
    return RagKV(tiny_model(), tiny_tokenizer(), store=store, reuse=ReuseConfig(history=False))


@pytest.mark.parametrize("kept", ["in memory", "on disk"])
def test_close_waits_for_the_answers_that_are_under_way(kept, tmp_path):
    engine = an_engine(tmp_path if kept == "on disk" else None)
    engine.precompute(CHUNKS[:2])
    settings = {"max_new_tokens": 40, "history": False}
    alone = engine.generate(PROMPT, **settings).token_ids
    engine.prefetch(CHUNKS)
    found: list[object] = []
    begun, turn = threading.Event(), engine.turn()
    prepare = engine._pipeline._planner.plan

    def preparing(*args, **more):
        begun.set()
        return prepare(*args, **more)

    engine._pipeline._planner.plan = preparing

    def ask():
        try:
            found.append(engine.generate(PROMPT, **settings).token_ids)
        except RagKVError as error:
            found.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    with turn:
        asking.start()
        waiting = engine.stream(PROMPT, **settings)
    assert begun.wait(10)
    engine.close()
    asking.join(10)
    list(waiting)
    assert found == [alone]
    assert waiting.completion.token_ids == alone


def test_a_stream_that_is_read_after_the_block_gives_its_answer():
    with an_engine() as engine:
        engine.precompute(CHUNKS)
        alone = engine.generate(PROMPT, max_new_tokens=60).text
        engine.prefetch(CHUNKS)
        stream = engine.stream(PROMPT, max_new_tokens=60)
        first = next(stream)
    assert first + "".join(stream) == alone


@pytest.mark.parametrize(
    "call",
    [
        lambda engine: engine.generate(PROMPT, max_new_tokens=2),
        lambda engine: engine.stream(PROMPT, max_new_tokens=2),
        lambda engine: engine.prefill(PROMPT),
        lambda engine: engine.precompute(CHUNKS),
        lambda engine: engine.prefetch(CHUNKS),
        lambda engine: engine.contains(CHUNKS[0]),
        lambda engine: engine.forget(CHUNKS[0]),
        lambda engine: engine.forget(document="a"),
    ],
    ids=str.split("generate stream prefill precompute prefetch contains forget forget_document"),
)
def test_a_closed_engine_says_so(call):
    engine = an_engine()
    engine.precompute(CHUNKS)
    engine.close()
    engine.close()
    engine.wait()
    with pytest.raises(ClosedError, match="closed"):
        call(engine)


def test_a_refused_call_does_not_keep_an_engine_open(monkeypatch):
    engine = an_engine()
    with pytest.raises(RagKVError):
        engine.generate("")
    with pytest.raises(RagKVError):
        list(engine.stream(""))

    def full(_, *__, **___):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(CompletionStream, "__init__", full)
    with pytest.raises(RuntimeError, match="start"):
        engine.stream(PROMPT)
    closing = threading.Thread(target=engine.close, daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive()


@pytest.mark.parametrize("call", ["wait", "close"])
def test_waiting_for_what_waits_for_oneself_is_refused(call, tmp_path):
    engine = an_engine(tmp_path)
    with engine.turn():
        engine.prefetch(CHUNKS)
        with pytest.raises(ModelInUseError, match="turn"):
            getattr(engine, call)()
    getattr(engine, call)()
