"""Chunks that were encoded once, behind one sink, serve every chain of LangChain."""

import pytest
from langchain.agents import create_agent
from langchain_classic.chains import create_history_aware_retriever, create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_core.tools import create_retriever_tool
from langchain_openai import ChatOpenAI
from langchain_ragkv import ChatRagKV, RagKVLLM, RagKVRetriever
from listening import listening
from tiny import some_chunks

from ragkv import ReuseConfig

SYSTEM = ChatPromptTemplate(
    [("system", "Answer from the text.\n\n{context}"), ("human", "{input}")]
)
OTHER = ChatPromptTemplate([("human", "Here is what was found:\n\n{context}\n\n{input}")])
TURNS = ChatPromptTemplate(
    [
        ("system", "Stay polite.\n\n{context}"),
        ("placeholder", "{chat_history}"),
        ("human", "{input}"),
    ]
)
CITED = PromptTemplate.from_template("[{number}]\n{page_content}")
COMPLETION = PromptTemplate.from_template("{context}\n\nQ: {input}\nA:")
QUESTION = "What is a target list?"


def documents():
    return [
        Document(text, metadata={"source": f"{at}.md"}) for at, text in enumerate(some_chunks())
    ]


@pytest.fixture
def llm(make_engine):
    kv = make_engine(reuse=ReuseConfig(history=False, on_miss="skip"))
    kv.reuse = kv.reuse.override(sink=ChatRagKV(kv=kv, sink_from=SYSTEM)._sink)
    llm = ChatRagKV(kv=kv, max_tokens=4)
    llm.precompute(documents())
    return llm


def retriever(llm):
    return RagKVRetriever(retriever=RunnableLambda(lambda _: documents()), llm=llm)


def join(found):
    return "\n\n".join(document.page_content for document in found)


def cite(found):
    return "\n\n".join(f"[{at}]\n{each.page_content}" for at, each in enumerate(found, 1))


def numbered(found):
    return [
        Document(each.page_content, metadata={"number": at}) for at, each in enumerate(found, 1)
    ]


def piped(context, prompt, kind=ChatRagKV):
    """Return a chain of the retriever, a way to join its documents, a prompt and a model."""

    def ask(llm):
        model = llm if kind is ChatRagKV else kind(kv=llm.kv, max_tokens=4)
        found = {"context": retriever(llm) | context, "input": RunnablePassthrough()}
        (found | prompt | model).invoke(QUESTION)

    return ask


def stuffed_citations(llm):
    stuff = create_stuff_documents_chain(llm, OTHER, document_prompt=CITED)
    create_retrieval_chain(retriever(llm) | numbered, stuff).invoke({"input": QUESTION})


def conversation(llm, found):
    asking = ChatPromptTemplate([("placeholder", "{chat_history}"), ("human", "{input}")])
    aware = create_history_aware_retriever(llm, found, asking)
    return create_retrieval_chain(aware, create_stuff_documents_chain(llm, TURNS))


def history_aware(llm):
    given = {"input": QUESTION, "chat_history": [("human", "Hello"), ("ai", "Hello")]}
    conversation(llm, retriever(llm)).invoke(given)


CHAINS = {
    "own prompt": piped(join, SYSTEM),
    "another prompt": piped(join, OTHER),
    "citations": piped(cite, SYSTEM),
    "stuffed citations": stuffed_citations,
    "history-aware": history_aware,
    "completion": piped(join, COMPLETION, RagKVLLM),
}


@pytest.mark.parametrize("chain", CHAINS)
def test_a_chain_reuses_the_corpus(llm, reports, chain):
    CHAINS[chain](llm)
    assert sorted(use.text for use in reports[-1].chunks) == sorted(some_chunks())
    assert not reports[-1].misses


def test_an_agent_reuses_the_corpus(llm, reports, make_say):
    search = create_retriever_tool(retriever(llm), "search", "Searches.")
    call = '<tool_call>{"name": "search", "arguments": {"query": "list"}}</tool_call>'
    make_say(llm.kv, call, "Yes.")
    llm.max_tokens = 60
    agent = create_agent(llm, [search], system_prompt="Be brief.")
    assert agent.invoke({"messages": [("human", QUESTION)]})["messages"][-1].text == "Yes."
    assert [len(report.chunks) for report in reports] == [0, 3]
    assert not [miss for report in reports for miss in report.misses]


def test_another_client_s_prompts_reuse_the_corpus(llm, reports):
    with listening(llm.kv) as url:
        other = ChatOpenAI(base_url=f"{url}/v1", model="default", api_key="none", max_tokens=4)
        (OTHER | other).invoke({"context": join(documents()), "input": QUESTION})
    assert len(reports[-1].chunks) == 3
    assert not reports[-1].misses


@pytest.mark.parametrize("kind", [ChatRagKV, RagKVLLM])
@pytest.mark.parametrize("given", [{"sink": "Read this.\n"}, {"sink_from": SYSTEM}])
def test_models_over_one_engine_share_its_sink(folder, kind, given):
    llm = kind(model_id=folder, store=":memory:", **given)
    assert llm.kv.reuse.sink == llm._sink
    llm.precompute(documents())
    for other in (ChatRagKV(kv=llm.kv), RagKVLLM(kv=llm.kv)):
        assert all(other.kv.contains(text) for text in some_chunks())
        assert other.precompute(documents()).new == 0
    ChatRagKV(kv=llm.kv, sink="Another.")
    assert llm.kv.reuse.sink == llm._sink, "a given engine keeps its own"
    llm.kv.close()


def test_an_agent_s_own_head_is_its_sink(make_engine, make_say):
    search = create_retriever_tool(RunnableLambda(lambda _: documents()), "search", "Searches.")
    head = ChatPromptTemplate([("system", "Be brief."), ("human", "{input}")])
    llm = ChatRagKV(kv=make_engine(), sink_from=head, sink_tools=[search], max_tokens=4)
    llm.precompute(documents())
    agent = create_agent(llm, [search], system_prompt="Be brief.")
    agent.invoke({"messages": [("human", some_chunks()[0])]})
    report = llm.last_report
    assert not report.warnings
    assert report.tokens.sink == report.chunks[0].start > 20
    assert report.tokens.exact > report.tokens.sink


@pytest.mark.parametrize("streaming", [False, True])
def test_every_turn_of_a_conversation_reuses_its_own_document(make_engine, streaming):
    llm = ChatRagKV(kv=make_engine(reuse=ReuseConfig()), max_tokens=12)
    left = iter(documents())
    llm.precompute(some_chunks())
    chain = conversation(llm, RunnableLambda(lambda _: [next(left)]))
    history = []
    for text in some_chunks():
        given = {"input": f"{QUESTION} And {len(history)} more?", "chat_history": history}
        if streaming:
            answer = "".join(part.get("answer", "") for part in chain.stream(given))
        else:
            answer = chain.invoke(given)["answer"]
        history += [HumanMessage(given["input"]), AIMessage(answer)]
        assert {use.text for use in llm.last_report.chunks if use.reused} == {text}
    assert "earlier answers were recomputed" in " ".join(llm.last_report.warnings)
