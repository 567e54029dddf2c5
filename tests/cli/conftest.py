"""The commands keep nothing outside the tests' folders, and serve a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import tiny_model, tiny_tokenizer


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch) -> Path:
    """Return the file of embeddings."""
    file = tmp_path / "cache" / "embeddings.sqlite"
    monkeypatch.setattr("ragkv.cli.retrieval.kept_embeddings", lambda: file)
    return file


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """Return the folder of a tiny model with its tokenizer."""
    folder = tmp_path_factory.mktemp("tiny-model")
    tiny_model(layers=2).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)
