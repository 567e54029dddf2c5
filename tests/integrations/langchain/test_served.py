"""ChatRagKV against a server: the pipeline of an engine in this process, by one argument."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.documents import Document
from langchain_core.load import dumps
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import ConfigurableField, RunnableLambda
from langchain_openai import ChatOpenAI
from langchain_ragkv import ChatRagKV, RagKVRetriever, RagKVTransformer
from listening import listening
from pydantic import ValidationError
from tiny import some_chunks, tiny_tokenizer

from ragkv import StoreConfig
from ragkv.errors import ServerError

PROMPT = ChatPromptTemplate.from_messages(
    [("system", 'Answer as {{"answer": ...}}.\n\n{context}'), ("human", "{input}")]
)
QUESTION = "What is a target list?"
DOCUMENTS = [Document(text) for text in some_chunks()]
CONTEXT = "\n\n".join(some_chunks())
NO_CONVERSATIONS = StoreConfig(":memory:", history_bytes=0)
"""The same prompt is asked twice, and is to be reused by its chunks."""


@pytest.fixture
def kv(make_engine):
    return make_engine(store=NO_CONVERSATIONS)


@pytest.fixture
def url(kv):
    with listening(kv) as url:
        yield url


@pytest.fixture
def chat(url):
    made = []

    def chat(**fields):
        made.append(ChatRagKV(base_url=url, **{"max_tokens": 12, **fields}))
        return made[-1]

    yield chat
    for llm in made:
        llm.kv.close()


def account(message):
    report = message.response_metadata["ragkv"]
    times = {"steps", "ttft_s", "decode_s", "total_s", "ms_per_token"}
    return {name: report[name] for name in report if name not in times}


def ask(llm):
    """Ingest, retrieve and answer, as an application does."""
    RagKVTransformer(llm=llm).transform_documents(DOCUMENTS)
    found = RunnableLambda(lambda _: DOCUMENTS)
    retriever = RagKVRetriever(retriever=found, llm=llm)
    chain = create_stuff_documents_chain(llm, PROMPT)
    given = {"context": retriever.invoke(QUESTION), "input": QUESTION}
    return chain.invoke(given), "".join(chain.stream(given))


def test_the_same_pipeline_gives_the_same_answers(make_engine, kv, chat):
    here = ChatRagKV(kv=make_engine(store=NO_CONVERSATIONS), max_tokens=12, sink_from=PROMPT)
    there = chat(sink_from=PROMPT)
    assert there._sink == here._sink
    assert ask(there) == ask(here)
    assert there.last_report.chunks == here.last_report.chunks
    assert there.last_report.reused_tokens > 100
    one, other = (
        llm.invoke(PROMPT.invoke({"context": CONTEXT, "input": QUESTION})) for llm in (here, there)
    )
    assert other.content == one.content
    assert other.usage_metadata == one.usage_metadata
    assert account(other) == account(one)
    assert other.response_metadata["finish_reason"] == one.response_metadata["finish_reason"]
    assert there.kv.info.fingerprint == kv.info.fingerprint == here.kv.info.fingerprint


async def test_tasks_and_streams_give_the_same(kv, chat):
    llm, texts = chat(), [f"{CONTEXT}\n\nQuestion {at}?" for at in range(4)]
    llm.precompute(DOCUMENTS)
    expected = [answer.content for answer in ChatRagKV(kv=kv, max_tokens=12).batch(texts)]
    answers = await asyncio.gather(*(llm.ainvoke(text) for text in texts))
    assert [answer.content for answer in answers] == expected
    chunks = [chunk async for chunk in llm.astream(texts[0])]
    assert "".join(chunk.content for chunk in chunks) == expected[0]
    assert chunks[-1].usage_metadata == answers[0].usage_metadata
    assert account(chunks[-1])["chunks"] == account(answers[0])["chunks"]
    assert chunks[-1].chunk_position == "last"


async def test_an_answer_that_waits_leaves_the_event_loop_alone(kv, chat):
    llm, held, free = chat(), threading.Event(), threading.Event()

    def hold():
        with kv.turn():
            held.set()
            free.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    await asyncio.to_thread(held.wait)
    answer = asyncio.create_task(llm.ainvoke(QUESTION))
    for _ in range(100):  # the loop runs while the server waits for its model
        await asyncio.sleep(0)
    assert not answer.done()
    with pytest.raises(TimeoutError, match="timeout"):
        await llm.ainvoke(QUESTION, timeout=0.05)
    with pytest.raises(TimeoutError, match="timeout"):
        await asyncio.to_thread(llm.invoke, QUESTION, timeout=0.05)
    free.set()
    assert (await answer).content
    thread.join()


def test_settings_hold_per_model_per_call_and_bound(chat):
    llm = chat(recompute_ratio=0.5, method="epic", temperature=1.0)
    llm.precompute(DOCUMENTS)
    text = f"{CONTEXT}\n\n{QUESTION}"
    assert llm.invoke(text, seed=3).content == llm.invoke(text, seed=3).content
    assert llm.last_report.method == "epic"
    assert (
        llm.bind(recompute_ratio=1).invoke(text).response_metadata["ragkv"]["effective_ratio"] == 1
    )
    configurable = llm.configurable_fields(recompute_ratio=ConfigurableField(id="ratio"))
    answer = configurable.with_config(configurable={"ratio": 0.75}).invoke(text)
    assert account(answer)["recompute_ratio"] == 0.75
    whole = llm.invoke(text, temperature=0).content
    stop = whole[len(whole) // 2 :][:2]
    cut = llm.invoke(text, temperature=0, stop=[stop])
    assert cut.content == whole[: whole.index(stop)]
    assert cut.response_metadata["finish_reason"] == "stop"


def test_tokens_are_counted_by_the_server(chat):
    ids = tiny_tokenizer()(QUESTION, add_special_tokens=False)["input_ids"]
    assert chat().get_token_ids(QUESTION) == ids


def test_chunks_expire_with_their_document(kv, chat):
    llm = chat()
    assert llm.precompute(DOCUMENTS, document="d", expires_in=3600).new == 3
    assert llm.kv.contains(some_chunks()[0])
    assert kv.contains(some_chunks()[0])
    assert llm.precompute(DOCUMENTS[:2], document="d").removed == 1
    assert llm.kv.forget(document="d") == 2
    assert not llm.kv.forget(some_chunks()[0])


def test_a_key_opens_its_namespace_and_stays_secret(make_engine):
    kv = make_engine(namespace="team")
    with listening(kv, keys={"open-sesame": "team"}) as url:
        llm = ChatRagKV(base_url=f"{url}/v1/", api_key="open-sesame", max_tokens=2)
        assert llm.namespace == "team"
        assert llm.invoke(QUESTION).content
        shown = [repr(llm), dumps(llm), json.dumps(llm.model_dump(), default=str)]
        shown.append(str(llm._identifying_params))
        assert not any("open-sesame" in text for text in shown)
        with pytest.raises(ValidationError, match="namespace"):
            ChatRagKV(base_url=url, api_key="open-sesame", namespace="other")
        for key in (None, "wrong"):
            with pytest.raises(ServerError, match="api_key"):
                ChatRagKV(base_url=url, api_key=key)
        llm.kv.close()


def test_langchains_own_client_of_openai(kv, url):
    llm = ChatOpenAI(
        base_url=f"{url}/v1", api_key="none", model="default", max_tokens=12, temperature=0
    )
    messages = [("system", "Answer."), ("human", f"{CONTEXT}\n\n{QUESTION}")]
    kv.precompute(some_chunks())
    expected = ChatRagKV(kv=kv, max_tokens=12).invoke(messages)
    answer = llm.invoke(messages)
    assert answer.content == expected.content
    usage = answer.usage_metadata
    assert usage["total_tokens"] == expected.usage_metadata["total_tokens"]
    cached = expected.usage_metadata["input_token_details"]["cache_read"]
    assert usage["input_token_details"]["cache_read"] == cached > 100
    chunks = list(llm.stream(messages, stream_usage=True))
    assert "".join(chunk.content for chunk in chunks) == expected.content
    ratio = llm.invoke(messages, extra_body={"ragkv": {"recompute_ratio": 1}})
    assert (
        ratio.content
        == kv.generate(
            [
                {"role": role, "content": text}
                for role, text in zip(
                    ("system", "user"), [text for _, text in messages], strict=True
                )
            ],
            max_new_tokens=12,
            recompute_ratio=1,
        ).text
    )
