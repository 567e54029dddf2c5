"""Loads: clients in a closed loop, percentiles, the result, its table, the command."""

from __future__ import annotations

import asyncio
import json

import pytest
from listening import listening
from stub_endpoint import Reply, end, piece, stub_endpoint, usage, whole
from tiny import some_chunks, tiny_model, tiny_tokenizer
from typer.testing import CliRunner

from ragkv import RagKV
from ragkv.cli.main import app
from ragkv_bench.speed.load.client import ServedAnswer, open_client
from ragkv_bench.speed.load.endpoint import Endpoint
from ragkv_bench.speed.load.result import load_table, rows_of
from ragkv_bench.speed.load.run import bench_serve, run_load
from ragkv_bench.speed.load.workload import Dialogue, SourceDocument, Workload

ENDPOINT = Endpoint("m", {})


def workload(*turns: int) -> Workload:
    return Workload(
        (),
        tuple(
            Dialogue((f"d{n}",), (f"chunk {n}",), tuple(f"{n}.{turn}?" for turn in range(count)))
            for n, count in enumerate(turns)
        ),
    )


def chat(path: str, body: dict) -> Reply:
    return Reply(whole("x", "y"))


async def load(answer, what: Workload, clients: int):
    async with stub_endpoint(answer) as stub, open_client(stub.url, timeout_s=30) as client:
        return stub, *await run_load(client, ENDPOINT, what, clients=clients, answer_tokens=8)


async def test_a_closed_loop_has_as_many_requests_as_clients():
    slow = Reply([0.02, *whole("x")])
    stub, answers, wall_s = await load(lambda *_: slow, workload(*[1] * 9), 3)
    assert stub.most_at_once == 3
    assert len(answers) == 9
    assert wall_s >= 3 * 0.02


async def test_turns_follow_each_other_with_the_answers_that_came():
    stub, answers, _ = await load(chat, workload(3, 1), 1)
    assert [answer.turn for answer in answers] == [0, 1, 2, 0]
    assert [len(body["messages"]) for body in stub.bodies] == [1, 3, 5, 1]
    assert stub.bodies[2]["messages"][3] == {"role": "assistant", "content": "xy"}
    assert stub.bodies[1]["messages"] == stub.bodies[2]["messages"][:3]


async def test_a_conversation_ends_at_its_first_error():
    _, answers, _ = await load(lambda *_: Reply([b"full"], status=503), workload(3, 2), 2)
    assert [answer.error for answer in answers] == ["503", "503"]


def answered(turn: int = 0, **more) -> ServedAnswer:
    given = {"ttft_s": 1.0, "answer_s": 3.0, "completion_tokens": 5, "prompt_tokens": 50}
    return ServedAnswer(turn=turn, **given | more)


def test_rows_over_all_and_by_turn():
    answers = [
        answered(sources={"sink": 10, "fresh": 40}),
        answered(1, ttft_s=0.5, cached_tokens=50, counted=True),
        answered(1, error="503", ttft_s=None),
        answered(0, error="cut off"),
    ]
    everything, first, second = rows_of(answers, wall_s=10.0)
    assert [row["turns"] for row in (everything, first, second)] == ["all", "1", "2"]
    expected = {
        "requests": 4,
        "errors": 2,
        "errors_by_kind": {"503": 1, "cut off": 1},
        "ttft_p50_s": 0.75,
        "inter_token_p50_s": pytest.approx((0.5 + 0.625) / 2),
        "tokens_per_s": 1.0,
        "requests_per_s": 0.2,
        "cached_share": 0.5,
        "counted": 1,
        "sources": {"sink": 0.2, "fresh": 0.8},
    }
    assert everything | expected == everything
    assert (first["ttft_p99_s"], second["ttft_p99_s"]) == (1.0, 0.5)
    (nothing,) = rows_of([answered(error="503", ttft_s=None)], wall_s=1.0)
    assert nothing["ttft_p50_s"] is None
    assert nothing["cached_share"] == 0.0


def result(name: str, answers):
    found = {"name": name, "clients": 4, "wall_s": 10.0, "precompute_s": None}
    return found | {"rows": rows_of(answers, 10.0), "setup": {"notes": ["a note"]}}


