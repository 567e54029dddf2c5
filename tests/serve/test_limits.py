"""What a server bounds: bodies, its queue, the time, and its own end."""

import asyncio
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import httpx
import pytest
from served import CHAT, CHUNKS, TEXT, chat, client_of, events, model_held, refused, until

from ragkv.serve import answering
from ragkv.serve import body as bodies

LONG = {"prompt": CHUNKS[0], "max_tokens": 3000, "ignore_eos": True}
HEADERS = {"Content-Type": "application/json"}


def metric(url: str, line: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    found = [each for each in lines if each.startswith(line)]
    return float(found[0].rpartition(" ")[2]) if found else 0.0


def post(url: str, **fields: object) -> httpx.Response:
    return httpx.post(url + CHAT, json=chat(**fields), timeout=60)


def exchange(url: str, head: str, body: bytes = b"") -> bytes:
    """Send bytes and return what comes until the server closes."""
    host, port = url.removeprefix("http://").split(":")
    with closing(socket.create_connection((host, int(port)), timeout=30)) as connection:
        connection.sendall(head.replace("\n", "\r\n").encode() + b"\r\n" + body)
        received = b""
        while part := connection.recv(65536):
            received += part
        return received


@pytest.fixture
def small(listen, make_engine):
    """A server of one answer at a time, and one that waits."""
    engine = make_engine(max_running=1)
    engine.contains("a text")  # computes the sink: requests wait for nothing but their turn
    return listen(engine, max_waiting=1)


@pytest.mark.parametrize(
    ("header", "body", "status"),
    [
        ("Content-Length: 1001", b"", 413),  # is not read
        ("Transfer-Encoding: chunked", b"3e9\r\n" + b" " * 1001, 413),
        ("Content-Length: 10", b"", 408),
    ],
)
def test_bodies_that_are_too_long_or_do_not_come(listen, monkeypatch, header, body, status):
    monkeypatch.setattr(bodies, "BODY_BYTES", 1000)
    url = listen(timeout=0.1 if status == 408 else 600.0).url
    head = f"POST {CHAT} HTTP/1.1\nHost: x\nContent-Type: application/json\n{header}\n"
    answer = exchange(url, head, body)
    assert answer.startswith(f"HTTP/1.1 {status}".encode())
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"]
    assert httpx.get(f"{url}/version").status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/version", CHAT, "stream"])
def test_an_idle_connection_stays_open_for_a_proxys_minute(listen, path):
    server = listen()
    assert server.server.config.timeout_keep_alive > 60

    def call(client: httpx.Client) -> httpx.Response:
        if path == "/version":
            return client.get(f"{server.url}/version")
        return client.post(f"{server.url}{CHAT}", json=chat(stream=path == "stream"))

    with httpx.Client(limits=httpx.Limits(keepalive_expiry=60), timeout=60) as client:
        for seconds in (0, 7):
            threading.Event().wait(seconds)
            assert call(client).status_code == 200
            (connection,) = client._transport._pool.connections
            assert connection.is_idle()
        assert "Request Count: 2" in connection.info()


def test_lengths_at_the_bound(kv, monkeypatch):
    body = json.dumps(chat()).encode()
    monkeypatch.setattr(bodies, "BODY_BYTES", len(body))
    with client_of(kv) as client:
        assert client.post(CHAT, content=body, headers=HEADERS).status_code == 200
        refused(client.post(CHAT, content=body + b" ", headers=HEADERS), 413)
        refused(client.post(CHAT, content=iter([body, b" "]), headers=HEADERS), 413)


def test_a_full_queue(small):
    with ThreadPoolExecutor(2) as pool:
        with model_held(small.engine):
            waiting = [pool.submit(post, small.url) for _ in range(2)]
            until(lambda: (small.engine.status().running, small.engine.status().waiting) == (1, 1))
            assert metric(small.url, "ragkv:num_requests_running") == 1
            assert metric(small.url, "ragkv:num_requests_waiting") == 1
            response = post(small.url)
            refused(response, 503, code="queue_full")
            assert int(response.headers["retry-after"]) > 0
            assert httpx.get(f"{small.url}/version").status_code == 200
        assert [each.result().status_code for each in waiting] == [200, 200]
    assert small.service.gate.under_way == 0
    assert post(small.url).status_code == 200
    refused(post(small.url, n=3), 503)
    assert metric(small.url, 'ragkv:request_errors_total{code="queue_full"}') == 2


def test_a_deadline(listen):
    server = listen(timeout=0.3)
    with model_held(server.engine):
        for stream in (False, True):
            refused(post(server.url, stream=stream), 504, code="timeout")
        until(lambda: server.engine.status().running + server.engine.status().waiting == 0)
    assert server.service.gate.under_way == 0
    assert metric(server.url, 'ragkv:request_errors_total{code="timeout"}') == 2


def test_a_deadline_within_a_stream(listen):
    server = listen(timeout=2)
    body = {**LONG, "stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", server.url + TEXT, json=body, timeout=60) as answer:
        parts = answer.iter_text()
        begun = next(parts)
        with model_held(server.engine):
            *pieces, last = events(begun + "".join(parts))
    assert pieces
    assert last["error"]["code"] == "timeout"
    until(lambda: server.engine.status().running == 0)


def test_an_answer_that_is_not_read_ends_after_its_deadline(listen, monkeypatch):
    async def never(*_: object) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(answering.StreamingResponse, "__call__", never)
    monkeypatch.setattr(answering, "_UNREAD_S", 0.1)
    server = listen(timeout=1)
    began = time.monotonic()
    post(server.url, stream=True)
    assert time.monotonic() - began < 30
    assert server.service.gate.under_way == 0


def test_a_client_that_leaves_while_it_sends_is_no_failure(listen):
    url = listen().url
    host, port = url.removeprefix("http://").split(":")
    with closing(socket.create_connection((host, int(port)))) as connection:
        head = f"POST {CHAT} HTTP/1.1\nHost: x\nContent-Type: application/json\nContent-Length: 9\n"
        connection.sendall(head.replace("\n", "\r\n").encode() + b"\r\n{")
    until(lambda: metric(url, 'ragkv:request_errors_total{code="client_left"}') == 1)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_when_its_client_leaves(listen, stream):
    server = listen()
    leave = threading.Event()

    def ask():
        with httpx.stream("POST", server.url + TEXT, json={**LONG, "stream": True}) as answer:
            next(answer.iter_raw())
            leave.wait(30)

    if stream:
        thread = threading.Thread(target=ask)
        thread.start()
        until(lambda: server.engine.status().running == 1)
        leave.set()
        thread.join()
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + TEXT, json=LONG, timeout=0.5)
    until(lambda: server.engine.status().running == 0)
    until(lambda: server.service.gate.under_way == 0)
    assert metric(server.url, 'ragkv:request_success_total{finished_reason="abort"}') == 1
    assert metric(server.url, "ragkv:generation_tokens_total") == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_it_waits(listen, stream):
    server = listen()
    with model_held(server.engine):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + CHAT, json=chat(stream=stream), timeout=0.3)
        until(lambda: server.service.gate.under_way == 0)
        until(lambda: server.engine.status().running + server.engine.status().waiting == 0)
    assert post(server.url).status_code == 200


