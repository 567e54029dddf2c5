"""Both frameworks against a server: as with an engine in this process, by one argument."""

import asyncio
import json
import pickle

import pytest
from frameworks import FRAMEWORKS
from langchain_core.documents import Document
from langchain_core.load import dumps
from langchain_core.runnables import RunnableLambda
from langchain_ragkv import ChatRagKV, RagKVRetriever, RagKVTransformer
from langchain_ragkv import RagKVLLM as TextModel
from listening import listening
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import TextNode
from llama_index.llms.ragkv import RagKVLLM, RagKVPromptHelper, RagKVTransform
from pydantic import ValidationError
from tiny import some_chunks, tiny_tokenizer

from ragkv import ReuseConfig, StoreConfig
from ragkv.client import RemoteRagKV
from ragkv.errors import ConfigError, ServerError

QUESTION = "What is a target list?"
PROMPT = "\n\n".join([*some_chunks(), QUESTION])
NODES = [TextNode(text=text, id_=text[:9]) for text in some_chunks()]
DOCUMENTS = [Document(text) for text in some_chunks()]
NOWHERE = "http://127.0.0.1:9"
NO_CONVERSATIONS = StoreConfig(":memory:", history_bytes=0)
"""The same prompt is asked twice, and is to be reused by its chunks."""
REFUSED = (ConfigError, ValidationError)
TIMES = {"steps", "ttft_s", "total_s", "decode.seconds", "decode.ms_per_token"}


@pytest.fixture
def kv(make_engine):
    return make_engine(store=NO_CONVERSATIONS)


@pytest.fixture
def url(kv):
    with listening(kv) as url:
        yield url


@pytest.fixture
def served(framework, url):
    """Return ``served(**settings)``: a model of the framework over the server."""
    made = []
    yield lambda **given: made.append(framework.make(url, **given)) or made[-1]
    for llm in made:
        llm.kv.close()


def account(llm):
    report = llm.last_report.to_dict()
    report |= {f"decode.{name}": each for name, each in report.pop("decode").items()}
    return {name: report[name] for name in report if name not in TIMES | {"positions"}}


def test_the_same_pipeline_gives_the_same_answers(make_engine, framework, served):
    here = framework.make(kv=make_engine(store=NO_CONVERSATIONS), sink_from=framework.chain)
    there = served(sink_from=framework.chain)
    assert framework.sink(there) == framework.sink(here)
    assert '"answer": ...}' in framework.sink(there)
    assert framework.rag(there, QUESTION) == framework.rag(here, QUESTION)
    assert account(there) == account(here)
    assert there.last_report.tokens.reused > 100
    assert framework.text(there, PROMPT) == framework.text(here, PROMPT)
    assert account(there) == account(here)
    assert there.kv.info.fingerprint == here.kv.info.fingerprint
    assert there.kv.contains(some_chunks()[0], sink=framework.sink(there))


async def test_tasks_and_streams_give_the_same(kv, framework, served):
    here, there = framework.make(kv=kv), served()
    prompts = [f"{PROMPT} {at}" for at in range(4)]
    expected = [framework.text(here, each) for each in prompts]
    assert await asyncio.gather(*(framework.atext(there, each) for each in prompts)) == expected
    pieces = [piece async for piece in framework.apieces(there, prompts[0])]
    assert len(pieces) > 3
    assert "".join(pieces) == "".join(framework.pieces(there, prompts[0])) == expected[0]


def test_the_frameworks_own_client_of_openai(kv, url, framework):
    llm, here = framework.openai(url, 12), framework.make(kv=kv)
    kv.precompute(some_chunks())
    expected = framework.text(here, PROMPT)
    assert framework.text(llm, PROMPT) == expected
    assert "".join(framework.pieces(llm, PROMPT)) == expected


def test_chunks_expire_with_their_document(kv, url):
    llm = ChatRagKV(base_url=url)
    assert llm.precompute(DOCUMENTS, document="d", expires_in=3600).new == 3
    assert llm.kv.contains(some_chunks()[0])
    assert kv.contains(some_chunks()[0])
    assert llm.precompute(DOCUMENTS[:2], document="d").removed == 1
    assert llm.kv.forget(document="d") == 2
    assert not llm.kv.forget(some_chunks()[0])
    llm.kv.close()


def test_what_llama_index_asks_of_the_model(kv, url):
    llm = RagKVLLM(
        api_base=url, is_chat_model=True, context_window=100_000, reuse=ReuseConfig(history=False)
    )
    assert llm.metadata.context_window == kv.loaded.positions
    helper, here = (RagKVPromptHelper.from_llm(each) for each in (llm, RagKVLLM(kv=kv)))
    template = PromptTemplate("{context_str}")
    assert helper.repack(template, some_chunks()) == here.repack(template, some_chunks())
    ids = tiny_tokenizer()(QUESTION, add_special_tokens=False)["input_ids"]
    assert llm.kv.tokenize(QUESTION) == ids
    with pytest.raises(ConfigError, match="chat template"):
        llm.messages_to_prompt([ChatMessage(PROMPT)])
    given = {"is_chat_model": True, "max_new_tokens": 12}
    own = RagKVLLM(api_base=url, messages_to_prompt=lambda each: each[-1].content, **given)
    assert own.chat([ChatMessage(PROMPT)]).message.content == own.complete(PROMPT).text
    for each in (llm, own):
        each.kv.close()


