"""What messages carry, and what is said of wrong arguments."""

from __future__ import annotations

from functools import cache

import pytest
from langchain_core.documents import Document
from langchain_core.runnables import RunnableLambda
from langchain_ragkv import ChatRagKV, RagKVLLM, RagKVRetriever, RagKVTransformer
from pydantic import ValidationError
from tiny import some_chunks, tiny_model, tiny_tokenizer

from ragkv import RagKV
from ragkv.errors import ConfigError


@cache
def engine() -> RagKV:
    kv = RagKV(tiny_model(), tiny_tokenizer(), store=":memory:")
    kv.precompute(some_chunks())
    return kv


def chat(**fields):
    return ChatRagKV(kv=engine(), **{"max_tokens": 12, **fields})


def test_the_account_does_not_repeat_the_prompt():
    prompt = "\n\n".join([*some_chunks(), "What is a target list?"])
    llm = chat()
    account = llm.invoke(prompt).response_metadata["ragkv"]
    assert llm.last_report.ttft_s == account["ttft_s"]
    assert llm.last_report.trace is not None
    whole = engine().generate(prompt, max_new_tokens=1).report.to_dict()
    assert set(account) == set(whole) - {"positions"}
    fields = {"start", "end", "reused", "recomputed", "source"}
    assert [set(use) for use in account["chunks"]] == [fields] * 3
    assert not any(text[:40] in str(account) for text in some_chunks())


def test_the_whole_report_of_a_text_model_is_at_hand():
    llm = RagKVLLM(kv=engine(), max_tokens=4)
    prompt = "\n\n".join([*some_chunks(), "What is a target list?"])
    for answer in (llm.invoke, lambda text: "".join(llm.stream(text))):
        llm._last_report = None
        assert answer(prompt)
        assert [use.text for use in llm.last_report.chunks] == some_chunks()


WRAPS = {
    "bind": lambda llm: llm.bind(stop=["a"]),
    "with_config": lambda llm: llm.with_config(tags=["a"]),
    "both": lambda llm: llm.bind(stop=["a"]).with_retry(),
}


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_bound_model_is_found_within(wrap):
    llm = chat()
    bound = WRAPS[wrap](llm)
    documents = RunnableLambda(lambda _: [Document(some_chunks(1)[0])])
    retriever = RagKVRetriever(retriever=documents, llm=bound)
    assert retriever.llm is llm
    assert retriever.invoke("What?")
    assert RagKVTransformer(llm=bound).transform_documents([Document(some_chunks(1)[0])])


@pytest.mark.parametrize("wrong", ["a model", RunnableLambda(str)])
def test_another_model_is_refused(wrong):
    documents = RunnableLambda(lambda _: [])
    with pytest.raises(ValidationError, match="must be the ChatRagKV or RagKVLLM"):
        RagKVRetriever(retriever=documents, llm=wrong)
    with pytest.raises(ConfigError, match="must be the ChatRagKV or RagKVLLM"):
        RagKVTransformer(llm=wrong)


def test_stop_sequences_end_an_answer_as_stop_does():
    whole = chat().invoke("Hello").content
    stop = whole[4:7]
    cut = whole[: whole.index(stop)]
    assert chat().invoke("Hello", stop_sequences=[stop]).content == cut
    assert chat(stop=["never"]).bind(stop_sequences=stop).invoke("Hello").content == cut
    assert chat().invoke("Hello", stop=["never"], stop_sequences=[stop]).content == whole


def test_what_is_no_document_is_refused():
    with pytest.raises(ConfigError, match="Documents or strings"):
        chat().precompute([1])
