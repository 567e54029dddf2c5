"""The commands keep nothing outside the tests' folders."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch) -> Path:
    """Return the file of embeddings."""
    file = tmp_path / "cache" / "embeddings.sqlite"
    monkeypatch.setattr("ragkv.cli.embeddings.kept_embeddings", lambda: file)
    return file
