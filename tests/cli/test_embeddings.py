"""Embeddings that commands keep for the next one."""

import sqlite3

import numpy as np
import pytest
from tiny import saved
from typer.testing import CliRunner

from ragkv.cli.main import app
from ragkv.cli.retrieval import Embedder, Embeddings

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


def test_rows_come_back_bit_by_bit_and_for_their_model_alone(kept):
    rows = {f"text {at}": np.random.default_rng(at).random(8, np.float32) for at in range(1200)}
    Embeddings(kept, "model 1").store(rows)
    found = Embeddings(kept, "model 1").load([*rows, "another"], 8)
    assert found.keys() == rows.keys()
    assert all(np.array_equal(found[text], rows[text]) for text in rows)
    assert not Embeddings(kept, "model 2").load(list(rows), 8)
    assert not Embeddings(kept, "model 1").load(list(rows), 9), "of another length"
    Embeddings(kept, "model 1").store({"text 0": rows["text 1"]})
    again = Embeddings(kept, "model 1").load(["text 0"], 8)
    assert np.array_equal(again["text 0"], rows["text 1"])


@pytest.mark.parametrize("harm", ["garbage", "cut", "folder", "pickle", "read-only"])
def test_a_file_that_cannot_be_used_is_as_good_as_none(asked, kept, harm, caplog, monkeypatch):
    expected = Embedder(kept).top("Where?", TEXTS, 2)
    if harm == "garbage":
        kept.write_bytes(b"no database" * 1000)
    elif harm == "cut":
        kept.write_bytes(kept.read_bytes()[:4096])
    elif harm == "folder":
        kept.unlink()
        kept.mkdir()
    elif harm == "pickle":
        with sqlite3.connect(kept) as file:
            file.execute("UPDATE rows SET row = 'cos\nsystem\n'")
        file.close()
    else:

        def refuse(*_, **__):
            raise sqlite3.OperationalError("attempt to write a readonly database")

        monkeypatch.setattr(sqlite3, "connect", refuse)
    asked.clear()
    assert Embedder(kept).top("Where?", TEXTS, 2) == expected
    assert asked[0] == TEXTS
    assert ("cannot be" in caplog.text) == (harm != "pickle")


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
