"""The example runs, over a tiny model."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from langchain_core.embeddings import DeterministicFakeEmbedding
from tiny import tiny_model, tiny_tokenizer

EXAMPLE = Path(__file__).parents[3] / "examples" / "langchain_rag.py"


def test_the_example_runs(capsys):
    spec = importlib.util.spec_from_file_location("langchain_rag", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    answers = module.main(tiny_model(), tiny_tokenizer(), DeterministicFakeEmbedding(size=16), 4)
    assert list(answers) == ["ChatHuggingFace", "ChatRagKV"]
    assert all(answers.values())
    assert "tokens reused" in capsys.readouterr().out


def test_the_example_is_short():
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 60
