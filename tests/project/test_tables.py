"""Every table of figures is written from a committed result, and says where it was measured."""

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


def test_what_sections_claim_is_in_their_tables(tables, cells):
    def between(name, column, **where):
        found = [row[column].split("x")[0] for row in tables.result_of(name).records(**where)]
        return f"{min(found, key=float)} to {max(found, key=float)} times"

    page = sentences("docs/results.md")
    kept = cells("methods_of_2026", "kept", "query 0.2, the default", "ProphetKV 0.2")
    ours, theirs = (each.split()[0] for each in kept)
    assert (
        f"keeps {ours} of full attention's score, ProphetKV {theirs} (the intervals overlap)"
        in page
    )
    own = "over its own"
    ratios = [row[own].split()[0] for row in tables.result_of("foreign_sinks").records()]
    least, most = min(ratios, key=float), max(ratios, key=float)
    assert f"KL is {least} to {most} times that of chunks encoded behind" in page
    answers = "whole_answers_quantised"
    theirs, peer = "speed-up (quartiles)", "llama.cpp over ragkv (quartiles)"
    assert f"are {between(answers, theirs)} faster than transformers'" in page
    assert f"`generate`, and {between(answers, peer)} faster than llama.cpp" in page
    machines = {
        "first_token_amx": {"products": "quantised"},
        "first_token_ice_lake": {},
        "first_token_zen_3": {"products": "quantised"},
        "first_token_zen_4": {"products": "quantised"},
        "first_token_zen_5": {"products": "quantised"},
    }
    factors = {}
    for name, where in machines.items():
        for row in tables.result_of(name).records(tokens="4,096", **where):
            factors.setdefault(row["ratio"], []).append(row[theirs].split("x")[0])
    (a, *_, b), (c, *_, d) = (sorted(factors[ratio], key=float) for ratio in ("0.2", "0.1"))
    assert f"of 4,096 tokens arrives {a} to {b} times sooner than by full prefill" in page
    assert f"at a ratio of 0.2, {c} to {d} times at 0.1" in page
    ragkv, _, second, third, fourth, _ = cells("serving_8_clients", "tokens a second")
    peers = f"{second}, {third} and {fourth} from contextpilot, vLLM and llama.cpp"
    assert f"{float(ragkv):g} tokens a second from ragkv, and {peers}" in page
    [row] = tables.result_of("decoding_long_prompts").records(**{"prompt": "32,000", "at once": 1})
    dense, sparse, other = (f"{row[at]:.0f}" for at in ("ragkv", 'sparse="auto"', "transformers"))
    assert f'takes {dense} ms, with `sparse="auto"` {sparse}, transformers\' {other}' in page


ZEN_4 = {"tokens": "4,096", "products": "quantised"}
ZEN_5 = {"tokens": "4,096", "products": "quantised"}
VLLM = {"peer": "vLLM, float32, prefix caching, chunks of 512"}
ANSWER = {"prompt": "4,096", "answer": "256"}
SPEED_UP = "speed-up (quartiles)"
OF_PEER = "llama.cpp over ragkv (quartiles)"
# A source's file, row, and columns: the peer's figure, ragkv's, and the gain.
SOURCES = (
    ("first_token_zen_4", {**ZEN_4, "ratio": "0.2"}, "full prefill", "ragkv", SPEED_UP),
    ("first_token_zen_4", {**ZEN_4, "ratio": "0.1"}, "full prefill", "ragkv", SPEED_UP),
    ("first_token_ice_lake", {"ratio": "0.2"}, "full prefill", "ragkv", SPEED_UP),
    ("first_token_zen_5", {**ZEN_5, "ratio": "0.2"}, "full prefill", "ragkv", SPEED_UP),
    ("first_token_zen_5", {**ZEN_5, "ratio": "0.1"}, "full prefill", "ragkv", SPEED_UP),
    ("first_token_other_engines", VLLM, "peer's", "ragkv's at 0.2", "ragkv is faster by"),
    ("whole_answers_quantised", ANSWER, "transformers", "ragkv", SPEED_UP),
    ("whole_answers_quantised", ANSWER, "llama.cpp", "ragkv", OF_PEER),
)


def test_the_overview_repeats_its_sources(tables):
    overview = tables.result_of("overview").records()
    for row, (name, where, peer, own, gain) in zip(overview, SOURCES, strict=False):
        result = tables.result_of(name)
        [source] = result.records(**where)
        assert (row["its figure"], row["ragkv"]) == (source[peer], source[own])
        assert row["gain"] == source[gain].split()[0]
        assert row["commit"] == source.get("commit", result.commit)


def test_the_overview_s_other_gains_are_quotients(tables, cells):
    clients, first, answer = tables.result_of("overview").records()[len(SOURCES) :]
    shown = [(row["its figure"], row["ragkv"]) for row in (clients, first, answer)]
    [token] = tables.result_of("first_token_gpu").records(tokens="16,384")
    whole, *_ = tables.result_of("whole_answers_gpu").records()
    assert shown == [
        tuple(
            cells("serving_8_clients", "tokens a second", "vLLM 0.32.0", "ragkv, 0.2 recomputed")
        ),
        (token["transformers"], token["0.2"]),
        (whole["transformers"], whole["ragkv"]),
    ]
    (vllm, own), *times = ([float(each.split()[0]) for each in pair] for pair in shown)
    gains = [own / vllm, *(peer / ours for peer, ours in times)]
    assert [row["gain"] for row in (clients, first, answer)] == [f"{each:.1f}x" for each in gains]
    for row, name in zip((first, answer), ("first_token_gpu", "whole_answers_gpu"), strict=True):
        assert row["commit"] == tables.result_of(name).commit
    assert tables.result_of("serving_8_clients").commit.startswith(clients["commit"])


def test_the_readme_has_the_demo_s_figures(cells):
    index, chain = cells("demo_frameworks", "speed-up", "LlamaIndex", "LangChain")
    shown = f"the demo's first token arrives {index} (LlamaIndex) to {chain} (LangChain) sooner"
    others = cells("demo_frameworks", "Ice Lake, d8418e70")
    others += cells("demo_frameworks", "AMX, 65547ede")
    others += cells("demo_frameworks", "Zen 5, caed7c80")
    others += cells("demo_frameworks", "Zen 5, float32, f18d9d2")
    assert f"{shown}, on other machines {min(others)} to {max(others)}" in sentences("README.md")
