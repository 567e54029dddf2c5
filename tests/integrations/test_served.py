"""Both frameworks against a server: what they refuse alike, and whose the model is."""

from __future__ import annotations

import pytest
from langchain_core.documents import Document
from langchain_core.runnables import RunnableLambda
from langchain_ragkv import ChatRagKV, RagKVRetriever, RagKVTransformer
from langchain_ragkv import RagKVLLM as TextModel
from listening import listening
from llama_index.llms.ragkv import RagKVLLM
from pydantic import ValidationError
from tiny import some_chunks

from ragkv.client import RemoteRagKV
from ragkv.errors import ConfigError, ServerError

QUESTION = "What is a target list?"
NOWHERE = "http://127.0.0.1:9"
MAKERS = {
    "langchain": lambda url=None, name=None, **given: ChatRagKV(
        base_url=url, model_id=name, max_tokens=4, **given
    ),
    "llama_index": lambda url=None, name=None, **given: RagKVLLM(
        api_base=url, model_name=name, max_new_tokens=4, **given
    ),
}
ASK = {
    "langchain": lambda llm: llm.invoke(QUESTION).content,
    "llama_index": lambda llm: llm.complete(QUESTION).text,
}
REFUSED = (ConfigError, ValidationError)


@pytest.fixture
def url(make_engine):
    with listening(make_engine()) as url:
        yield url


@pytest.mark.parametrize(
    ("framework", "local"),
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
        *((each, {"store": ":memory:"}) for each in MAKERS),
        *((each, {"on_unsupported": "full"}) for each in MAKERS),
    ],
)
def test_what_a_model_here_would_need_is_refused_by_name(framework, local):
    with pytest.raises(REFUSED, match=next(iter(local))):
        MAKERS[framework](NOWHERE, **local)


@pytest.mark.parametrize("framework", MAKERS)
def test_a_server_that_is_not_there(framework):
    with pytest.raises(ServerError, match=r"127\.0\.0\.1:9 cannot be reached"):
        MAKERS[framework](NOWHERE, max_retries=0)


@pytest.mark.parametrize("framework", MAKERS)
def test_a_client_takes_an_engines_place(url, framework):
    make, ask = MAKERS[framework], ASK[framework]
    with RemoteRagKV(url) as kv:
        assert ask(make(kv=kv))
        with pytest.raises(REFUSED, match=r"base_url|api_base"):
            make(url, kv=kv)
        name = kv.info.name
        named, other = make(url, name), make(url, "another")
        assert named.model_name == name
        with pytest.raises(ServerError, match="another"):
            ask(other)
        for each in (named, other):
            each.kv.close()


def test_what_langchain_makes_of_a_client(url):
    documents = [Document(text) for text in some_chunks()]
    with RemoteRagKV(url) as kv:
        assert TextModel(kv=kv, max_tokens=4).invoke(QUESTION)
        RagKVTransformer(kv=kv).transform_documents(documents)
        retriever = RagKVRetriever(retriever=RunnableLambda(lambda _: documents), kv=kv)
        assert len(retriever.invoke(QUESTION)) == 3
        with pytest.raises(ValidationError, match="model_id"):
            ChatRagKV(kv=kv, model_id="another")


def test_what_llama_index_writes_of_a_client(url):
    with RemoteRagKV(url) as kv:
        assert RagKVLLM(kv=kv, max_new_tokens=3).to_dict()["left_out"] == ["kv"]
