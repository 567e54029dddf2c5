"""A LangChain agent that calls a retriever tool twice, and answers.

Run it with ``python examples/agents/langchain_agent.py``; it downloads nothing. The packaged
model is so small that the agent decides for it when to search (``tool_choice``, by a middleware);
what to search for, and the answer, are the model's own.
"""

from __future__ import annotations

from collections.abc import Callable
from pydoc_data.topics import topics
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, wrap_model_call
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.messages import ToolMessage
from langchain_core.tools import create_retriever_tool
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_ragkv import ChatRagKV

from ragkv import RagKV

SEARCHES = 2
QUESTION = "When is the else clause of a for loop executed?"


@wrap_model_call
def search_first(request: ModelRequest, handler: Callable[[ModelRequest], Any]) -> Any:
    """Have the model search twice, and answer then."""
    results = sum(isinstance(message, ToolMessage) for message in request.messages)
    return handler(request.override(tool_choice="any" if results < SEARCHES else "none"))


def main(
    model: Any = None, tokenizer: Any = None, max_new_tokens: int = 64
) -> list[dict[str, Any]]:
    """Let the agent answer; return the report of each step."""
    names = ("for", "while", "try", "with", "if", "break")
    chunks = [Document(topics[name][:1200].strip()) for name in names]
    vectors = InMemoryVectorStore.from_documents(chunks, DeterministicFakeEmbedding(size=64))
    retriever = vectors.as_retriever(search_kwargs={"k": 2})
    search = create_retriever_tool(retriever, "search", "Searches the language reference.")

    kv = RagKV(model, tokenizer, store=":memory:")
    llm = ChatRagKV(kv=kv, max_tokens=max_new_tokens, sink_tools=[search])
    llm.precompute(chunks)
    agent = create_agent(llm, [search], middleware=[search_first])

    reports = []
    for step in agent.stream({"messages": [("human", QUESTION)]}, stream_mode="updates"):
        for message in (step.get("model") or {}).get("messages", []):
            report = message.response_metadata["ragkv"]
            reports.append(report)
            said = [call["args"] for call in message.tool_calls] or message.text
            computed = report["tokens"]["fresh"] + report["tokens"]["recomputed"]
            share = 1 - computed / report["tokens"]["prompt"]
            print(f"{report['tokens']['prompt']} prompt tokens, {share:.0%} reused, ", end="")
            print(f"first token after {report['ttft_s']:.2f} s: {said}")
    return reports


if __name__ == "__main__":
    main()
