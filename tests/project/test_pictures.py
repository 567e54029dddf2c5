"""The pictures show the figures that are committed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"
PAGES = ("light", "dark")


def result(name):
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text("utf-8"))


def column(found, name, **where):
    rows = [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]
    return [row[name] for row in rows if where.items() <= row.items()]


def picture(name, page):
    return (PICTURES / f"{name}-{page}.svg").read_text("utf-8")


def test_every_picture_is_shown():
    text = "".join(
        page.read_text("utf-8") for page in (ROOT / "README.md", *ROOT.glob("docs/*.md"))
    )
    pictures = (path for path in PICTURES.iterdir() if path.suffix in {".svg", ".png"})
    assert not [path.name for path in pictures if f"pictures/{path.name}" not in text]


@pytest.mark.slow  # ten seconds
def test_pictures_are_those_that_the_script_draws(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(PICTURES)
    import concepts
    import draw

    draw.save((*draw.PICTURES, *concepts.PICTURES), tmp_path)
    drawn = {path.name: path.read_text("utf-8") for path in tmp_path.iterdir()}
    committed = {path.name: path.read_text("utf-8") for path in PICTURES.glob("*.svg")}
    assert drawn.keys() == committed.keys()
    assert not [name for name in drawn if drawn[name] != committed[name]]


@pytest.mark.parametrize("page", PAGES)
def test_speed(page):
    shown, peers = picture("speed", page), result("first_token_other_engines")
    for name in ("peer's", "ragkv's at 0.2"):
        cells = column(peers, name, machine="Zen 5", tokens="4,096")
        assert len(cells) == 2
        assert not [each for each in cells if each not in shown]
    answers = result("whole_answers_quantised")
    cells = [
        each
        for prompt in ("1,024", "4,096")
        for name in ("transformers", "llama.cpp", "ragkv")
        for each in column(answers, name, prompt=prompt, answer="256")
    ]
    assert len(cells) == 6
    commits = [answers["commit"], *column(peers, "commit", machine="Zen 5", tokens="4,096")]
    assert not [each for each in (*cells, *commits, "Zen 4", "Zen 5") if each not in shown]


@pytest.mark.parametrize("page", PAGES)
def test_whole_answers(page):
    shown, found = picture("whole-answers", page), result("whole_answers_quantised")
    names = ("transformers", "llama.cpp", "ragkv")
    cells = [each for name in names for each in column(found, name, answer="256")]
    assert len(cells) == 9
    assert not [each for each in (*cells, found["commit"]) if each not in shown]


@pytest.mark.parametrize("page", PAGES)
def test_first_token(page):
    shown = picture("first-token", page)
    for name, where in (
        ("first_token_zen_4", {"products": "quantised"}),
        ("first_token_zen_5", {"tier": "memory"}),
        ("first_token_avx_512", {"tier": "memory"}),
    ):
        found = result(name)
        times = column(found, "ragkv", tokens="4,096", **where)
        factors = column(found, "speed-up (quartiles)", tokens="4,096", **where)
        labels = [", ".join(each) for each in zip(times, factors, strict=True)]
        assert len(labels) == 3
        commit = found["commit"].partition(";")[0]
        assert not [each for each in (*labels, commit) if each not in shown]


@pytest.mark.parametrize("page", PAGES)
def test_fidelity(page):
    shown, found = picture("fidelity", page), result("methods_of_2026")
    means = [f">{cell.split()[0]}<" for cell in column(found, "KL to full attention")]
    assert len(means) == 13
    assert not [each for each in means if each not in shown]
    assert shown.count("AgentKVShift") == shown.count("ProphetKV") == shown.count("CacheClip")


@pytest.mark.parametrize("page", PAGES)
def test_serving(page):
    shown, found = picture("serving", page), result("serving_8_clients")
    engines = ("ragkv, 0.2", "contextpilot", "vLLM", "llama.cpp")
    rows = [row for row in found["rows"] if row[0].startswith(engines)]
    assert len(rows) == 4
    assert not [row[at] for row in rows for at in (1, 2, 4) if f">{row[at]}<" not in shown]


@pytest.mark.parametrize("page", PAGES)
def test_steps(page):
    shown, found = picture("steps", page), result("decoding_long_prompts")
    names = ("transformers", "ragkv", 'sparse="auto"')
    times = [f">{each:.0f}<" for name in names for each in column(found, name)]
    assert len(times) == 12
    assert not [each for each in times if each not in shown]


@pytest.mark.parametrize("page", PAGES)
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
