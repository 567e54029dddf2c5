"""The commands keep nothing outside the tests' folders, and serve a tiny model."""

from pathlib import Path

import pytest
from tiny import saved


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch) -> Path:
    """Return the file of embeddings."""
    file = tmp_path / "cache" / "embeddings.safetensors"
    monkeypatch.setattr("ragkv.cli.retrieval.kept_embeddings", lambda: file)
    return file


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """Return the folder of a tiny model with its tokenizer."""
    return saved(tmp_path_factory.mktemp("tiny-model"), layers=2)
