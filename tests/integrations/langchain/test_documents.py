"""RagKVRetriever and RagKVTransformer."""

import asyncio
from functools import cache

import pytest
import torch
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import ConfigurableField, RunnableLambda
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_ragkv import ChatRagKV, RagKVLLM, RagKVRetriever, RagKVTransformer
from pydantic import ValidationError
from tiny import some_chunks, tiny_model, tiny_tokenizer

from ragkv import RagKV
from ragkv.errors import ConfigError, ModelNotFoundError

DOCUMENTS = [Document(text, metadata={"page": i}) for i, text in enumerate(some_chunks(5))]
RENDERED = PromptTemplate.from_template("Page {page}: {page_content}")
PROMPT = ChatPromptTemplate.from_messages([("system", "{context}"), ("human", "{input}")])


@cache
def engine() -> RagKV:
    return RagKV(tiny_model(), tiny_tokenizer(), store=":memory:")


@pytest.fixture
def named(monkeypatch):
    """The texts that the engine was told of."""
    texts: list[str] = []
    monkeypatch.setattr(engine(), "prefetch", lambda found, **_: texts.extend(found))
    return texts


class Account(BaseCallbackHandler):
    """Keeps the report of the last answer."""

    def on_llm_end(self, response, **kwargs):
        self.report = response.generations[0][0].message.response_metadata["ragkv"]


class Fixed(BaseRetriever):
    """Knows no number of documents."""

    def _get_relevant_documents(self, query, *, run_manager):
        return DOCUMENTS


class WithField(Fixed):
    """Has the number as a field, like the keyword retrievers."""

    k: int = 1

    def _get_relevant_documents(self, query, *, run_manager):
        return DOCUMENTS[: self.k]


class WithArgument(Fixed):
    """Takes other arguments, and no number."""

    def _get_relevant_documents(self, query, *, run_manager, tag="a"):
        return [Document(tag + document.page_content) for document in DOCUMENTS]


def vectors():
    store = InMemoryVectorStore(DeterministicFakeEmbedding(size=16))
    store.add_documents(DOCUMENTS)
    return store.as_retriever(search_kwargs={"k": 2})


RETRIEVERS = {
    "vectors": (vectors, 2),
    "fixed": (Fixed, 5),
    "field": (WithField, 1),
    "argument": (WithArgument, 5),
    "runnable": (lambda: RunnableLambda(lambda query: list(DOCUMENTS)), 5),
}


@pytest.mark.parametrize("kind", RETRIEVERS)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_any_retriever_names_what_it_found(kind, asynchronous, named):
    make, count = RETRIEVERS[kind]

    def invoke(retriever, **kwargs):
        del named[:]
        found = (
            asyncio.run(retriever.ainvoke("what?", **kwargs))
            if asynchronous
            else retriever.invoke("what?", **kwargs)
        )
        assert named == [document.page_content for document in found]
        return found

    inner = make()
    assert len(invoke(RagKVRetriever(retriever=inner, kv=engine()))) == count
    assert len(invoke(RagKVRetriever(retriever=inner, kv=engine(), k=3))) == 3
    assert len(invoke(RagKVRetriever(retriever=inner, kv=engine(), k=3), k=4)) == 4
    assert len(inner.invoke("what?")) == count


def test_other_arguments_reach_the_retriever(named):
    found = RagKVRetriever(retriever=WithArgument(), kv=engine()).invoke("what?", tag="b", k=1)
    assert found[0].page_content.startswith("b")


def test_documents_are_named_as_the_chain_renders_them(named):
    llm = ChatRagKV(kv=engine())
    RagKVRetriever(retriever=Fixed(), llm=llm, k=1, document_prompt=RENDERED).invoke("what?")
    assert named == ["Page 0: " + DOCUMENTS[0].page_content]


@pytest.mark.parametrize("which", [{}, {"kv": 1, "llm": 1}])
def test_one_engine_is_needed(which):
    given = {"kv": engine(), "llm": ChatRagKV(kv=engine())}
    given = {name: given[name] for name in which}
    with pytest.raises(ValidationError, match="either llm"):
        RagKVRetriever(retriever=Fixed(), **given)
    with pytest.raises(ConfigError, match="either llm"):
        RagKVTransformer(**given)


WRAPS = {
    "bind": lambda llm: llm.bind(stop=["a"]),
    "with_config": lambda llm: llm.with_config(tags=["a"]),
    "both": lambda llm: llm.bind(stop=["a"]).with_retry(),
}


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_bound_model_is_found_within(wrap):
    llm = ChatRagKV(kv=engine())
    bound = WRAPS[wrap](llm)
    retriever = RagKVRetriever(retriever=Fixed(), llm=bound)
    assert retriever.llm is llm
    assert retriever.invoke("What?")
    assert RagKVTransformer(llm=bound).transform_documents(DOCUMENTS[:1])


@pytest.mark.parametrize("wrong", ["a model", RunnableLambda(str)])
def test_another_model_is_refused(wrong):
    with pytest.raises(ValidationError, match="must be the ChatRagKV or RagKVLLM"):
        RagKVRetriever(retriever=Fixed(), llm=wrong)
    with pytest.raises(ConfigError, match="must be the ChatRagKV or RagKVLLM"):
        RagKVTransformer(llm=wrong)


