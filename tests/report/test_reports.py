"""Reports made again from their dictionaries, and the numbers in their words."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from tiny import ask, some_chunks

from ragkv import PrecomputeReport, ReuseReport
from ragkv.errors import ConfigError
from ragkv.report.account import Miss
from ragkv.report.words import count

ROOT = Path(__file__).parents[2]


def test_a_report_survives_json(make_engine):
    kv = make_engine()
    made = kv.precompute(some_chunks(2))
    report = kv.generate(ask(some_chunks(3)), max_new_tokens=3).report
    report = replace(report, misses=(Miss("A chunk", "absent"),), warnings=("Look",))
    assert report.chunks
    written = json.loads(json.dumps(report.to_dict()))
    assert ReuseReport.from_dict(written) == report
    counts = written["tokens"]
    assert counts["prompt"] == len(written["positions"]) == report.prompt_tokens
    assert counts["reused"] == report.reused_tokens > 0
    assert counts["history"] == report.conversation_tokens
    assert written["effective_ratio"] == report.effective_ratio > 0
    assert ReuseReport.from_dict({**written, "of_a_later_version": 1}) == report
    assert PrecomputeReport.from_dict(json.loads(json.dumps(made.to_dict()))) == made


def test_another_dictionary_is_refused(make_engine):
    whole = make_engine().generate("Hello", max_new_tokens=1).report.to_dict()
    broken = {"positions": "x"}, {"chunks": None}, {"tokens": None}, {"decode": 3}
    for wrong in ({}, *({**whole, **each} for each in broken)):
        with pytest.raises(ConfigError, match="not a report"):
            ReuseReport.from_dict(wrong)
    del whole["method"]
    with pytest.raises(ConfigError, match="method"):
        ReuseReport.from_dict(whole)


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
