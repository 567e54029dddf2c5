"""A history-aware chain puts what it retrieved before the conversation."""

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

from ragkv import ReuseConfig

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
def test_every_turn_reuses_what_it_retrieved(make_engine, streaming):
    kv = make_engine(reuse=ReuseConfig())
    llm = ChatRagKV(kv=kv, max_tokens=12)
    asked = iter(some_chunks(3))  # other documents each time
    retriever = RunnableLambda(lambda _: [Document(next(asked))])
    llm.precompute(some_chunks(3))
    chain = create_retrieval_chain(
        create_history_aware_retriever(llm, retriever, REWRITE),
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
        reused = {use.text for use in llm.last_report.chunks if use.reused}
        assert reused == {some_chunks(3)[len(history) // 2 - 1]}
    assert "earlier answers were recomputed" in " ".join(llm.last_report.warnings)