def test_a_chunk_that_was_not_ingested_is_reused_by_the_second_prompt(make_engine):
    kv = make_engine()
    llm = ChatRagKV(kv=kv, max_tokens=4, sink_from=PROMPT)
    retriever = RagKVRetriever(retriever=Fixed(), llm=llm, k=2)
    chain = PROMPT | llm

    def reused():
        context = "\n\n".join(document.page_content for document in retriever.invoke("what?"))
        answer = chain.invoke({"context": context, "input": "what?"})
        kv.wait()
        return answer.usage_metadata["input_token_details"]["cache_read"]

    assert reused() < 20
    assert reused() > 50


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_transformer_precomputes_and_changes_nothing(asynchronous, make_engine):
    kv = make_engine()
    step = RagKVTransformer(kv=kv)
    before = [document.model_copy(deep=True) for document in DOCUMENTS]
    if asynchronous:
        after = asyncio.run(step.atransform_documents(DOCUMENTS))
    else:
        after = step.transform_documents(DOCUMENTS)
    assert after is DOCUMENTS
    assert before == DOCUMENTS
    assert all(kv.contains(document.page_content) for document in DOCUMENTS)


def test_documents_are_encoded_as_the_chain_renders_them(make_engine):
    kv = make_engine()
    llm = ChatRagKV(kv=kv, max_tokens=4, sink_from=PROMPT)
    rendered = [f"Page {i}: {text}" for i, text in enumerate(some_chunks(5))]
    RagKVTransformer(llm=llm, document_prompt=RENDERED).transform_documents(DOCUMENTS)
    account = Account()
    chain = create_stuff_documents_chain(llm, PROMPT, document_prompt=RENDERED)
    chain.invoke({"context": DOCUMENTS, "input": "what?"}, {"callbacks": [account]})
    assert len(account.report["chunks"]) == 5
    assert all(kv.contains(text, sink=llm._sink) for text in rendered)


@pytest.mark.parametrize("one", ["a text", Document("a text")])
def test_what_is_no_list_of_documents_is_refused(one):
    llm = ChatRagKV(kv=engine())
    with pytest.raises(ConfigError, match="Documents or strings"):
        llm.precompute([1])
    with pytest.raises(ConfigError, match="in a list"):
        llm.precompute(one)
    with pytest.raises(ConfigError, match="in a list"):
        RagKVTransformer(llm=llm).transform_documents(one)


def test_the_namespace_is_the_engines():
    kv = RagKV(tiny_model(), tiny_tokenizer(), store=":memory:", namespace="one")
    llm = ChatRagKV(kv=kv)
    assert llm.namespace == "one"
    assert llm.model_copy().namespace == ChatRagKV(kv=kv, namespace="one").namespace == "one"
    with pytest.raises(ValidationError, match="has namespace 'one'"):
        ChatRagKV(kv=kv, namespace="two")
    asked = llm.configurable_fields(namespace=ConfigurableField(id="tenant"))
    assert asked.with_config(configurable={"tenant": "one"}).invoke("Words").content
    with pytest.raises(ValidationError, match="has namespace 'one'"):
        asked.with_config(configurable={"tenant": "two"}).invoke("Words")


@pytest.mark.parametrize(
    "given", [{"store": ":memory:"}, {"model_id": "other/model"}, {"dtype": "bfloat16"}]
)
def test_what_would_be_dropped_beside_an_engine_is_refused(given):
    with pytest.raises(ValidationError, match=f"has its own {next(iter(given))}"):
        ChatRagKV(kv=engine(), **given)
    assert ChatRagKV(kv=engine(), model_id=engine().info.name, store=None).kv is engine()
    with pytest.raises(ValidationError, match="has its own store"):
        RagKVLLM(kv=engine(), store=":memory:")


@pytest.mark.parametrize("loading", [{}, {"model_kwargs": {"dtype": "float32"}}])
def test_an_object_that_made_its_engine_can_be_made_again_from_its_fields(folder, loading):
    llm = ChatRagKV.from_model_id(folder, store=":memory:", device="cpu", **loading)
    asked = llm.configurable_fields(recompute_ratio=ConfigurableField(id="ratio"))
    again = asked.with_config(configurable={"ratio": 0.5}).invoke("Words", max_tokens=2)
    assert again.response_metadata["ragkv"]["recompute_ratio"] == 0.5


def test_loading_options_without_a_name_are_of_the_embedded_model():
    llm = ChatRagKV.from_model_id(store=":memory:", model_kwargs={"dtype": torch.bfloat16})
    assert llm.kv.loaded.model.dtype == torch.bfloat16
    with pytest.raises(ModelNotFoundError):
        ChatRagKV.from_model_id("no/such-model", model_kwargs={"dtype": torch.bfloat16})


def test_ingestion_says_its_size_and_its_end_where_there_is_no_terminal(make_engine, capsys):
    documents = [Document(page_content=text) for text in some_chunks(4)]
    llm = ChatRagKV(kv=make_engine())
    llm.precompute(documents[:2])
    RagKVTransformer(llm=llm).transform_documents(documents[2:3])
    said = capsys.readouterr().err.splitlines()
    assert [line.split(" tokens")[0].rsplit(" of", 1)[0] for line in said[::2]] == [
        "ragkv: encoding 2 chunks",
        "ragkv: encoding 1 chunk",
    ]
    assert [line.split(",")[0] for line in said[1::2]] == [
        "ragkv: 2 chunks new",
        "ragkv: 1 chunk new",
    ]
    llm.precompute(documents[3:], show_progress=False)
    llm.precompute(documents)
    assert not capsys.readouterr().err