def test_draining_lets_answers_end_and_nobody_in(listen):
    server = listen()
    with ThreadPoolExecutor(2) as pool:
        with model_held(server.engine):
            running = [pool.submit(post, server.url, stream=stream) for stream in (False, True)]
            until(lambda: server.service.gate.under_way == 2)
            server.server.should_exit = True  # what a SIGTERM does
            until(lambda: server.service.gate.draining)
            for refusal in (
                httpx.get(f"{server.url}/health"),
                httpx.get(f"{server.url}/v1/models"),
                post(server.url),
            ):
                refused(refusal, 503, code="draining")
                assert refusal.headers["retry-after"]
            assert httpx.get(f"{server.url}/metrics").status_code == 200
        answers = [each.result() for each in running]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].json()["choices"][0]["finish_reason"] == "length"
    assert events(answers[1].text)[-1]["choices"][0]["finish_reason"] == "length"
    server.thread.join(30)
    assert not server.thread.is_alive()
    with pytest.raises(httpx.ConnectError):
        post(server.url)


def test_draining_has_a_bound(listen):
    server = listen(drain_timeout=0.2)
    with ThreadPoolExecutor(1) as pool, model_held(server.engine):
        waiting = pool.submit(post, server.url)
        until(lambda: server.service.gate.under_way == 1)
        server.server.should_exit = True
        refused(waiting.result(), 503, code="draining")
        server.thread.join(30)
        assert not server.thread.is_alive()


@pytest.mark.parametrize("path", ["/v1/chunks", "/v1/chunks/prefetch"])
def test_requests_that_the_end_cancels_are_refused(listen, monkeypatch, path):
    """Draining waits for answers only; other requests then have a few seconds."""
    server = listen()
    server.server.config.timeout_graceful_shutdown = 0.2
    begun, release = threading.Event(), threading.Event()

    def wait(*_, **__):
        begun.set()
        release.wait(30)

    monkeypatch.setattr(server.engine, "precompute", wait)
    monkeypatch.setattr(server.engine, "prefetch", wait)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(httpx.post, server.url + path, json={"texts": CHUNKS}, timeout=60)
        try:
            assert begun.wait(30)
            server.server.should_exit = True
            refused(waiting.result(30), 503, code="draining")
            assert waiting.result().headers["retry-after"]
        finally:
            release.set()
