"""A LlamaIndex FunctionAgent that calls a query tool, and answers.

Run it with ``python examples/agents/llama_index_agent.py``; it downloads nothing. The packaged
model is so small that it is told to search first (``initial_tool_choice``); what to search for,
and the answer, are its own.
"""

from __future__ import annotations

import asyncio
from pydoc_data.topics import topics
from typing import Any

from llama_index.core import MockEmbedding, VectorStoreIndex
from llama_index.core.agent.workflow import AgentOutput, FunctionAgent
from llama_index.core.schema import TextNode
from llama_index.core.tools import FunctionTool
from llama_index.llms.ragkv import RagKVLLM, RagKVTransform
from pydantic import BaseModel, Field

QUESTION = "When is the else clause of a for loop executed?"


class Search(BaseModel):
    """What the tool takes: a small model ends a longer query only at its limit."""

    query: str = Field(max_length=80)


async def answer(llm: RagKVLLM, search: FunctionTool) -> list[dict[str, Any]]:
    """Run the agent; return the report of each step."""
    agent = FunctionAgent(tools=[search], llm=llm, initial_tool_choice="search")
    reports = []
    handler = agent.run(QUESTION)
    async for event in handler.stream_events():
        if not isinstance(event, AgentOutput) or llm.last_report is None:
            continue
        report = llm.last_report
        reports.append(report.to_dict())
        said = [call.tool_kwargs for call in event.tool_calls] or event.response.content
        share = 1 - (report.tokens.fresh + report.tokens.recomputed) / report.tokens.prompt
        print(f"{report.tokens.prompt} prompt tokens, {share:.0%} reused, ", end="")
        print(f"first token after {report.ttft_s:.2f} s: {said}")
    await handler
    return reports


def main(
    model: Any = None, tokenizer: Any = None, max_new_tokens: int = 64
) -> list[dict[str, Any]]:
    """Index a few texts and let the agent answer; return the report of each step."""
    settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "is_chat_model": True}
    llm = RagKVLLM(model=model, tokenizer=tokenizer, store=":memory:", **settings)

    def find(query: str) -> str:
        """Search the language reference."""
        return "\n\n".join(found.get_content() for found in retriever.retrieve(query))

    search = FunctionTool.from_defaults(find, name="search", fn_schema=Search)
    head = [{"role": "user", "content": "{question}"}]
    llm.sink = llm.kv.sink_from(head, [search.metadata.to_openai_tool()])

    names = ("for", "while", "try", "with")
    nodes = RagKVTransform(llm=llm)([TextNode(text=topics[name][:1200].strip()) for name in names])
    index = VectorStoreIndex(nodes, embed_model=MockEmbedding(embed_dim=8))
    retriever = index.as_retriever(similarity_top_k=2)
    return asyncio.run(answer(llm, search))


if __name__ == "__main__":
    main()
