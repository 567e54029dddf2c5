"""Embeddings that commands keep for the next one."""

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny import saved
from typer.testing import CliRunner

from ragkv.cli.main import app
from ragkv.cli.retrieval import Embedder

TEXTS = [f"Text {at} about the weather." for at in range(5)]


@pytest.fixture
def asked(monkeypatch) -> list[list[str]]:
    """Return what the model is asked to embed: each text's length and first letter."""
    seen: list[list[str]] = []

    class Model:
        def __init__(self, *args, **kwargs):
            pass

        def encode(self, texts, **_):
            seen.append(list(texts))
            rows = np.zeros((len(texts), 384), np.float32)
            for at, text in enumerate(texts):
                rows[at, sum(text.encode()) % 384] = 1
            return rows

    monkeypatch.setattr("sentence_transformers.SentenceTransformer", Model)
    return seen


def test_the_second_command_embeds_the_question_alone(asked, kept):
    first = Embedder(kept).top("Where?", TEXTS, 2)
    assert asked == [TEXTS, ["Where?"]]
    asked.clear()
    assert Embedder(kept).top("Where?", TEXTS, 2) == first
    assert asked == [["Where?"]]
    asked.clear()
    Embedder(kept).top("Where?", [*TEXTS[1:], "Another text.", TEXTS[2]], 2)
    assert asked == [["Another text."], ["Where?"]]
    asked.clear()
    Embedder().top("Where?", TEXTS, 2)
    assert asked == [TEXTS, ["Where?"]], "nothing is kept unless asked for"


def test_rows_come_back_bit_by_bit_and_for_their_model_alone(asked, kept, monkeypatch):
    rows = Embedder().embed(TEXTS)
    Embedder(kept).top("Where?", TEXTS, 2)
    assert np.array_equal(load_file(kept)["rows"], rows)
    asked.clear()
    monkeypatch.setattr("ragkv.cli.retrieval.version", lambda _: "another")
    Embedder(kept).top("Where?", TEXTS, 2)
    assert asked == [TEXTS, ["Where?"]]


@pytest.mark.parametrize("harm", ["garbage", "cut", "folder", "other", "read-only"])
def test_a_file_that_cannot_be_used_is_as_good_as_none(asked, kept, harm, caplog, monkeypatch):
    expected = Embedder(kept).top("Where?", TEXTS, 2)
    if harm == "garbage":
        kept.write_bytes(b"no tensors" * 1000)
    elif harm == "cut":
        kept.write_bytes(kept.read_bytes()[:4096])
    elif harm == "folder":
        kept.unlink()
        kept.mkdir()
    elif harm == "other":
        save_file({"rows": np.zeros((5, 384), np.float32)}, kept)
    else:

        def refuse(*_, **__):
            raise PermissionError("read-only file system")

        kept.unlink()
        monkeypatch.setattr("ragkv.cli.retrieval.save_file", refuse)
    asked.clear()
    assert Embedder(kept).top("Where?", TEXTS, 2) == expected
    assert asked[0] == TEXTS
    assert "cannot be" in caplog.text


def test_ask_keeps_them(asked, kept, tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("A plain text about the weather in the north.\n\n" * 20, encoding="utf-8")
    given = ["--path", str(text), "--model", saved(tmp_path / "tiny"), "--chunk-tokens", "60"]
    given += ["--store", str(tmp_path / "store"), "--max-new-tokens", "1"]

    def ask(*options):
        done = CliRunner().invoke(app, ["ask", "Where?", *given, *options])
        assert done.exit_code == 0, done.output

    ask()
    assert len(asked) == 2
    assert kept.is_file()
    asked.clear()
    ask()
    assert asked == [["Where?"]]
