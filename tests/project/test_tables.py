"""Every table of figures is written from a committed result, and says where it was measured."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
RESULT = {
    "command": "ragkv bench",
    "machine": "two cores",
    "commit": "abc",
    "n": "3 rounds",
    "model": "SmolLM2",
    "columns": ["tier", "first token", "memory"],
    "shown": ["tier", "first token"],
    "rows": [["memory", "1 s", 5], ["disk", "2 s", 6], ["device", "3 s", 7]],
}


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs" / "pictures")
    import tables

    return tables


@pytest.fixture
def page(tables, monkeypatch, tmp_path):
    (tmp_path / "times.json").write_text(json.dumps(RESULT), encoding="utf-8")
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    return lambda marker: tables.with_tables(
        f"a\n\n<!-- table: {marker} -->\nold\n<!-- end -->\nb\n"
    )


def text_of(page):
    return (ROOT / page).read_text(encoding="utf-8")


def test_pages_have_the_tables_that_the_results_give(tables):
    stale = [
        page.name for page in tables.pages() if tables.with_tables(text_of(page)) != text_of(page)
    ]
    assert not stale, "python docs/pictures/tables.py"


@pytest.mark.parametrize("page", ["README.md", "docs/results.md"])
def test_every_table_is_from_a_result(tables, page):
    others = tables.TABLE.sub("", text_of(page))
    assert others != text_of(page)
    assert not [line for line in others.splitlines() if line.lstrip().startswith("|")]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_say_where_they_were_measured(tables, path):
    result = tables.result_of(path.stem)
    said = (result.command, result.machine, result.commit, result.n, result.model)
    assert all(each and isinstance(each, str) for each in said)
    assert all(result.columns)
    assert len({*result.columns}) == len(result.columns)
    assert {*result.shown} <= {*result.columns}
    assert result.rows
    assert len(result.records()) == len(result.rows)


def test_no_result_is_left_unnamed(tables):
    pages = "\n".join(map(text_of, tables.pages()))
    named = re.findall(r"`([\w*]+)[.]json`", pages) + re.findall(r"<!-- table: (\w+)", pages)
    named += re.findall(r"\"(\w+)\"", text_of("docs/pictures/draw.py"))
    assert not [
        path.name for path in RESULTS if not any(fnmatch(path.stem, each) for each in named)
    ]


def test_a_table_has_the_columns_shown_and_its_provenance(page):
    assert page("times") == (
        "a\n\n<!-- table: times -->\n\n"
        "|tier|first token|\n|---|---|\n|memory|1 s|\n|disk|2 s|\n|device|3 s|\n\n"
        "<small>`ragkv bench`; two cores; commit abc; n: 3 rounds; SmolLM2.</small>\n\n"
        "<!-- end -->\nb\n"
    )


def test_a_marker_chooses_columns_and_rows(page):
    shown = page("times | memory | tier | where tier = disk or device")
    assert "|memory|tier|\n|---|---|\n|6|disk|\n|7|device|\n\n" in shown


def test_writing_again_changes_nothing(tables, page):
    assert tables.with_tables(page("times | tier")) == page("times | tier")


@pytest.mark.parametrize(
    ("marker", "error"),
    [
        ("nothing", FileNotFoundError),
        ("times | speed", KeyError),
        ("times | where speed = 1", KeyError),
        ("times | where tier = s3", ValueError),
    ],
)
def test_a_marker_that_names_nothing_is_an_error(page, marker, error):
    with pytest.raises(error):
        page(marker)


def sentences(page):
    return " ".join(text_of(page).split())


@pytest.fixture
def cells(tables):
    """Returns a column's cells, of rows in the order that they are named in."""

    def cells(name, column, *rows):
        result = tables.result_of(name)
        found = {row[0]: row[result.columns.index(column)] for row in result.rows}
        return [str(found[row]) for row in rows or found]

    return cells


