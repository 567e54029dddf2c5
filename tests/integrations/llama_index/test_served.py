"""RagKVLLM against a server: the pipeline of an engine in this process, by one argument."""

from __future__ import annotations

import asyncio
import json
import pickle

import pytest
from listening import listening
from llama_index.core import Settings, VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.prompts import ChatPromptTemplate, PromptTemplate
from llama_index.core.schema import TextNode
from llama_index.llms.openai_like import OpenAILike
from llama_index.llms.ragkv import (
    RagKVLLM,
    RagKVPostprocessor,
    RagKVPromptHelper,
    RagKVRetriever,
    RagKVTransform,
)
from tiny import some_chunks, tiny_tokenizer

from ragkv import ReuseConfig, StoreConfig
from ragkv.errors import ConfigError, ServerError

QUESTION = "What is a target list?"
PROMPT = "\n\n".join([*some_chunks(), QUESTION])
CHAT = [
    ChatMessage(role="system", content="Answer from the text."),
    ChatMessage(role="user", content=PROMPT),
]
SYSTEM = ChatMessage(role="system", content='As {{"a": ...}}.\n{context_str}')
TEMPLATE = ChatPromptTemplate([SYSTEM, ChatMessage(role="user", content="{query_str}")])
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
def served(url):
    made = []

    def served(**given):
        made.append(RagKVLLM(api_base=url, **{"max_new_tokens": 12, **given}))
        return made[-1]

    yield served
    for llm in made:
        llm.kv.close()


def account(response):
    times = {"steps", "ttft_s", "decode_s", "total_s", "ms_per_token"}
    return {name: value for name, value in response.raw["report"].items() if name not in times}


def ask(llm, monkeypatch):
    """Ingest, retrieve and answer, as an application does."""
    monkeypatch.setattr(Settings, "_tokenizer", tiny_tokenizer().encode)
    nodes = [TextNode(text=text, id_=text[:9]) for text in some_chunks()]
    RagKVTransform(llm=llm)(nodes)
    index = VectorStoreIndex(nodes, embed_model=MockEmbedding(embed_dim=4))
    answers = []
    for streaming in (False, True):
        engine = index.as_query_engine(
            llm=llm,
            similarity_top_k=3,
            streaming=streaming,
            node_postprocessors=[RagKVPostprocessor(llm=llm)],
        )
        answers.append(str(engine.query(QUESTION)))
    return answers


@pytest.mark.parametrize("is_chat_model", [False, True])
def test_the_same_pipeline_gives_the_same_answers(make_engine, served, monkeypatch, is_chat_model):
    here = RagKVLLM(
        kv=make_engine(store=NO_CONVERSATIONS),
        max_new_tokens=12,
        is_chat_model=is_chat_model,
        sink_from="default",
    )
    there = served(is_chat_model=is_chat_model)
    assert there.sink == here.sink
    assert ask(there, monkeypatch) == ask(here, monkeypatch)
    assert there.last_report.chunks == here.last_report.chunks
    assert there.last_report.reused_tokens > 100
    assert there.kv.contains(some_chunks()[0])
    for answer in (lambda llm: llm.complete(PROMPT), lambda llm: llm.chat(CHAT)):
        one, other = answer(here), answer(there)
        assert (other.raw["usage"], account(other)) == (one.raw["usage"], account(one))
        assert str(other) == str(one)
    pieces = list(there.stream_chat(CHAT))
    assert pieces[-1].message.content == here.chat(CHAT).message.content
    assert account(pieces[-1]) == account(here.chat(CHAT))


async def test_tasks_give_the_same(kv, served):
    llm, here = served(), RagKVLLM(kv=kv, max_new_tokens=12)
    prompts = [f"{PROMPT} {at}" for at in range(4)]
    answers = await asyncio.gather(*(llm.acomplete(prompt) for prompt in prompts))
    assert [each.text for each in answers] == [here.complete(each).text for each in prompts]
    stream = await llm.astream_chat(CHAT)
    pieces = [piece async for piece in stream]
    assert pieces[-1].message.content == here.chat(CHAT).message.content
    assert (await llm.achat(CHAT)).message.content == here.chat(CHAT).message.content


def test_a_template_of_messages_gives_the_sink(make_engine, served):
    here = RagKVLLM(kv=make_engine(), is_chat_model=True, sink_from=TEMPLATE)
    there = served(is_chat_model=True, sink_from=TEMPLATE)
    assert there.sink == here.sink
    assert there.sink.endswith("...}}.\n"), "LlamaIndex leaves braces as they are"
    with pytest.raises(ConfigError, match="context_str"):
        served(is_chat_model=True, sink_from=PromptTemplate("{query_str}"))
    with pytest.raises(ConfigError, match="chat template"):
        there.messages_to_prompt(CHAT)
    own = served(is_chat_model=True, messages_to_prompt=lambda messages: messages[-1].content)
    assert own.chat(CHAT).message.content == own.complete(PROMPT).text


