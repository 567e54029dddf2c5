"""The simulator: traces, what it counts, and admission on the traces of the papers."""

from __future__ import annotations

import json
from collections import Counter
from itertools import chain
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ragkv.cli.main import app
from ragkv.errors import ConfigError
from ragkv.measure.capacity.simulate import Wanted, read_trace, simulate, zipf_trace
from ragkv.store.tiers.costs import CostTable
from ragkv.store.tiers.policies import policy_names

RATE = CostTable.at_rate(100.0)
QUADRATIC = CostTable((0, 1000), (0, 1000, 4000), ((0.0, 0.2, 1.4), (0.0, 0.3, 1.8)))


def test_hits_and_seconds_are_counted() -> None:
    trace = [[Wanted(0, 100), Wanted(1, 100)], [Wanted(0, 100)], [Wanted(2, 200)], [Wanted(0, 100)]]
    out = simulate(trace, "lru", 300, bytes_per_token=1, costs=RATE)
    assert (out.hit_rate, out.token_hit_rate) == (2 / 5, 200 / 600)
    assert out.saved_s == pytest.approx(2.0)
    assert out.saved == pytest.approx(2 / 6)
    assert (out.evictions, out.refused) == (1, 0)
    none = simulate(trace, "lru", 99, bytes_per_token=1, costs=RATE)
    assert (none.hit_rate, none.refused) == (0.0, 5)


def test_a_trace_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"t": 0.5, "chunks": [{"id": "a", "tokens": 7}, {"id": "b", "share": 0.5}]}\n\n["b", 3, "b"]\n'
    )
    assert read_trace(path) == [[Wanted(0, 7), Wanted(1, 400)], [Wanted(1), Wanted(2)]]


def test_a_line_ends_where_json_lines_do(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + '["a\u2028b", "c\u0085"]\r\n["a\u2028b"]'.encode())
    assert read_trace(path) == [[Wanted(0), Wanted(1)], [Wanted(0)]]


@pytest.mark.parametrize(
    "line",
    [
        "{}",
        '"abc"',
        "[" * 100_000,
        "3",
        '{"chunks": [{}]}',
        "[",
        '[{"id": 1, "tokens": 0}]',
        '[{"id": 1, "tokens": 1e999}]',
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f'["a"]\n{line}\n')
    with pytest.raises(ConfigError, match="line 2"):
        read_trace(path)
    path.write_text("")
    with pytest.raises(ConfigError, match="no requests"):
        read_trace(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "absent")


def test_three_percent_of_the_chunks_take_sixty_percent_of_the_requests() -> None:
    trace = zipf_trace(2000, 4000, seed=1, per_request=1)
    counts = Counter(wanted.chunk for wanted in chain(*trace))
    top = sum(count for _, count in counts.most_common(60))
    assert top / 4000 == pytest.approx(0.6, abs=0.03)
    assert trace == zipf_trace(2000, 4000, seed=1, per_request=1)
    assert trace != zipf_trace(2000, 4000, seed=2, per_request=1)
    with pytest.raises(ConfigError, match="chunks must be at least"):
        zipf_trace(10)


@pytest.mark.parametrize("policy", policy_names())
@pytest.mark.parametrize("share", [0.03, 0.1])
def test_admission_is_no_worse_on_a_zipf_trace(policy: str, share: float) -> None:
    trace = zipf_trace(1000, 2500, seed=0)
    budget = int(share * 1000 * 544)
    plain, admitted = (
        simulate(trace, policy, budget, bytes_per_token=1, costs=QUADRATIC, admission=admission)
        for admission in (False, True)
    )
    assert admitted.hit_rate >= plain.hit_rate - 0.005
    assert admitted.saved >= plain.saved - 0.005


@pytest.mark.parametrize("policy", policy_names())
def test_chunks_wanted_once_do_not_flush_hot_ones(policy: str) -> None:
    hot = [[Wanted(number, 100)] for number in range(10)] * 6
    scan = [[Wanted(1000 + number, 100)] for number in range(500)]
    for trace in (hot + scan + hot, [*chain(*zip(hot * 8, scan, strict=False)), *hot]):
        out = simulate(trace, policy, 1000, bytes_per_token=1, costs=QUADRATIC, admission=True)
        misses = len(trace) - round(out.hit_rate * len(trace))
        misses -= sum(request[0].chunk >= 10 for request in trace)
        assert 10 <= misses <= 20  # ten of them are the first of their kind


def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    zipf = "chunks=200,requests=300,seed=3"
    arguments = ["store", "simulate", "--zipf", zipf, "--bytes", "9000000"]
    arguments += ["--bytes-per-token", "1000", "--policy", "lru,pgdsf", "--json", str(path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "pgdsf" in result.stdout
    figures = json.loads(path.read_text())
    assert list(figures["policies"]) == ["lru", "pgdsf"]
    assert figures["policies"]["lru"]["plain"]["hit_rate"] > 0.2
    costs = tmp_path / "plan.json"
    costs.write_text(json.dumps({"costs": QUADRATIC.to_dict()}))
    trace = tmp_path / "trace.jsonl"
    trace.write_text('["a", "b"]\n["a"]\n')
    arguments = ["store", "simulate", "--trace", str(trace), "--bytes", "100000000"]
    result = CliRunner().invoke(app, [*arguments, "--costs", str(costs)])
    assert result.exit_code == 0, result.output
    assert "33.3%" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--trace"),
        (["--zipf", "chunks"], "chunks=10000"),
        (["--zipf", "chunks=x"], "chunks=10000"),
        (["--zipf", "colour=3"], "chunks=10000"),
        (["--zipf", "chunks=5"], "at least 100"),
        (["--zipf", "seed=0", "--policy", "best"], "no eviction policy 'best'"),
        (["--zipf", "seed=0", "--costs", "nowhere.json"], "cannot be read"),
        (["--zipf", "seed=0", "--json", "nowhere/out.json"], "no folder"),
        (["--zipf", "seed=0", "--prefill-tps", "inf"], "--prefill-tps"),
    ],
)
def test_the_command_says_what_is_wrong(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["store", "simulate", "--bytes", "1000", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
