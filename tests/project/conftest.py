"""A tiny model for the code of documents, and what stands for embeddings in it."""

import importlib.resources
import sys
from pathlib import Path
from pydoc_data.topics import topics
from types import ModuleType

import langchain_huggingface
import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding
from llama_index.core import Settings
from llama_index.core.embeddings import MockEmbedding
from tiny import saved, tiny_tokenizer


@pytest.fixture
def name(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(Settings, "_embed_model", MockEmbedding(embed_dim=4))
    monkeypatch.setattr(Settings, "_tokenizer", tiny_tokenizer().encode)
    monkeypatch.setattr(Settings, "_prompt_helper", None)
    return saved(tmp_path / "model", layers=2)


class Named(MockEmbedding):
    """Takes a model's name, and knows no model."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__(embed_dim=4)


@pytest.fixture
def small_world(monkeypatch):
    """Embeddings without a model, and short topics."""
    fake = DeterministicFakeEmbedding(size=4)
    monkeypatch.setattr(langchain_huggingface, "HuggingFaceEmbeddings", lambda **_: fake)
    embeddings = ModuleType("llama_index.embeddings.huggingface")
    embeddings.HuggingFaceEmbedding = Named
    monkeypatch.setitem(sys.modules, "llama_index.embeddings", ModuleType("llama_index.embeddings"))
    monkeypatch.setitem(sys.modules, "llama_index.embeddings.huggingface", embeddings)
    monkeypatch.setattr(importlib.resources, "files", lambda _: Path())
    monkeypatch.setattr(Settings, "_llm", None)
    for topic in ("for", "while", "try", "with"):
        monkeypatch.setitem(topics, topic, topics[topic][:1500])