def test_settings_reach_the_server(served):
    llm = served(reuse=ReuseConfig(recompute_ratio=0.5), method="epic", stopping_ids=[3])
    llm.kv.precompute(some_chunks())
    report = llm.complete(PROMPT).raw["report"]
    assert (report["method"], report["recompute_ratio"]) == ("epic", 0.5)
    assert llm.complete(PROMPT, recompute_ratio=0).raw["report"]["recompute_ratio"] == 0
    drawn = [llm.complete(PROMPT, temperature=1.0, seed=1).text for _ in range(2)]
    assert drawn[0] == drawn[1] != llm.complete(PROMPT).text
    assert llm.complete(PROMPT, max_tokens=2).raw["usage"]["completion_tokens"] == 2


def test_the_window_and_the_helper_are_the_models(kv, served):
    llm = served(context_window=100_000)
    assert llm.metadata.context_window == kv.loaded.positions
    helper, here = (RagKVPromptHelper.from_llm(each) for each in (llm, RagKVLLM(kv=kv)))
    texts, template = some_chunks(), PromptTemplate("{context_str}")
    assert helper.repack(template, texts) == here.repack(template, texts)


def test_a_retriever_prefetches_over_http(kv, served):
    llm = served()
    nodes = [TextNode(text=text, id_=text[:9]) for text in some_chunks()]
    index = VectorStoreIndex(nodes, embed_model=MockEmbedding(embed_dim=4))
    retriever = RagKVRetriever(index.as_retriever(similarity_top_k=3), llm)
    assert len(retriever.retrieve(QUESTION)) == 3
    llm.complete(PROMPT)
    kv.wait()
    assert kv.contains(some_chunks()[0], sink=llm.sink), "missing chunks are encoded afterwards"


def test_a_key_opens_its_namespace_and_stays_here(make_engine, monkeypatch):
    kv = make_engine(namespace="team")
    with listening(kv, keys={"open-sesame": "team"}) as url:
        llm = RagKVLLM(api_base=url, api_key="open-sesame", max_new_tokens=3, timeout=30)
        nodes = [TextNode(text=text, id_=text[:9]) for text in some_chunks()]
        step = RagKVTransform(llm=llm)
        written = llm.to_dict()
        shown = [repr(llm), repr(llm.source), json.dumps(written, default=str)]
        assert not any("open-sesame" in text for text in shown)
        assert written["api_base"] == url
        assert written["left_out"] == ["api_key"]
        with pytest.raises(ConfigError, match="api_key="):
            RagKVLLM.from_dict(written)
        again = RagKVLLM.from_dict(written, api_key="open-sesame")
        assert again.complete(PROMPT).text == llm.complete(PROMPT).text
        assert (again.timeout, again.sink) == (30, llm.sink)

        travelled = pickle.dumps(step)
        assert b"open-sesame" not in travelled
        with pytest.raises(ServerError, match="RAGKV_API_KEY"):
            pickle.loads(travelled)(nodes)
        monkeypatch.setenv("RAGKV_API_KEY", "open-sesame")
        worker = pickle.loads(travelled)
        assert worker(nodes) == nodes
        assert kv.contains(some_chunks()[0], sink=llm.sink)
        with pytest.raises(ConfigError, match="namespace"):
            RagKVLLM(api_base=url, namespace="other")
        for each in (llm.kv, again.kv, worker._source.get()):
            each.close()


@pytest.mark.parametrize("remote", [{"api_key": "k"}, {"timeout": 3}, {"max_retries": 1}])
def test_what_only_a_server_has_is_refused_by_name(make_engine, remote):
    with pytest.raises(ConfigError, match=next(iter(remote))):
        RagKVLLM(model_name="none", **remote)
    with pytest.raises(ConfigError, match=next(iter(remote))):
        RagKVLLM(kv=make_engine(), **remote)


@pytest.mark.parametrize("is_chat_model", [False, True])
def test_llama_indexs_own_client_of_openai(kv, url, is_chat_model):
    llm = OpenAILike(
        *("default",),
        api_base=f"{url}/v1",
        api_key="none",
        is_chat_model=is_chat_model,
        max_tokens=12,
        temperature=0,
        context_window=4096,
    )
    here = RagKVLLM(kv=kv, max_new_tokens=12, is_chat_model=is_chat_model)
    if is_chat_model:
        expected = here.chat(CHAT)
        assert llm.chat(CHAT).message.content == expected.message.content
        assert list(llm.stream_chat(CHAT))[-1].message.content == expected.message.content
    else:
        expected = here.complete(PROMPT, formatted=True)
        assert llm.complete(PROMPT, formatted=True).text == expected.text
        assert list(llm.stream_complete(PROMPT, formatted=True))[-1].text == expected.text