# ---- keys


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


def test_a_key_of_llama_indexs_is_neither_written_nor_pickled(make_engine, monkeypatch):
    kv = make_engine(namespace="team")
    with listening(kv, keys={"open-sesame": "team"}) as url:
        llm = RagKVLLM(api_base=url, api_key="open-sesame", max_new_tokens=3, timeout=30)
        written = llm.to_dict()
        shown = [repr(llm), repr(llm.source), json.dumps(written, default=str)]
        assert not any("open-sesame" in text for text in shown)
        assert (written["api_base"], written["left_out"]) == (url, ["api_key"])
        with pytest.raises(ConfigError, match="api_key="):
            RagKVLLM.from_dict(written)
        again = RagKVLLM.from_dict(written, api_key="open-sesame")
        assert again.complete(PROMPT).text == llm.complete(PROMPT).text
        assert (again.timeout, again.sink) == (30, llm.sink)

        travelled = pickle.dumps(RagKVTransform(llm=llm))
        assert b"open-sesame" not in travelled
        with pytest.raises(ServerError, match="RAGKV_API_KEY"):
            pickle.loads(travelled)(NODES)
        monkeypatch.setenv("RAGKV_API_KEY", "open-sesame")
        worker = pickle.loads(travelled)
        assert worker(NODES) == NODES
        assert kv.contains(some_chunks()[0], sink=llm.sink)
        with pytest.raises(ConfigError, match="namespace"):
            RagKVLLM(api_base=url, namespace="other")
        for each in (llm.kv, again.kv, worker._source.get()):
            each.close()


# ---- whose the model is


@pytest.mark.parametrize(
    ("name", "local"),
    [
        ("langchain", {"device": "cpu"}),
        ("langchain", {"dtype": "float32"}),
        ("langchain", {"prompt_lookup_num_tokens": 3}),
        ("llama_index", {"model": object()}),
        ("llama_index", {"tokenizer": object()}),
        ("llama_index", {"tokenizer_name": "another"}),
        ("llama_index", {"device_map": "cpu"}),
        ("llama_index", {"model_kwargs": {"dtype": "float32"}}),
        ("llama_index", {"tokenizer_kwargs": {"use_fast": True}}),
        *((each, {"store": ":memory:"}) for each in FRAMEWORKS),
        *((each, {"on_unsupported": "full"}) for each in FRAMEWORKS),
    ],
)
def test_what_a_model_here_would_need_is_refused_by_name(name, local):
    with pytest.raises(REFUSED, match=next(iter(local))):
        FRAMEWORKS[name].make(NOWHERE, **local)


@pytest.mark.parametrize("remote", [{"api_key": "k"}, {"timeout": 3}, {"max_retries": 0}])
def test_what_only_a_server_has_is_refused_by_name(kv, remote):
    for here in ({"model_name": "none"}, {"kv": kv}):
        with pytest.raises(ConfigError, match=next(iter(remote))):
            RagKVLLM(**here, **remote)


def test_a_server_that_is_not_there(framework):
    with pytest.raises(ServerError, match=r"127\.0\.0\.1:9 cannot be reached"):
        framework.make(NOWHERE, max_retries=0)


def test_a_client_takes_an_engines_place(url, framework, served):
    with RemoteRagKV(url) as kv:
        assert framework.text(framework.make(kv=kv), QUESTION)
        with pytest.raises(REFUSED, match=r"base_url|api_base"):
            framework.make(url, kv=kv)
        name = kv.info.name
        assert served(name=name).model_name == name
        with pytest.raises(ServerError, match="another"):
            framework.text(served(name="another"), QUESTION)


def test_what_the_wrappers_make_of_a_client(url):
    with RemoteRagKV(url) as kv:
        assert TextModel(kv=kv, max_tokens=4).invoke(QUESTION)
        RagKVTransformer(kv=kv).transform_documents(DOCUMENTS)
        retriever = RagKVRetriever(retriever=RunnableLambda(lambda _: DOCUMENTS), kv=kv)
        assert len(retriever.invoke(QUESTION)) == 3
        with pytest.raises(ValidationError, match="model_id"):
            ChatRagKV(kv=kv, model_id="another")
        assert RagKVLLM(kv=kv, max_new_tokens=3).to_dict()["left_out"] == ["kv"]
