"""A history-aware chain puts what it retrieved before the conversation: turns are found."""

from __future__ import annotations

import pytest
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.chains.history_aware_retriever import create_history_aware_retriever
from langchain_classic.chains.retrieval import create_retrieval_chain
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.runnables import RunnableLambda
from langchain_ragkv import ChatRagKV
from tiny import some_chunks

from ragkv.store.base import TURNS

QUESTIONS = [
    "What is a target list, and where may it stand in an assignment?",
    "And what happens to the items of an iterable on the right hand side?",
    "Which of the two is evaluated first, and how can one tell?",
]
REWRITE = ChatPromptTemplate.from_messages(
    [
        MessagesPlaceholder("chat_history"),
        ("human", "{input}"),
        ("human", "Write the last question so that it stands alone."),
    ]
)
ANSWER = ChatPromptTemplate.from_messages(
    [
        ("system", "Answer from this:\n\n{context}"),
        MessagesPlaceholder("chat_history"),
        ("human", "{input}"),
    ]
)


@pytest.mark.parametrize("streaming", [False, True])
def test_the_third_turn_reuses_the_first_two(make_engine, streaming):
    kv = make_engine()
    quiet = ChatRagKV(kv=kv, max_tokens=40)
    llm = quiet.bind(remember_turns=True)
    asked = iter(some_chunks(3))  # other documents each time
    retriever = RunnableLambda(lambda _: [Document(next(asked))])
    quiet.precompute(some_chunks(3))
    chain = create_retrieval_chain(
        create_history_aware_retriever(quiet, retriever, REWRITE),
        create_stuff_documents_chain(llm, ANSWER),
    )
    history = []
    for question in QUESTIONS:
        given = {"input": question, "chat_history": history}
        if streaming:
            answer = "".join(part.get("answer", "") for part in chain.stream(given))
        else:
            answer = chain.invoke(given)["answer"]
        history += [HumanMessage(question), AIMessage(answer)]
        kv.wait()
    said = [text for text in (message.content.strip() for message in history) if len(text) >= 16]
    assert {QUESTIONS[0], QUESTIONS[1]} < set(said)
    assert [info.text for info in kv._store.entries_of(TURNS)] == said
    reused = [use.text for use in quiet.last_report.chunks if use.reused]
    assert reused == [some_chunks(3)[2], *said[: said.index(QUESTIONS[2])]]
