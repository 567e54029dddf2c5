"""Reports made again from their dictionaries."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tiny import ask, some_chunks

from ragkv import PrecomputeReport, ReuseReport
from ragkv.errors import ConfigError
from ragkv.report.account import Miss


def test_a_report_survives_json(make_engine):
    kv = make_engine()
    made = kv.precompute(some_chunks(2))
    report = kv.generate(ask(some_chunks(3)), max_new_tokens=3).report
    report = replace(report, misses=(Miss("A chunk", "absent"),), warnings=("Look",))
    assert report.chunks
    written = json.loads(json.dumps(report.to_dict()))
    assert ReuseReport.from_dict(written) == report
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
