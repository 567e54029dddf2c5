"""A store that does not answer holds up one call, and not each; what it had is there again."""

import secrets
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
from link import Link
from store_servers import redis_server, s3_server  # noqa: F401
from tiny import some_chunks

from ragkv import StoreConfig
from ragkv.errors import StoreError
from ragkv.store.backends import backend, redis, s3
from ragkv.store.backends.backend import Outage

PATIENCE_S = 0.5
CHUNKS = some_chunks(8, words=20)


def test_a_wait_in_vain_spares_others_as_long_a_wait(monkeypatch):
    now = 100.0
    monkeypatch.setattr(backend.time, "monotonic", lambda: now)
    outage = Outage()

    def call(seconds, error=None):
        nonlocal now
        with outage.noted():
            now += seconds
            if error is not None:
                raise error

    call(60)  # long, but an answer
    for error, seconds in ((StoreError, 0.5), (KeyError, 60)):
        with pytest.raises(error):
            call(seconds, error)
        call(0)
    with pytest.raises(StoreError, match=r"^$"):
        call(4, StoreError)
    for _ in range(3):
        with pytest.raises(StoreError, match="timed out"):
            call(0)
        now += 1.5
    call(0)
    with pytest.raises(StoreError, match=r"^$"):
        call(3600, StoreError)  # the process was stopped meanwhile
    now += 31
    call(0)


@pytest.fixture(params=["redis", "s3"])
def link(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    monkeypatch.setattr(backend, "LONG_WAIT_S", PATIENCE_S / 2)
    monkeypatch.setattr(redis, "TIMEOUT_S", PATIENCE_S)
    monkeypatch.setattr(s3, "TIMEOUT", timedelta(seconds=2 * PATIENCE_S))
    server = request.getfixturevalue(f"{request.param}_server")
    with Link(getattr(server, "url", server).replace("prefix", secrets.token_hex(4))) as link:
        yield link


@pytest.mark.parametrize("harm", ["hold", "cut"])
def test_answers_go_on_while_the_store_is_out_of_reach(make_engine, link, harm):
    place = StoreConfig(link.url, memory_bytes=0, history_bytes=0)
    kv = make_engine(store=place, namespace=secrets.token_hex(4), layers=2)
    prompt = "\n\n".join([*CHUNKS, "What is assigned?"])
    kv.precompute(CHUNKS)
    expected = kv.generate(prompt, max_new_tokens=4, recompute_ratio=1, on_miss="skip")
    assert len(expected.report.chunks) == len(CHUNKS)
    getattr(link, harm)()
    sent = link.sent
    for _ in range(3):
        answer = kv.generate(prompt, max_new_tokens=4, on_miss="skip")
        assert answer.token_ids == expected.token_ids
        assert [miss.reason for miss in answer.report.misses] == ["unreadable"] * len(CHUNKS)
        with pytest.raises(StoreError):
            kv.precompute(["a new chunk of text " * 20])
    assert link.sent - sent < 2 * len(CHUNKS)  # six calls over eight chunks
    link.heal()
    until = time.monotonic() + 45  # a remote store is called again after at most 30 s
    while kv.generate(prompt, max_new_tokens=1, on_miss="skip").report.misses:
        assert time.monotonic() < until
        time.sleep(0.05)
    assert all(map(kv.contains, CHUNKS))