def test_a_table_of_several_engines(tmp_path):
    from rich.console import Console

    results = [
        result("one[b]", [answered(), answered(1)]),
        result("none", [answered(error="503", ttft_s=None)]),
    ]
    with (tmp_path / "t.txt").open("w", encoding="utf-8") as out:
        Console(file=out, width=80).print(load_table(results))
    text = (tmp_path / "t.txt").read_text(encoding="utf-8")
    assert "one[b]" in text
    assert "4 clients" in text
    assert "1/1" in text


def ours(path: str, body: dict) -> Reply:
    """An endpoint with chunks and reports."""
    if path == "/v1/models":
        return Reply([b'{"data": [{"id": "m"}]}'])
    if path == "/v1/chunks":
        return Reply([b'{"report": {}}'])
    last = {**usage(100, 1, 40), "ragkv": {"tokens": {"reused": 40, "fresh": 60}}}
    return Reply([piece("x"), end(), last, "[DONE]"])


async def test_ragkvs_own_server():
    chunks = tuple(some_chunks(3))
    what = Workload(
        (SourceDocument("d", chunks, ("why?",)),),
        tuple(Dialogue(("d",), chunks, (f"why {number}?",)) for number in range(3)),
    )
    with RagKV(tiny_model("llama"), tiny_tokenizer(), store=":memory:") as kv, listening(kv) as url:
        found = await bench_serve(url, what, clients=2, warm_up=1, answer_tokens=4)
        assert all(map(kv.contains, chunks))
    assert found["precompute_s"] > 0
    assert found["rows"][0]["requests"] == 2
    assert found["rows"][0]["errors"] == 0
    assert found["rows"][0]["sources"]["reused"] > 0


async def test_a_benchmark_warms_up_and_precomputes(tmp_path):
    async with stub_endpoint(ours) as stub:
        found = await bench_serve(stub.url, workload(1, 1, 1, 1), clients=2, warm_up=1)
    assert found["rows"][0]["requests"] == 3
    assert found["rows"][0]["sources"] == {"reused": 0.4, "fresh": 0.6}
    assert found["precompute_s"] is not None
    assert found["setup"]["fields"] == ["ignore_eos", "ragkv", "stream_options"]
    assert found["name"] == stub.url


async def test_the_command(tmp_path):
    """All of it: the same trace twice, drawn and from the file."""
    saved, path, other = tmp_path / "t.jsonl", tmp_path / "r.json", tmp_path / "again.json"

    async def bench(*options: object) -> str:
        words = ["bench", "serve", *map(str, options)]
        done = await asyncio.to_thread(CliRunner().invoke, app, words)
        assert done.exit_code == 0, done.output
        return done.output

    async with stub_endpoint(ours) as stub:
        await bench(
            *("--url", stub.url, "--clients", 2, "--requests", 6, "--documents", 5),
            *("--save-trace", saved, "--json", path),
        )
        shown = await bench(
            *("--url", f"{stub.url}/v1", "--clients", 1, "--trace", saved, "--name", "again"),
            *("--json", other, "--beside", path),
        )
    first, again = (json.loads(each.read_text()) for each in (path, other))
    assert first["setup"]["trace"] == again["setup"]["trace"]
    assert (first["clients"], again["clients"]) == (2, 1)
    assert "2 clients; 1 client" in shown


def test_what_the_command_refuses(tmp_path):
    def refused(*options: str) -> str:
        done = CliRunner().invoke(app, ["bench", "serve", *options])
        assert done.exit_code == 2
        return done.output

    assert "must be at least 1" in refused("--clients", "0")
    (tmp_path / "bad.json").write_text('{"rows": []}')
    assert "is not by" in refused("--beside", str(tmp_path / "bad.json"))
    assert "omit one" in refused("--clients", "1", "--trace", "f", "--data", "g")
    assert "is not by" in refused("--trace", str(tmp_path / "none"))
    assert "does not answer" in refused("--clients", "1", "--url", "http://127.0.0.1:9")
