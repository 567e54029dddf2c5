"""Routing keys: where they come from, and that a proxy sends by them where chunks are warm."""

import random
import re
import shutil
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from listening import Listening
from served import CHAT, CHUNKS, TEXT, chat
from store_servers import free_port
from tiny import ask, some_chunks

from ragkv import StoreConfig
from ragkv.client import RemoteRagKV
from ragkv.retrieve.route import HEADER, route_of

PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"


def test_a_key_is_of_a_set_of_texts():
    key = route_of(CHUNKS)
    assert re.fullmatch("[0-9a-f]{16}", key)
    assert route_of([f" {text}\n" for text in reversed(CHUNKS)] * 2) == key
    assert route_of([]) == ""
    assert route_of(["\ud800"]) != route_of(["\udfff"])


def test_sets_that_share_most_chunks_mostly_share_the_key():
    draw, same, runs = random.Random(0), 0, 2000
    for _ in range(runs):
        texts = [str(draw.random()) for _ in range(6)]
        same += route_of(texts[:5]) == route_of(texts[1:])  # 4 of 6
    assert same / runs == pytest.approx(4 / 6, abs=0.04)


def test_answers_say_the_key_of_the_chunks_that_were_found(client, kv):
    kv.precompute(CHUNKS[:2])
    key = route_of(CHUNKS[:2])
    for path, body in ((CHAT, chat()), (TEXT, {"prompt": " ".join(CHUNKS), "max_tokens": 2})):
        for stream in (False, True):
            answer = client.post(path, json={**body, "stream": stream})
            assert answer.headers[HEADER] == key
    named = client.post(CHAT, json=chat(ragkv={"retrieved": CHUNKS}))
    assert named.headers[HEADER] == route_of(CHUNKS)
    assert HEADER not in client.post(CHAT, json={**chat(), "messages": ask([])}).headers


def test_the_key_is_there_in_advance(client):
    answer = client.post("/v1/route", json={"texts": CHUNKS})
    assert answer.json() == {"route": route_of(CHUNKS)}
    assert client.post("/v1/route", json={}).status_code == 400


# ---- the client


def test_what_names_its_chunks_says_where_they_are_warm(connect, stub):
    stub.answers |= {"POST /v1/chunks": [{"report": {}}], "POST /v1/chunks/prefetch": [{}]}
    kv = connect()
    kv.generate("Hi", retrieved=["b", "a"])
    kv.prefetch(["a", "b"], for_next_answer=False)
    kv.precompute(["a", "b"])
    kv.generate("Hi")
    sent = [(each.url.path, each.headers.get(HEADER)) for each in stub.requests]
    key = route_of(["a", "b"])
    assert sent == [
        ("/v1/completions", key),
        ("/v1/chunks/prefetch", key),
        ("/v1/chunks", key),
        ("/v1/completions", None),
    ]


# ---- behind a proxy


@pytest.fixture
def replicas(make_engine, listen, tmp_path) -> list[Listening]:
    """Three servers over one store."""
    engines = [make_engine(store=StoreConfig(tmp_path / "store")) for _ in range(3)]
    return [listen(engine, model_name=f"replica-{at}") for at, engine in enumerate(engines)]


@pytest.fixture
def proxy(replicas, tmp_path) -> Iterator[str]:
    """The address of nginx with the configuration of the documentation."""
    program = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")
    if program is None:
        pytest.skip("there is no nginx on this machine: apt-get install nginx-light")
    (block,) = re.findall(r"```nginx\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    ports = [replica.url.rpartition(":")[2] for replica in replicas]
    lines = iter(f"server 127.0.0.1:{port}" for port in ports)
    block, servers = re.subn(r"server replica-\d:8000", lambda _: next(lines), block)
    assert servers == len(ports)
    block, listens = re.subn("listen 80", f"listen 127.0.0.1:{(port := free_port())}", block)
    assert listens == 1
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "".join(f"{kind}_temp_path {tmp_path / kind};" for kind in kinds)
    (tmp_path / "nginx.conf").write_text(
        f"user root; daemon off; pid {tmp_path / 'pid'}; error_log {tmp_path / 'error'};"
        f"events {{}} http {{ access_log off; {temporary} {block} }}"
    )
    options = ["-e", str(tmp_path / "error"), "-c", str(tmp_path / "nginx.conf")]
    running = subprocess.Popen([program, *options], stderr=subprocess.DEVNULL)
    try:
        for _ in range(200):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        running.terminate()
        running.wait()


def test_a_proxy_sends_the_same_chunks_to_the_same_replica(replicas, proxy):
    chunks = some_chunks(8, words=30)
    sets = [(chunks[at], chunks[-1 - at], chunks[(at + 3) % 8]) for at in range(8)]
    asked: list[Counter[str]] = [Counter() for _ in replicas]
    for counter, replica in zip(asked, replicas, strict=True):
        stream = replica.engine.stream

        def counting(prompt, *, counter=counter, stream=stream, **options):
            counter[prompt] += 1
            return stream(prompt, **options)

        replica.engine.stream = counting
    prompts = {"\n\n".join([*texts, "What is assigned?"]): texts for texts in sets}
    with RemoteRagKV(proxy) as kv:
        assert kv.precompute(chunks, document="d").new == 8
        for _ in range(3):
            for prompt, texts in prompts.items():
                kv.prefetch(list(reversed(texts)))
                answer = kv.generate(prompt, retrieved=texts, max_new_tokens=2)
                assert len(answer.report.chunks) + len(answer.report.misses) >= 3
    for prompt in prompts:
        assert sorted(counter[prompt] for counter in asked) == [0, 0, 3]
    warm = [each.engine.status().tiers[0].hits for each in replicas]
    assert sum(warm) > 0

    def names(count, **headers):
        body = chat(max_tokens=1)
        found = [httpx.post(proxy + CHAT, json=body, headers=headers) for _ in range(count)]
        assert [each.status_code for each in found] == [200] * count
        return {each.json()["model"] for each in found}

    assert len(names(6)) > 1  # without the header any replica answers
    listed = [
        httpx.get(f"{proxy}/v1/models", headers={HEADER: f"{key:016x}"}).json()["data"][0]["id"]
        for key in range(64)  # ports are random: a few keys may well fall to one replica
    ]
    assert len(set(listed)) > 1
    route = httpx.post(f"{proxy}/v1/route", json={"texts": chunks[:3]}).json()["route"]
    (home,) = names(4, **{HEADER: route})
    dead = next(each for each in replicas if each.service.settings.model_name == home)
    dead.server.should_exit = True
    dead.thread.join(30)
    (other,) = names(4, **{HEADER: route})
    assert other != home
