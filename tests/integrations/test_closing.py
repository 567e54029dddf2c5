"""Wrappers end by ``close()`` or a ``with`` block, also with work in the background."""

import threading

import langchain_ragkv as langchain
import pytest
from langchain_core.documents import Document
from langchain_core.runnables import RunnableLambda
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.llms import ragkv as llama_index
from tiny import some_chunks

from ragkv.errors import ClosedError

PROMPT = "\n\n".join([*some_chunks(), "What is a target list?"])
DOCUMENTS = [Document(text) for text in some_chunks()]


class Nodes(BaseRetriever):
    def _retrieve(self, _: object) -> list[NodeWithScore]:
        return [NodeWithScore(node=TextNode(text=text)) for text in some_chunks()]


WRAPPERS = {
    "ChatRagKV": lambda kv: langchain.ChatRagKV(kv=kv),
    "LangChain's RagKVLLM": lambda kv: langchain.RagKVLLM(kv=kv),
    "LangChain's RagKVRetriever": lambda kv: langchain.RagKVRetriever(
        retriever=RunnableLambda(lambda _: DOCUMENTS), kv=kv
    ),
    "LangChain's RagKVStagedRetriever": lambda kv: langchain.RagKVStagedRetriever(
        stages=lambda _: [DOCUMENTS], kv=kv
    ),
    "LlamaIndex's RagKVLLM": lambda kv: llama_index.RagKVLLM(kv=kv),
    "LlamaIndex's RagKVRetriever": lambda kv: llama_index.RagKVRetriever(
        Nodes(), llama_index.RagKVLLM(kv=kv)
    ),
}


@pytest.mark.parametrize("made", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("by", ["close", "with"])
def test_a_wrapper_closes_its_engine(kv, made, by):
    others = set(threading.enumerate())
    kv.precompute(some_chunks())
    kv.generate(PROMPT, max_new_tokens=2)  # leaves healing to the background
    wrapper = made(kv)
    kv.prefetch(some_chunks())
    ended = [each for each in threading.enumerate() if each not in others]
    assert ended
    if by == "with":
        with wrapper as inside:
            assert inside is wrapper
    else:
        wrapper.close()
        wrapper.close()
    with pytest.raises(ClosedError, match="closed"):
        kv.generate(PROMPT, max_new_tokens=2)
    assert not [each for each in ended if each.is_alive()]


@pytest.mark.parametrize("by", ["close", "with"])
def test_a_model_over_a_server_closes_its_connection(framework, model, place, by):
    llm = model(2)
    assert framework.text(llm, PROMPT)
    if by == "with":
        with llm:
            pass
    else:
        llm.close()
    with pytest.raises(ClosedError):
        framework.text(llm, PROMPT)
