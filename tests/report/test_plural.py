"""Reports and commands say one chunk, and two chunks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tiny import ask, some_chunks

from ragkv.report.plural import count

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("number", "thing", "said"),
    [
        (0, "chunk", "0 chunks"),
        (1, "chunk", "1 chunk"),
        (2013, "token", "2,013 tokens"),
        (1, "more note", "1 more note"),
        (2, "entry", "2 entries"),
        (1, "entry", "1 entry"),
    ],
)
def test_one_and_many(number, thing, said):
    assert count(number, thing) == said


def test_a_summary_of_one_chunk(make_engine):
    kv = make_engine(layers=2)
    kv.precompute(some_chunks(1))
    named = ["Another one, which is elsewhere."]
    report = kv.generate(ask(some_chunks(1)), max_new_tokens=1, retrieved=named).report
    assert "1 chunk was not reused (left_out): it is" in str(report)


def test_no_number_stands_before_a_fixed_plural():
    fixed = re.compile(
        r"\{[^{}]*\} (more )?(chunks|tokens|files|documents|entries|notes|prompts)\b(?! for)"
    )
    folders = (ROOT / "ragkv" / "cli", ROOT / "ragkv" / "report")
    for path in (path for folder in folders for path in folder.rglob("*.py")):
        assert not fixed.search(path.read_text(encoding="utf-8")), path.name
