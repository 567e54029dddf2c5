"""Evaluation files: every bad line is named by file and line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ragkv.errors import ConfigError
from ragkv_bench.data.examples import DataError, read_data, write_data

GOOD = {
    "id": "hotpot_1",
    "question": "Who?",
    "answers": ["Ada", "Ada Lovelace"],
    "chunks": [{"title": "Ada", "text": "Ada wrote it.", "is_gold": True}, {"text": "No title."}],
    "task": "multihop_qa",
}


def _file(tmp_path, *rows):
    path = tmp_path / "mine.jsonl"
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def test_a_good_file_is_read_whole(tmp_path):
    data = read_data(
        _file(tmp_path, b"\xef\xbb\xbf" + json.dumps(GOOD).encode(), b"", {**GOOD, "id": "b"})
    )
    assert data.name == "mine"
    first, second = data.examples
    assert first.answers == ("Ada", "Ada Lovelace")
    assert first.chunks[0].title == "Ada"
    assert first.chunks[0].is_gold
    assert (first.chunks[1].title, first.chunks[1].is_gold) == ("", False)
    assert second.id == "b"


NEXT = {**GOOD, "id": "next"}
BAD = [
    (b"{not json", "not JSON"),
    (b'{"id": "\xff"}', "not UTF-8"),
    (b"[1, 2]", "must be a JSON object"),
    (b"[" * 100_000, ""),
    ({**NEXT, "question": "  "}, "question is empty"),
    ({**NEXT, "question": 3}, "question must be a string"),
    ({**NEXT, "answers": []}, "answers is empty"),
    ({**NEXT, "answers": "Ada"}, "answers must be a list"),
    ({**NEXT, "answers": [1]}, "answers must be non-empty strings"),
    ({**NEXT, "chunks": []}, "chunks is empty"),
    ({**NEXT, "chunks": ["text"]}, r"chunks\[0\] must be an object"),
    ({**NEXT, "chunks": [{"title": "no text"}]}, r"field chunks\[0\].text is missing"),
    ({**NEXT, "chunks": [{"text": " "}]}, r"chunks\[0\].text is empty"),
    ({**NEXT, "chunks": [{"text": "a", "title": 1}]}, r"chunks\[0\].title must be"),
    ({**NEXT, "chunks": [{"text": "a", "is_gold": 1}]}, r"chunks\[0\].is_gold must be"),
    ({**NEXT, "task": "poetry"}, "task 'poetry' is unknown; known: multihop_qa"),
    ({**NEXT, "id": "a\ud800"}, "has a lone surrogate"),
    ({**NEXT, "chunks": [{"text": "a\udc00"}]}, "has a lone surrogate"),
    (GOOD, "id 'hotpot_1' is line 1's already"),
    *[({k: v for k, v in NEXT.items() if k != name}, f"field {name} is missing") for name in GOOD],
]


@pytest.mark.parametrize(("bad", "message"), BAD)
def test_a_bad_line_is_named(tmp_path, bad, message):
    path = _file(tmp_path, GOOD, b"", bad, {**GOOD, "id": "last"})
    with pytest.raises(DataError, match=rf"mine\.jsonl:3: .*{message}"):
        read_data(path)


def test_a_file_without_a_line_is_an_error(tmp_path):
    with pytest.raises(DataError, match="has no example"):
        read_data(_file(tmp_path, b""))
    with pytest.raises(DataError, match=r"nowhere\.jsonl: cannot be read: No such file"):
        read_data(tmp_path / "nowhere.jsonl")


def test_written_data_reads_the_same(tmp_path):
    data = read_data(_file(tmp_path, GOOD, {**GOOD, "id": "é ü 中"}))
    write_data(tmp_path / "again.jsonl", data.examples)
    assert read_data(tmp_path / "again.jsonl").examples == data.examples


def test_a_larger_draw_holds_the_smaller_in_file_order(tmp_path):
    data = read_data(_file(tmp_path, *({**GOOD, "id": str(i)} for i in range(30))))
    ids = {n: [int(e.id) for e in data.pick(n, seed=3).examples] for n in (1, 5, 12)}
    assert [len(ids[n]) for n in ids] == [1, 5, 12]
    assert ids[12] == sorted(ids[12])
    assert set(ids[1]) < set(ids[5]) < set(ids[12])
    assert ids[12] != [int(e.id) for e in data.pick(12, seed=4).examples]
    assert data.pick(None) is data
    assert data.pick(31).examples == data.examples
    with pytest.raises(ConfigError, match="limit"):
        data.pick(0)


def test_what_is_skipped_is_what_a_limit_draws(tmp_path):
    data = read_data(_file(tmp_path, *({**GOOD, "id": str(i)} for i in range(30))))
    drawn = {example.id for example in data.pick(12, seed=3).examples}
    rest = [example.id for example in data.pick(None, seed=3, skip=12).examples]
    assert set(rest) == {str(i) for i in range(30)} - drawn
    assert rest == sorted(rest, key=int)
    few = {example.id for example in data.pick(5, seed=3, skip=12).examples}
    assert len(few) == 5
    assert few < set(rest)
    assert len(data.pick(100, seed=3, skip=12).examples) == 18
    for skip in (-1, 30):
        with pytest.raises(ConfigError, match="skip"):
            data.pick(None, skip=skip)


def test_the_example_in_the_documentation_is_good(tmp_path):
    text = (Path(__file__).parents[3] / "docs" / "evaluation.md").read_text(encoding="utf-8")
    (tmp_path / "d.jsonl").write_text(text.split("```json\n")[1].split("```")[0])
    (example,) = read_data(tmp_path / "d.jsonl").examples
    assert example.answers == ("Ada", "Ada Lovelace")
