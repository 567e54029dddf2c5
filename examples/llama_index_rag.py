"""LlamaIndex: the ordinary RAG pipeline and the same with ragkv, without any download."""

from __future__ import annotations

import pydoc_data.topics
import re
import zlib
from typing import Any

from llama_index.core import Document, VectorStoreIndex
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.node_parser import TokenTextSplitter
from llama_index.llms.huggingface import HuggingFaceLLM
from llama_index.llms.ragkv import RagKVLLM, RagKVTransform

TOPICS = ("if", "for", "while", "try")
QUESTION = "What does the break statement do in a while loop?"


class WordEmbedding(BaseEmbedding):
    """Compares words, so that the example downloads nothing; take a real one."""

    def _get_text_embedding(self, text: str) -> list[float]:
        words = set(re.findall(r"\w{4,}", text.lower()))
        buckets = {zlib.crc32(word.encode()) % 512 for word in words}
        return [1e-6 + (i in buckets) for i in range(512)]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


def main(model: Any = None, tokenizer: Any = None, max_new_tokens: int = 48) -> dict[str, str]:
    """Answer with both pipelines and return the two answers."""
    settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "is_chat_model": True}
    swapped = RagKVLLM(model=model, tokenizer=tokenizer, store=":memory:", **settings)
    model, tokenizer = swapped.kv.loaded.model, swapped.kv.tokenizer
    ordinary = HuggingFaceLLM(model=model, tokenizer=tokenizer, **settings)

    splitter = TokenTextSplitter(chunk_size=300, chunk_overlap=0, tokenizer=tokenizer.encode)
    documents = [Document(text=pydoc_data.topics.topics[name]) for name in TOPICS]
    step = RagKVTransform(llm=swapped)  # the one step more
    nodes = IngestionPipeline(transformations=[splitter, step]).run(documents=documents)
    index = VectorStoreIndex(nodes, embed_model=WordEmbedding())
    answers = {}
    for name, llm in {"HuggingFaceLLM": ordinary, "RagKVLLM": swapped}.items():
        answers[name] = str(index.as_query_engine(llm=llm, similarity_top_k=4).query(QUESTION))
        print(f"{name}: {answers[name]}\n")
    report = swapped.last_report
    print(f"{report.tokens.reused} of {report.tokens.prompt} tokens reused")
    print(f"first token {report.ttft_s:.2f} s, whole answer {report.total_s:.2f} s")
    return answers


if __name__ == "__main__":
    main()
