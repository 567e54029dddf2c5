"""The load's client: what it reads from streams, and what it says of broken ones."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
from stub_endpoint import DONE, Reply, end, piece, stub_endpoint, usage, whole

from ragkv.report.account import PromptTokens, ReuseReport
from ragkv_bench.errors import PeerError
from ragkv_bench.speed.load.client import ask, open_client
from ragkv_bench.speed.load.endpoint import Endpoint, precompute, probe
from ragkv_bench.speed.load.workload import SourceDocument

BODY = Endpoint("m", {}).body([{"role": "user", "content": "hi"}], 4)


async def answer_to(reply: Reply, timeout_s: float = 30.0, **given):
    async with (
        stub_endpoint(lambda *_: reply) as stub,
        open_client(stub.url, timeout_s=timeout_s) as client,
    ):
        return await ask(client, BODY, **given)


async def test_a_whole_answer_by_a_clock_that_ticks():
    """The clock is read at the start and at each piece."""
    found = await answer_to(Reply(whole("a", "b", "c")), clock=partial(next, itertools.count(10.0)))
    assert found.error is None
    assert (found.text, found.ttft_s, found.answer_s) == ("abc", 1.0, 3.0)
    assert (found.prompt_tokens, found.cached_tokens, found.completion_tokens) == (100, 40, 3)
    assert (found.inter_token_s, found.counted) == (1.0, False)


async def test_an_empty_first_piece_is_no_token():
    role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
    parts = [role, 0.05, piece("a"), piece("b"), piece("c"), end(), usage(9, 3), DONE]
    found = await answer_to(Reply(parts))
    assert found.error is None
    assert found.ttft_s >= 0.05
    assert found.inter_token_s == pytest.approx((found.answer_s - found.ttft_s) / 2)


async def test_without_usage_pieces_are_counted():
    found = await answer_to(Reply([piece("a"), piece("b"), end("stop"), DONE]))
    assert (found.completion_tokens, found.counted, found.prompt_tokens) == (2, True, 0)
    assert found.error is None


async def test_texts_with_unicode_line_separators_and_split_lines():
    event = piece("a\u2028b\x85c")
    found = await answer_to(Reply([event, b"data: {", 0.01, b'"choices": []}\r\n\r\n: ping\n\n', end(), DONE]))  # fmt: skip
    assert found.error is None
    assert found.text == "a\u2028b\x85c"


async def test_the_sources_of_a_report_add_up_to_the_prompt():
    numbers = (10, 5, 4, 1, 24, 10, 6)
    origins = b"".join(bytes([at]) * number for at, number in enumerate(numbers))
    report = ReuseReport("query", 0.5, 0.01, PromptTokens(origins, exact=34))
    last = {**usage(60, 1), "ragkv": report.to_dict()}
    found = await answer_to(Reply([piece("a"), end(), last, DONE]))
    assert sum(found.sources.values()) == report.tokens.prompt == 60
    assert found.sources["history_exact"] == 24


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (Reply([b'{"error": {"message": "no such key"}}'], status=401), "401"),
        (Reply([b"full"], status=503), "503"),
        (Reply([piece("a"), {"error": {"message": "out of memory"}}, DONE]), "stream"),
        (Reply([piece("a"), b"data: {nonsense\n\n"]), "stream"),
        (Reply([b"data: [1]\n\n"]), "stream"),
        (Reply([piece("a")]), "cut off"),
        (Reply([piece("a")], torn=True), "connection"),
        (Reply([piece("a"), 2.0, *whole("b")]), "timeout"),
    ],
)
async def test_errors_have_names(reply, error):
    found = await answer_to(reply, timeout_s=0.2 if error == "timeout" else 30.0)
    assert found.error == error
    assert found.message or error == "cut off"


def only(*taken: str):
    """Answer chat requests whose extra fields are among these, and list one model."""

    def answer(path: str, body: dict) -> Reply:
        if path == "/v1/models":
            return Reply([b'{"data": [{"id": "the-model"}]}'])
        if not {"stream_options", "ignore_eos", "ragkv"} & body.keys() <= set(taken):
            return Reply([b'{"error": "unknown field"}'], status=400)
        tail = [usage(10, 1)] if "stream_options" in body else []
        if "ragkv" in body:
            tail[0]["ragkv"] = {"tokens": {"sink": 1}}
        return Reply([piece("a"), end(), *tail, DONE])

    return answer


@pytest.mark.parametrize("taken", [(), ("stream_options",), ("stream_options", "ignore_eos", "ragkv")])  # fmt: skip
async def test_the_probe_finds_what_is_taken(taken):
    async with stub_endpoint(only(*taken)) as stub, open_client(stub.url, timeout_s=9) as client:
        found = await probe(client)
        assert found.model == "the-model"
        assert tuple(found.extra) == taken
        assert len(found.notes) == 3 - len(taken)
        body = found.body([{"role": "user", "content": "hi"}], 7)
        assert (body["temperature"], body["max_tokens"], body["stream"]) == (0, 7, True)


async def test_the_probe_finds_a_server_that_divides_by_the_temperature():
    def answer(path: str, body: dict) -> Reply:
        return Reply(whole("a" if body["temperature"] else ""))

    async with stub_endpoint(answer) as stub, open_client(stub.url, timeout_s=9) as client:
        found = await probe(client, model="m")
    assert found.body([], 1)["temperature"] == 1e-5
    assert "temperature 0" in found.notes[0]


async def test_the_probe_refuses_what_answers_nothing():
    async with (
        stub_endpoint(lambda *_: Reply([b"{}"], status=401)) as stub,
        open_client(stub.url + "/v1/", api_key="k", timeout_s=9) as client,
        open_client("http://127.0.0.1:9", timeout_s=1) as nobody,
    ):
        with pytest.raises(PeerError, match="names no model"):
            await probe(client)
        with pytest.raises(PeerError, match="401"):
            await probe(client, model="m")
        assert (await ask(nobody, BODY)).error == "connection"
        with pytest.raises(PeerError, match="does not answer"):
            await probe(nobody)


async def test_chunks_are_posted():
    replies = iter([Reply([b"{}"]), Reply([b"full"], status=507), Reply(status=404)])
    document = SourceDocument("d", ("a", "b"), ("why?",))
    async with (
        stub_endpoint(lambda *_: next(replies)) as stub,
        open_client(stub.url, timeout_s=9) as client,
    ):
        assert await precompute(client, [document]) > 0
        assert stub.paths == ["/v1/chunks"]
        assert stub.bodies[0] == {"texts": ["a", "b"], "document": "d"}
        with pytest.raises(PeerError, match="d was not precomputed: full"):
            await precompute(client, [document])
        assert await precompute(client, [document, document]) is None  # where there are no chunks


async def test_no_proxy_of_the_environment_is_used(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    assert (await answer_to(Reply(whole("a")))).error is None