def test_what_sentences_say_of_results_without_a_table(cells):
    page = sentences("docs/results.md")
    methods = (
        "full",
        "query 0.2",
        "query 0.1",
        "query 0.05",
        "cacheblend 0.2",
        "epic 0.2",
        "reuse",
    )
    found = cells("needles_prose", "found", *methods)
    full, q2, q1, q05, blend, epic, reuse = (
        f"{float(each.split()[0]) * 100:.0f}" for each in found
    )
    assert (
        f"{full}%, `query` {q2}, {q1} and {q05}% at 0.2, 0.1 and 0.05, `cacheblend` {blend}" in page
    )
    assert f"and `epic` {epic}% at 0.2, plain `reuse` {reuse}%" in page
    twenty, five = cells("methods_of_2026_ratio_of_means", "prophetkv", "20%", "5%")
    ratio, closer = twenty.split(", ")
    assert f"ProphetKV in {closer} of the 100 examples at 0.2; its mean KL is {ratio} of" in page
    assert f"At 0.05 it is {five.split(', ')[0]}" in page
    found = cells("methods_80_examples", "KL to full attention", "epic 0.2", "cacheblend 0.2")
    epic, blend = (each.split()[0] for each in found)
    assert f"On the first 80 `epic` has {epic}, `cacheblend` {blend}" in page
    int8, int4 = cells("codecs", "KL to raw", "int8", "int4")
    assert f'KL of {int8} to raw chunks, `"int4"` an eighth at {int4} ' in sentences(
        "docs/store.md"
    )


def test_what_sections_claim_is_in_their_tables(tables, cells):
    def between(name, column, **where):
        found = [row[column].split("x")[0] for row in tables.result_of(name).records(**where)]
        return f"{min(found, key=float)} to {max(found, key=float)} times"

    page = sentences("docs/results.md")
    kept = cells("methods_of_2026", "kept", "query 0.2, the default", "ProphetKV 0.2")
    ours, theirs = (each.split()[0] for each in kept)
    assert f"keeps {ours} of its score at 0.2, ProphetKV {theirs} (the intervals overlap)" in page
    own = "over its own"
    ratios = [row[own].split()[0] for row in tables.result_of("foreign_sinks").records()]
    least, most = min(ratios, key=float), max(ratios, key=float)
    assert f"KL is {least} to {most} times that of chunks encoded behind" in page
    answers = "whole_answers_quantised"
    theirs, peer = "speed-up (quartiles)", "llama.cpp over ragkv (quartiles)"
    assert f"end {between(answers, theirs)} as soon as transformers'" in page
    assert f"`generate`, {between(answers, peer)} as soon as llama.cpp" in page
    machines = ({"products": "quantised"}, {"tier": "memory"})
    factors = {}
    for name, where in zip(("first_token_zen_4", "first_token_zen_5"), machines, strict=True):
        for row in tables.result_of(name).records(tokens="4,096", **where):
            factors.setdefault(row["ratio"], []).append(row[theirs].split("x")[0])
    (a, b), (c, d) = factors["0.2"], factors["0.1"]
    assert f"{a} to {b} times shorter than by full prefill" in page
    assert f"of 4,096 tokens at a ratio of 0.2, {c} to {d} times at 0.1" in page
    four, five = (tables.result_of(f"first_token_zen_{number}").commit for number in (4, 5))
    others = f"(Zen 4, {four}; Zen 5 in float32, {five}: {b}x, {d}x)"
    assert f"against a full prefill: {a}x, at 0.1 {c}x {others}" in sentences("README.md")
    ragkv, _, second, third, fourth, _ = cells("serving_8_clients", "tokens a second")
    assert (
        f"{float(ragkv):g} tokens a second of ragkv, {second}, {third} and {fourth} of the" in page
    )
    [row] = tables.result_of("decoding_long_prompts").records(**{"prompt": "32,000", "at once": 1})
    dense, sparse, other = (f"{row[at]:.0f}" for at in ("ragkv", 'sparse="auto"', "transformers"))
    assert f'takes {dense} ms, with `sparse="auto"` {sparse}, transformers\' {other}' in page
