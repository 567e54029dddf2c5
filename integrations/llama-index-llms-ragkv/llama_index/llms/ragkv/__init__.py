"""LlamaIndex over ragkv: swap ``HuggingFaceLLM`` for ``RagKVLLM``, add one ingestion step."""

from __future__ import annotations

from llama_index.llms.ragkv.base import RagKVLLM
from llama_index.llms.ragkv.ingestion import RagKVTransform
from llama_index.llms.ragkv.prompt_helper import RagKVPromptHelper
from llama_index.llms.ragkv.retriever import RagKVPostprocessor, RagKVRetriever
from llama_index.llms.ragkv.staged import RagKVStagedRetriever
from llama_index.llms.ragkv.vector_store import RagKVVectorStore

__all__ = [
    "RagKVLLM",
    "RagKVPostprocessor",
    "RagKVPromptHelper",
    "RagKVRetriever",
    "RagKVStagedRetriever",
    "RagKVTransform",
    "RagKVVectorStore",
]
