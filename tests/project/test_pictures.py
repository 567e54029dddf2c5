"""The pictures show the figures that are committed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"
ENGINES = ("transformers", "llama.cpp", "ragkv")


def result(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text("utf-8"))


def cells(name: str, *columns: str, **where: str) -> Iterator[Any]:
    """Return the cells of some columns, of the rows that have these values."""
    found = result(name)
    for row in found["rows"]:
        record = dict(zip(found["columns"], row, strict=True))
        if where.items() <= record.items():
            yield from (record[column] for column in columns)


def commit(name: str) -> str:
    return result(name)["commit"].partition(";")[0]


def speed() -> Iterator[str]:
    peers = {"machine": "Zen 5", "tokens": "4,096"}
    yield from cells("first_token_other_engines", "peer's", "ragkv's at 0.2", "commit", **peers)
    for prompt in ("1,024", "4,096"):
        yield from cells("whole_answers_quantised", *ENGINES, prompt=prompt, answer="256")
    yield from (commit("whole_answers_quantised"), "Zen 4", "Zen 5")


def whole_answers() -> Iterator[str]:
    yield from cells("whole_answers_quantised", *ENGINES, answer="256")
    yield commit("whole_answers_quantised")


def first_token() -> Iterator[str]:
    for name, where in (
        ("first_token_zen_4", {"products": "quantised"}),
        ("first_token_zen_5", {"products": "quantised"}),
        ("first_token_avx_512", {"tier": "memory"}),
    ):
        where["tokens"] = "4,096"
        times, factors = (cells(name, each, **where) for each in ("ragkv", "speed-up (quartiles)"))
        yield from (", ".join(each) for each in zip(times, factors, strict=True))
        yield commit(name)


def fidelity() -> Iterator[str]:
    yield from (f">{each.split()[0]}<" for each in cells("methods_of_2026", "KL to full attention"))


def serving() -> Iterator[str]:
    for row in result("serving_8_clients")["rows"]:
        if row[0].startswith(("ragkv, 0.2", "contextpilot", "vLLM", "llama.cpp")):
            yield from (f">{row[at]}<" for at in (1, 2, 4))


def steps() -> Iterator[str]:
    columns = ("transformers", "ragkv", 'sparse="auto"')
    yield from (f">{each:.0f}<" for each in cells("decoding_long_prompts", *columns))


def many_chunks() -> Iterator[str]:
    yield from (result("many_chunks")["commit"], "start-up, s", "index on disk", "poll", "scan")


COUNTS = {
    speed: 15,
    whole_answers: 10,
    first_token: 12,
    fidelity: 13,
    serving: 12,
    steps: 12,
    many_chunks: 5,
}
"""Figures and commits in each picture."""


@pytest.mark.parametrize("page", ["light", "dark"])
@pytest.mark.parametrize("figures", COUNTS, ids=lambda figures: figures.__name__)
def test_a_picture_shows_its_figures(figures, page):
    name = figures.__name__.replace("_", "-")
    shown, expected = (PICTURES / f"{name}-{page}.svg").read_text("utf-8"), list(figures())
    assert len(expected) == COUNTS[figures]
    assert not [each for each in expected if each not in shown]


def test_the_page_on_scaling_has_the_figures_of_many_chunks():
    words = (ROOT / "docs" / "scaling.md").read_text("utf-8")
    _, _, index, start, memory, peak, poll, scan = result("many_chunks")["rows"][-1]
    for figure in (
        *(f"{index / 1000:.1f} GB", f"{memory / 1000:.1f} GB", f"{peak / 1000:.1f} at"),
        *(f"{start:.0f} s", f"{poll:.1f} ms", f"{scan:.1f} ms"),
    ):
        assert figure in words


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
