"""The pictures show the figures that are committed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def result(name):
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text("utf-8"))


def picture(name, page):
    return (ROOT / "docs" / "pictures" / f"{name}-{page}.svg").read_text("utf-8")


@pytest.mark.parametrize("page", ["light", "dark"])
def test_whole_answers(page):
    shown, found = picture("whole-answers", page), result("whole_answers_quantised")
    cells = [row[at] for row in found["rows"] if row[1] == "256" for at in (2, 6, 10)]
    assert len(cells) == 9
    assert not [each for each in (*cells, found["commit"]) if each not in shown]


@pytest.mark.parametrize("page", ["light", "dark"])
def test_steps(page):
    shown, found = picture("steps", page), result("decoding_steps")
    times = [f">{row[6]:.0f}<" for row in found["rows"] if row[4] in {"8,192", "32,000"}]
    assert len(times) == 12
    assert not [each for each in times if each not in shown]
