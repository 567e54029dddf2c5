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


@pytest.mark.parametrize("page", ["light", "dark"])
def test_many_chunks(page):
    shown, found = picture("many-chunks", page), result("many_chunks")
    assert found["commit"] in shown
    assert all(label in shown for label in ("start-up, s", "index on disk", "poll", "scan"))
    words = (ROOT / "docs" / "scaling.md").read_text("utf-8")
    _, _, index, start, memory, peak, poll, scan = found["rows"][-1]
    figures = (
        f"{index / 1000:.1f} GB",
        f"{memory / 1000:.1f} GB",
        f"{peak / 1000:.1f} at",
        f"{start:.0f} s",
    )
    assert not [
        each for each in (*figures, f"{poll:.1f} ms", f"{scan:.1f} ms") if each not in words
    ]
