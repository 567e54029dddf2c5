"""LangChain over ragkv: swap the model class, precompute at ingestion, answer faster."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from langchain_ragkv.chat_model import ChatRagKV
    from langchain_ragkv.ingestion import RagKVTransformer
    from langchain_ragkv.llm import RagKVLLM
    from langchain_ragkv.retriever import RagKVRetriever
    from langchain_ragkv.staged import RagKVStagedRetriever
    from langchain_ragkv.vector_store import RagKVVectorStore

__all__ = [
    "ChatRagKV",
    "RagKVLLM",
    "RagKVRetriever",
    "RagKVStagedRetriever",
    "RagKVTransformer",
    "RagKVVectorStore",
]

_MODULES = {
    "ChatRagKV": "chat_model",
    "RagKVLLM": "llm",
    "RagKVRetriever": "retriever",
    "RagKVStagedRetriever": "staged",
    "RagKVTransformer": "ingestion",
    "RagKVVectorStore": "vector_store",
}


def __getattr__(name: str) -> Any:
    """Load a class on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
