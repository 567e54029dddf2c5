"""What LangChain's users are used to: caches of answers, configurations, bound settings, dates."""

import asyncio
import copy
import pickle
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.globals import set_llm_cache
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import ConfigurableField
from langchain_ragkv import ChatRagKV, RagKVLLM, RagKVRetriever, RagKVTransformer
from pydantic import ValidationError
from tiny import some_chunks, tiny_model, tiny_tokenizer

from ragkv.errors import ConfigError


@pytest.fixture
def _answers_are_cached() -> Any:
    set_llm_cache(InMemoryCache())
    yield
    set_llm_cache(None)


@pytest.mark.usefixtures("_answers_are_cached")
def test_a_cache_of_answers_tells_settings_apart(kv):
    short, long = RagKVLLM(kv=kv, max_tokens=3), RagKVLLM(kv=kv, max_tokens=9)
    text = short.invoke("hey")
    assert len(long.invoke("hey")) > len(text)
    assert len(short.invoke("hey", max_new_tokens=9)) > len(text)
    assert len(asyncio.run(short.ainvoke("hey", max_new_tokens=6))) > len(text)
    answered = short.last_report
    assert short.invoke("hey") == asyncio.run(short.ainvoke("hey")) == text
    assert short.invoke("hey", max_new_tokens=9) == long.invoke("hey")
    assert short.last_report is answered, "each of these was known"


@pytest.mark.usefixtures("_answers_are_cached")
@pytest.mark.parametrize("kind", [RagKVLLM, ChatRagKV])
def test_a_cache_of_answers_knows_stops_and_serves_chains(kv, kind):
    llm, text = kind(kv=kv, max_tokens=9), StrOutputParser()
    chain = PromptTemplate.from_template("{q}") | llm | text
    whole = chain.invoke({"q": "hey"})
    answered = llm.last_report
    assert chain.invoke({"q": "hey"}) == whole
    assert llm.last_report is answered
    ending = kind(kv=kv, max_tokens=9, stop=[whole[-2:]]) | text
    assert whole.startswith(ended := ending.invoke("hey"))
    assert ended != whole


class OfTenants(BaseRetriever):
    """Finds what belongs to a tenant."""

    tenant: str = "none"
    k: int = 4

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun
    ) -> list[Document]:
        del query, run_manager
        return [Document(page_content=f"{self.tenant} {number}") for number in range(self.k)]


def test_a_wrapped_retriever_gets_the_whole_configuration(kv):
    inner = OfTenants().configurable_fields(tenant=ConfigurableField(id="tenant"))
    config: Any = {"configurable": {"tenant": "acme"}, "run_name": "outer"}
    retriever = RagKVRetriever(retriever=inner, kv=kv)
    expected = inner.invoke("q", config)
    assert retriever.invoke("q", config) == asyncio.run(retriever.ainvoke("q", config)) == expected
    assert expected[0].page_content == "acme 0"
    assert retriever.invoke("q")[0].page_content == "none 0"


def test_a_bound_retriever_returns_as_many_as_were_asked_for(kv):
    inner = OfTenants().with_config(tags=["x"])
    assert len(RagKVRetriever(retriever=inner, kv=kv, k=7).invoke("q")) == 7


def test_what_is_bound_holds_for_the_chunks_too(kv):
    sink = kv.sink_from([{"role": "system", "content": "You are a pirate.\n\n{context}"}])
    llm = ChatRagKV(kv=kv, max_tokens=3)
    bound = llm.bind(sink=sink, temperature=0.0)
    first, second, third = some_chunks(3)
    RagKVTransformer(llm=bound).transform_documents([Document(first)])
    assert kv.contains(first, sink=sink)
    assert not kv.contains(first)
    retriever = RagKVRetriever(retriever=OfTenants(), llm=bound)
    assert (retriever.llm, retriever.overrides) == (llm, {"sink": sink})
    named: list[dict[str, Any]] = []
    kv.prefetch = lambda _, **given: named.append(given)
    retriever.invoke("q")
    assert named == [{"for_next_answer": True, "sink": sink}]
    llm.precompute([second], sink=sink)
    assert kv.contains(second, sink=sink)
    llm.precompute([third])
    assert kv.contains(third)


def test_what_a_function_fills_in_is_no_part_of_the_sink(kv):
    days = iter(["2026-11-23", "2026-11-24"])
    system = ("system", "Be {tone}. Today is {date}.\n\n{context}")
    prompt = ChatPromptTemplate([system, ("human", "{question}")])
    prompt = prompt.partial(tone="brief", date=lambda: next(days))
    sinks = [ChatRagKV(kv=kv, sink_from=prompt)._sink for _ in range(2)]
    assert sinks[0] == sinks[1]
    assert str(sinks[0]).endswith("Be brief. Today is ")


@pytest.mark.parametrize(
    "text",
    [
        "A.\n{% for d in context %}{{ d.page_content }}{% endfor %}",
        "A.\n{{ context | upper }}",
        "{% if context is none %}{{ context }}{% endif %}",
    ],
)
def test_a_template_that_hides_its_documents_is_refused(kv, text):
    prompt = PromptTemplate.from_template(text, template_format="jinja2")
    with pytest.raises((ConfigError, ValidationError), match="does not write context verbatim"):
        ChatRagKV(kv=kv, sink_from=prompt)


def test_sampling_is_that_of_the_models_own_configuration(tmp_path):
    model = tiny_model()
    own = model.generation_config
    own.do_sample, own.top_k, own.temperature, own.top_p = True, 7, 0.3, 0.9
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    sampling = {"pipeline_kwargs": {"max_new_tokens": 5, "do_sample": True}, "store": ":memory:"}
    found = ChatRagKV.from_model_id(str(tmp_path), **sampling)
    names = ("temperature", "top_p", "top_k", "max_tokens")
    assert [getattr(found, name) for name in names] == [0.3, 0.9, 7, 5]
    sampling["pipeline_kwargs"] |= {"top_k": 50, "temperature": 0.1}
    found = ChatRagKV.from_model_id(str(tmp_path), top_p=0.5, **sampling)
    assert [getattr(found, name) for name in names] == [0.1, 0.5, 50, 5]


def test_what_cannot_be_done_is_said(kv):
    llm = ChatRagKV(kv=kv)
    with pytest.raises(TypeError, match="cannot be pickled: make one in each process"):
        pickle.dumps(llm)
    retriever = RagKVRetriever(retriever=OfTenants(), llm=llm)
    assert copy.deepcopy(retriever).llm is llm
    assert RagKVRetriever(retriever=OfTenants(), kv=kv).model_copy(deep=True).kv is kv
