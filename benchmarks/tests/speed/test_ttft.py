"""``ragkv bench ttft``: its arithmetic, its prompts, its measurements and its result."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import saved, tiny_model, tiny_tokenizer
from typer.testing import CliRunner

import ragkv
from ragkv import RagKV, StoreConfig
from ragkv.cli.main import app
from ragkv.errors import ConfigError, PromptTooLongError, UnknownMethodError
from ragkv_bench.speed.bound import (
    Costs,
    causal_area,
    timed_attention,
    timed_prefill,
)
from ragkv_bench.speed.memory import peak_growth
from ragkv_bench.speed.traces import Text, make_traces, tokens_of
from ragkv_bench.speed.ttft import TtftPlan, bench_ttft, tables

PLAN = TtftPlan((400, 600), 128, ratios=(0.0, 0.2), tiers=("memory", "disk"), rounds=2)
SMALL = TtftPlan((300,), 100, ratios=(0.2,), rounds=1)


@pytest.fixture(scope="module")
def found():
    with RagKV(tiny_model(), tiny_tokenizer(), store=":memory:") as kv:
        return bench_ttft(kv.loaded, PLAN)


# ---- the bound


def counted(rows: list[int], window: int | None) -> int:
    pairs = 0
    for row in rows:
        for key in range(row + 1):
            if window is None or row - key < window:
                pairs += 1
    return pairs


@pytest.mark.parametrize("window", [None, 1, 7, 100])
@pytest.mark.parametrize("rows", [[0], [49], list(range(50)), [0, 3, 8, 30, 31, 49], []])
def test_the_causal_area_is_the_plain_count(rows: list[int], window: int | None):
    assert causal_area(np.array(rows, dtype=np.int64), window) == counted(rows, window)


def test_the_bound_is_the_rows_share_of_each_part():
    costs = Costs(50, 2.0, (0.5, 0.25), (None, 8))
    rows = np.array([3, 17, 48, 49])
    expected = 4 / 50 * 2.0
    for seconds, window in ((0.5, None), (0.25, 8)):
        expected += seconds * counted(rows.tolist(), window) / counted(list(range(50)), window)
    assert costs.bound_s(rows, 0.01) == pytest.approx(expected)  # hidden behind compute
    assert costs.bound_s(rows, 9.0) == pytest.approx(9.0)
    assert costs.bound_s(np.arange(50), 0.0) == pytest.approx(costs.prefill_s)


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma3"])
def test_timing_attention_changes_no_answer(family: str):
    model = tiny_model(family)
    ids = torch.arange(100, 200)[None]
    with torch.no_grad():
        plain = model(ids).logits
        with timed_attention(model) as times:
            timed = model(ids).logits
    assert torch.equal(plain, timed)
    assert all(times.seconds(layer) > 0 for layer in range(4))
    assert model.config._attn_implementation == "sdpa"


def test_attention_that_is_not_registered_is_refused():
    with (
        pytest.raises(ConfigError, match="attn_implementation='sdpa'"),
        timed_attention(tiny_model(attention="eager")),
    ):
        pass


def test_costs_add_up_to_a_prefill(make_engine):
    loaded = make_engine("gemma3").loaded
    prefills = [timed_prefill(loaded, range(100, end)) for end in (198, 200, 202)]
    assert all(prefill.linear_s > 0 for prefill in prefills)
    costs = prefills[1]
    assert costs.tokens == 100
    assert costs.windows == (48, None, 48, None)
    assert len(costs.attention_s) == 4
    assert costs.prefill_s > sum(costs.attention_s)


# ---- prompts


def test_pieces_have_about_so_many_tokens():
    tokenizer = tiny_tokenizer()
    text = Text(tokenizer, 64)
    pieces = [text.piece(number) for number in range(20)]
    assert len(set(pieces)) == 20
    assert all(piece == piece.strip() for piece in pieces)
    assert all(abs(len(tokens_of(piece, tokenizer)) - 64) <= 2 for piece in pieces)
    assert pieces[3].startswith(text.piece(3, 20))


def test_prompts_are_as_long_as_asked_in_orders_of_their_own(make_engine):
    traces = make_traces(make_engine(), (300, 500, 900), 100, rounds=3)
    assert [len(trace.prompts) for trace in traces] == [4, 4, 4]
    for trace in traces:
        assert trace.tokens - 25 < max(len(ids) for ids in trace.ids) <= trace.tokens
        assert len(trace.chunks) == len(set(trace.chunks))
        for prompt in trace.prompts:
            assert all(chunk in prompt[0]["content"] for chunk in trace.chunks)
    assert len({str(prompt) for prompt in traces[2].prompts}) == 4
    assert set(traces[1].chunks[:-1]) < set(traces[2].chunks)  # whole chunks are shared
    every = {chunk for trace in traces for chunk in trace.chunks}
    assert not [(a, b) for a in every for b in every if a != b and a.startswith(b)]


def test_prompts_for_models_without_a_chat_template(make_engine):
    kv = make_engine()
    template, kv.tokenizer.chat_template = kv.tokenizer.chat_template, None
    try:
        (trace,) = make_traces(kv, (400,), 100, rounds=1)
    finally:
        kv.tokenizer.chat_template = template
    assert isinstance(trace.prompts[0], str)
    assert trace.prompts[0].startswith(trace.sink)


def test_prompts_that_cannot_be_made(make_engine):
    with pytest.raises(ConfigError, match="no room for a chunk"):
        make_traces(make_engine(), (60,), 64, rounds=1)
    with pytest.raises(ConfigError, match="give smaller --tokens"):
        make_traces(make_engine(), (10**6,), 50_000, rounds=1)
    with pytest.raises(PromptTooLongError, match="4096 positions"):
        bench_ttft(make_engine().loaded, TtftPlan((5000,), 400, rounds=1))


# ---- measuring


def test_the_rows_are_as_documented(found):
    assert len(found["rows"]) == 2 * 2 * 2
    for row in found["rows"]:
        assert row["rounds"] == 2
        assert row["tokens"] - 30 < row["prompt_tokens"] <= row["tokens"]
        assert sum(row["steps"].values()) == pytest.approx(row["ragkv_s"])
        assert {"find", "load", "splice", "select", "recompute", "first_token"} <= set(row["steps"])
        assert row["efficiency"] == pytest.approx(row["bound_s"] / row["ragkv_s"])
        low, high = row["quartiles"]
        assert low <= row["speedup"] <= high
        assert row["peak_bytes"] is None or row["peak_bytes"] >= 0
    assert [row["tier"] for row in found["rows"]][:2] == ["memory", "disk"]
    assert found["setup"]["threads"] == 1
    assert all(found["setup"]["bytes_per_s"][tier] > 0 for tier in ("memory", "disk"))


def test_a_higher_ratio_computes_more_and_is_bound_to_cost_more(found):
    rows = {(row["tokens"], row["ratio"], row["tier"]): row for row in found["rows"]}
    for tokens in PLAN.tokens:
        low, high = rows[tokens, 0.0, "memory"], rows[tokens, 0.2, "memory"]
        cached = high["prompt_tokens"] - low["computed_tokens"]
        more = high["computed_tokens"] - low["computed_tokens"]
        assert 0.1 * cached < more <= 0.2 * cached
        assert high["bound_s"] >= low["bound_s"]


def test_full_prefill_and_ragkv_go_in_turn_and_every_tier_is_what_its_name_says(
    make_engine, monkeypatch
):
    """No device tier before it, and no chunk that is computed because it loads slowly."""
    calls, stores = [], []
    init, generate = RagKV.__init__, RagKV.generate

    def made(self, *given, store: StoreConfig, **more):
        stores.append(store)
        init(self, *given, store=store, **more)

    def noted(self, prompt, **overrides):
        calls.append((overrides["method"], str(prompt)))
        return generate(self, prompt, **overrides)

    loaded = make_engine().loaded
    monkeypatch.setattr(RagKV, "__init__", made)
    monkeypatch.setattr(RagKV, "generate", noted)
    monkeypatch.setattr("ragkv.ingest.corpus.is_slower", lambda *_: True)
    bench_ttft(loaded, replace(SMALL, tiers=("disk", "memory"), rounds=2))
    timed = calls[: 2 * 2 * 3]  # two settings: once to warm up, then two rounds
    assert [method for method, _ in timed] == ["full", "query"] * 6
    assert all(first[1] == second[1] for first, second in zip(timed[::2], timed[1::2], strict=True))
    assert [store.device_bytes for store in stores] == [0, 0]
    assert [store.memory_bytes for store in stores] == [0, 1 << 50]


def test_the_auxiliary_model_is_ready_before_anything_is_timed(tmp_path, make_engine):
    saved(tmp_path, "qwen2")
    plan = replace(SMALL, methods=("cacheclip",))
    found = bench_ttft(make_engine().loaded, plan, auxiliary_model=str(tmp_path))
    assert found["rows"][0]["method"] == "cacheclip"


def test_the_bar_says_what_is_done_before_the_first_figure(make_engine, capsys):
    bench_ttft(make_engine().loaded, SMALL, show_progress=True)
    shown = capsys.readouterr().err
    phases = ["cutting the text", "encoding chunks for query", "warming up"]
    assert [shown.find(phase) for phase in phases] == sorted(map(shown.find, phases))
    assert -1 < shown.find("warming up") < shown.find("100%")


def test_peak_growth_sees_what_is_kept_and_what_is_let_go():
    size, device = 64 << 20, torch.device("cpu")
    if peak_growth(lambda: torch.ones(size, dtype=torch.uint8).sum().item(), device) is None:
        pytest.skip("this system does not say how much memory a process uses")
    found = peak_growth(lambda: torch.ones(size, dtype=torch.uint8), device)
    assert 0.9 * size < found < 1.5 * size
    assert peak_growth(lambda: None, device) < 0.1 * size


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": ()}, "one or more different tokens"),
        ({"tokens": (400, 400)}, "one or more different tokens"),
        ({"tokens": (0,)}, "1 or more"),
        ({"rounds": 0}, "1 or more"),
        ({"chunk_tokens": 3}, "chunk_tokens must be 16 or more"),
        ({"tiers": ("tape",)}, "tiers are memory and disk"),
        ({"ratios": (1.5,)}, "between 0 and 1"),
        ({"methods": ("full",)}, "reuses no chunks"),
    ],
)
def test_plans_that_cannot_be_measured(changes, message):
    with pytest.raises(ConfigError, match=message):
        TtftPlan(**changes)
    with pytest.raises(UnknownMethodError, match="no method 'nothing'"):
        TtftPlan(methods=("nothing",))


# ---- the command and its table


def run(*arguments):
    return CliRunner().invoke(app, ["bench", "ttft", *map(str, arguments)])


def test_from_options_to_table_and_json(tmp_path, monkeypatch):
    real = ragkv.RagKV
    monkeypatch.setattr(
        ragkv, "RagKV", lambda _, **given: real(tiny_model(), tiny_tokenizer(), **given)
    )
    path = tmp_path / "b.json"
    done = run("--tokens", "300", "--chunk-tokens", 100, "--ratio", "0.2", "--rounds", 1,
               "--method", "query", "--json", path)  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "query 0.2" in done.output
    assert json.loads(path.read_text())["rows"][0]["tokens"] == 300


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "many"], "--tokens takes numbers"),
        (["--ratio", "auto"], "--ratio takes numbers"),
        (["--ratio", ","], "one or more different ratios"),
        (["--tier", "tape"], "tiers are memory and disk"),
        (["--json", "no-such-folder/b.json"], "there is no folder"),
        (["--peer", "vllm"], "needs --vllm-python PATH"),
        (["--peer", "llama.cpp", "--model", "a"], "give --gguf FILE"),
    ],
)
def test_options_that_are_refused(arguments, message):
    done = run(*arguments)
    assert done.exit_code == 2
    assert message in re.sub(r"\s+", " ", done.stderr)


def some_benchmark():
    steps = dict.fromkeys(("wait", "find", "load", "splice", "select", "recompute"), 1.23456)
    steps["first_token"] = 0.1
    row = {"method": "cacheclip", "full_s": 20.0, "ragkv_s": 4.0, "speedup": 5.0, "bound_s": 2.0,
           "efficiency": 0.5, "steps": steps, "peak_bytes": 10**9, "quartiles": (4.9, 5.1),
           "rounds": 5}  # fmt: skip
    rows = [
        row | {"tokens": tokens, "prompt_tokens": tokens - 3, "ratio": ratio, "tier": tier}
        for tokens in (1024, 16384)
        for ratio in (0.1, 0.2)
        for tier in ("memory", "disk")
    ]
    peer = {"name": "llama.cpp", "build": "AVX2 = 1", "tokens": 1024, "ttft_s": 12.0, "speedup": 3.0,
            "quartiles": (2.9, 3.1), "against": "cacheclip 0.2 memory"}  # fmt: skip
    where = {"model": "/a/long/folder" * 9 + "/model", "device": "a device"}
    return where | {"rows": rows, "peers": [peer]}


def test_the_tables_fit_80_columns(capsys):
    from rich.console import Console

    console = Console(width=80, force_terminal=False)
    for table in tables(some_benchmark()):
        console.print(table)
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert re.search(r"cacheclip 0\.1 +memory +1021 +20 +4 +5\.0x +10\.0x +50% +1000", shown)
    assert re.search(r"llama\.cpp +cacheclip 0\.2 memory +1024 +12 +3\.0x", shown)
