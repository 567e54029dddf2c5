"""Calls of both frameworks' models, in this process or over a server."""

import asyncio

import pytest
from frameworks import LangChain
from fresh import output_of
from served import model_held, until
from tiny import some_chunks

from ragkv import RagKV, StoreConfig
from ragkv.errors import ConfigError

PROMPT = "\n\n".join([*some_chunks(), "What is a target list?"])


@pytest.fixture
def kv(make_engine) -> RagKV:
    """Return an engine to which a prompt is new every time."""
    engine = make_engine(store=StoreConfig(":memory:", history_bytes=0))
    engine.precompute(some_chunks())
    return engine


@pytest.fixture
def model(model):
    """Return ``model`` for models that have the chunks."""

    def encoded(length=12, **settings):
        llm = model(length, **settings)
        if sink := getattr(llm, "sink", None):  # of a server, the default template's head
            llm.kv.precompute(some_chunks(), sink=sink)
        return llm

    return encoded


def test_settings_hold_per_model_and_per_call(framework, model):
    llm = model(recompute_ratio=0.5, method="epic")
    whole = framework.text(llm, PROMPT)
    assert (llm.last_report.method, llm.last_report.recompute_ratio) == ("epic", 0.5)
    framework.text(llm, PROMPT, recompute_ratio=0, method="reuse", max_tokens=2)
    assert (llm.last_report.method, llm.last_report.recompute_ratio) == ("reuse", 0)
    assert llm.last_report.tokens.recomputed == 0
    assert llm.last_report.decode.tokens == 2
    auto = model(recompute_ratio="auto")
    framework.text(auto, PROMPT)
    assert "attention" in auto.last_report.choice
    first, again, other = (
        framework.text(llm, PROMPT, temperature=1.0, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again != other
    stop = whole[len(whole) // 2 :][:2]
    for stops in (stop, [stop, "never"]):
        assert framework.text(llm, PROMPT, stop=stops) == whole[: whole.index(stop)]
    with pytest.raises(ConfigError, match="max_new_tokens"):
        framework.text(llm, PROMPT, max_tokens=0)


async def text_of(framework, llm, how):
    if how == "task":
        return await framework.atext(llm, PROMPT)
    return "".join([piece async for piece in framework.apieces(llm, PROMPT)])


@pytest.mark.parametrize("how", ["text", "pieces", "task", "stream"])
async def test_the_whole_report_is_at_hand(framework, model, how):
    llm = model(recompute_ratio=0)
    assert llm.last_report is None
    if how in ("text", "pieces"):
        assert "".join(getattr(framework, how)(llm, PROMPT))
    else:
        assert await text_of(framework, llm, how)
    report = llm.last_report
    assert report.recompute_ratio == 0
    assert [use.text for use in report.chunks] == some_chunks()
    assert report.decode.tokens == 12


@pytest.mark.parametrize("how", ["task", "stream"])
async def test_an_answer_that_waits_leaves_the_event_loop_alone(framework, model, kv, how):
    llm = model()
    with model_held(kv):
        answer = asyncio.create_task(text_of(framework, llm, how))
        await asyncio.sleep(0.1)  # it waits for the model; the loop goes on
        assert not answer.done()
    assert await answer == framework.text(llm, PROMPT)


@pytest.mark.parametrize("place", ["here"], indirect=True)  # a server's: tests/serve/test_limits.py
@pytest.mark.parametrize("how", ["task", "astream", "stream"])
async def test_who_leaves_ends_the_generation(framework, model, kv, how, monkeypatch):
    streams, begin = [], kv.stream

    def endless(*prompt, **given):
        streams.append(begin(*prompt, **{**given, "ignore_eos": True}))
        return streams[-1]

    monkeypatch.setattr(kv, "stream", endless)
    llm = model(3000)
    if how == "task":
        answer = asyncio.create_task(framework.atext(llm, PROMPT))
        await asyncio.to_thread(until, lambda: streams and streams[0].tokens[1])
        answer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answer
    elif how == "astream":
        pieces = framework.apieces(llm, PROMPT)
        assert await anext(pieces)
        await pieces.aclose()
    else:
        pieces = framework.pieces(llm, PROMPT)
        assert next(pieces)
        pieces.close()
    (stream,) = streams
    await asyncio.to_thread(until, lambda: not stream._thread.is_alive())
    assert stream.tokens[1] < 2000


def test_a_late_answer_of_langchains_is_given_up(make, kv):
    llm = make(LangChain.kind, max_tokens=12)
    with model_held(kv):
        for late in (
            lambda: llm.invoke(PROMPT, timeout=0.05),
            lambda: list(llm.stream(PROMPT, timeout=0.05)),
            lambda: asyncio.run(llm.ainvoke(PROMPT, timeout=0.05)),
        ):
            with pytest.raises(TimeoutError, match=r"timeout=0\.05"):
                late()
    assert make(LangChain.kind, max_tokens=12, timeout=60).invoke(PROMPT).content


SCRIPT = """
import sys
from tiny import tiny_model, tiny_tokenizer
from ragkv import RagKV

kv = RagKV(tiny_model(), tiny_tokenizer(), store=":memory:")
names = ("openai", "httpx", "fastapi", "uvicorn", "ragkv.client", "ragkv.serve")

def loaded():
    print(*(name for name in names if name in sys.modules), sep=",")

from langchain_ragkv import ChatRagKV, RagKVLLM
assert ChatRagKV(kv=kv, max_tokens=2).invoke("Hi").content
assert RagKVLLM(kv=kv, max_tokens=2).invoke("Hi")
loaded()
from llama_index.llms.ragkv import RagKVLLM
assert RagKVLLM(kv=kv, max_new_tokens=2).complete("Hi").text
loaded()
kv.close()
"""


def test_a_model_in_this_process_needs_no_server():
    lines = output_of(SCRIPT, PYTHONWARNINGS="ignore").splitlines()
    langchain, both = (set(filter(None, line.split(","))) for line in lines[-2:])
    assert langchain | both <= {"httpx"}, "LlamaIndex's core loads that"
