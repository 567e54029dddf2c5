"""LangChain: chunks that a retriever found and that are not reused are in the answer's metadata."""

import asyncio

import pytest
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_ragkv import ChatRagKV, RagKVRetriever
from listening import listening
from tiny import some_chunks

from ragkv.client import RemoteRagKV
from ragkv.report.reasons import REASONS

TEXTS = [f"{text}\n\tand so on, {at} times." for at, text in enumerate(some_chunks(3))]
DOCUMENTS = [Document(text, metadata={"source": f"{at}.md"}) for at, text in enumerate(TEXTS)]
PROMPT = ChatPromptTemplate([("human", "{context}\n\nQuestion: {question}")])
JOINED = RunnableLambda(lambda found: "\n\n".join(each.page_content for each in found))


def chain(llm, context, *, prompt=PROMPT, named=True, document_prompt=None):
    found = RunnableLambda(lambda _: DOCUMENTS)
    if named:
        found = RagKVRetriever(retriever=found, llm=llm, document_prompt=document_prompt)
    given = found if context is None else found | context
    return {"context": given, "question": RunnablePassthrough()} | prompt | llm


def reasons(message):
    misses = message.response_metadata["ragkv"]["misses"]
    for miss in misses:
        assert miss["mend"].startswith(REASONS[miss["reason"]].mend)
    return [miss["reason"] for miss in misses]


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("way", ["invoke", "ainvoke", "stream"])
def test_a_retriever_that_is_piped_into_a_prompt(make_engine, caplog, way, named):
    kv = make_engine()
    llm = ChatRagKV(kv=kv, max_tokens=2)
    llm.precompute(DOCUMENTS)
    rag = chain(llm, None, named=named)
    if way == "invoke":
        message = rag.invoke("What?")
    elif way == "ainvoke":
        message = asyncio.run(rag.ainvoke("What?"))
    else:
        first, *parts = rag.stream("What?")
        message = sum(parts, first)
    assert reasons(message) == ["list"] * 3
    assert '"\\n\\n".join(d.page_content for d in found)' in caplog.text
    assert message.response_metadata["ragkv"]["warnings"]


@pytest.mark.parametrize(
    "template", ["{page_content}", "{source}: {page_content}", "{source}\n{page_content}\n---"]
)
def test_documents_that_the_chain_renders_otherwise(make_engine, template):
    llm = ChatRagKV(kv=make_engine(), max_tokens=2)
    ingested = PromptTemplate.from_template("From {source} of the manual:\n\n{page_content}")
    llm.precompute(DOCUMENTS, document_prompt=ingested)
    rendered = RunnableLambda(
        lambda found: "\n\n".join(
            template.format(**each.metadata, page_content=each.page_content) for each in found
        )
    )
    rag = chain(llm, rendered, document_prompt=ingested)
    assert reasons(rag.invoke("What?")) == ["metadata"] * 3


@pytest.mark.parametrize(
    ("context", "count"),
    [
        (RunnableLambda(lambda found: found[0].page_content), 2),
        (RunnableLambda(lambda found: ", ".join(each.metadata["source"] for each in found)), 3),
        (RunnableLambda(lambda found: "\n\n".join(each.page_content for each in found[1:])), 1),
    ],
)
def test_documents_that_are_left_out(make_engine, context, count):
    llm = ChatRagKV(kv=make_engine(), max_tokens=2)
    llm.precompute(DOCUMENTS)
    assert reasons(chain(llm, context).invoke("What?")) == ["left_out"] * count
    forgetful = ChatPromptTemplate([("human", "Question: {question}")])
    assert reasons(chain(llm, JOINED, prompt=forgetful).invoke("What?")) == ["left_out"] * 3
    assert reasons(llm.invoke("Hello.")) == []


def test_all_reused_says_nothing(make_engine, caplog):
    llm = ChatRagKV(kv=make_engine(), max_tokens=2)
    llm.precompute(DOCUMENTS)
    message = chain(llm, JOINED).invoke("What?")
    assert reasons(message) == []
    assert not message.response_metadata["ragkv"]["warnings"]
    assert not caplog.records


def test_a_server(make_engine):
    kv = make_engine()
    kv.precompute(TEXTS[:2])
    with listening(kv) as url, RemoteRagKV(url) as remote:
        llm = ChatRagKV(kv=remote, max_tokens=2)
        assert sorted(reasons(chain(llm, None).invoke("What?"))) == ["list"] * 3
        message = chain(llm, RunnableLambda(lambda found: found[2].page_content)).invoke("So?")
        assert sorted(reasons(message)) == ["absent", "left_out", "left_out"]
        assert reasons(llm.invoke("Hello.")) == []
        raw = remote.generate(
            "Hello.\n\n" + TEXTS[0].upper(), retrieved=TEXTS[:1], max_new_tokens=2
        )
        assert [miss.reason for miss in raw.report.misses] == ["case"]


def test_many_questions_at_once_get_their_own_documents_alone(make_engine):
    texts = some_chunks(12)
    pairs = {f"Question {at}?": texts[2 * at : 2 * at + 2] for at in range(6)}
    llm = ChatRagKV(kv=make_engine(), max_tokens=2).bind(on_miss="skip")
    found = RunnableLambda(lambda asked: [Document(f"{text}\nend") for text in pairs[asked]])
    first = RunnableLambda(lambda found: f"{found[:1]}")
    retriever = RagKVRetriever(retriever=found, llm=llm)
    rag = {"context": retriever | first, "question": RunnablePassthrough()} | PROMPT | llm
    messages = asyncio.run(rag.abatch(list(pairs))) + rag.batch(list(pairs))
    for asked, message in zip([*pairs] * 2, messages, strict=True):
        misses = message.response_metadata["ragkv"]["misses"]
        found = {miss["chunk"]: miss["reason"] for miss in misses}
        first, second = (f"{text}\nend"[:80] for text in pairs[asked])
        # several retrievals wait: what is not in the prompt may be another one's
        assert found in ({first: "list"}, {first: "list", second: "left_out"})
