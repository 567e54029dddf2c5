"""Stores that are named by a URL: how they are opened, and what an engine does without them."""

import logging
import secrets
import sys
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest
from store_entries import FINGERPRINT, make_entry, put_texts, same
from store_servers import RedisServer, redis_server, s3_server, valkey_server  # noqa: F401
from tiny import some_chunks

from ragkv import StoreConfig
from ragkv.errors import ConfigError, MissingDependencyError, StoreError
from ragkv.store import open_chunk_store, open_store
from ragkv.store.operate import copy_store
from ragkv.store.types import Terms


@pytest.fixture(params=["redis", "valkey", "s3"])
def url(request: pytest.FixtureRequest) -> str:
    """The address of an empty store."""
    if request.param == "s3":
        return request.getfixturevalue("s3_server").replace("prefix", secrets.token_hex(4))
    return request.getfixturevalue(f"{request.param}_server").url


@pytest.fixture
def namespace() -> str:
    return f"a/{secrets.token_hex(4)}"


def test_open_store(url, namespace):
    config = StoreConfig(url, memory_bytes=0)
    with closing(open_store(config, namespace)) as store, closing(open_store(url, "b")) as other:
        assert store.changes(0)[:2] == (0, [])
        store.put(make_entry("x"), FINGERPRINT, Terms("d"))
        assert other.get("x", FINGERPRINT).reason == "absent"
        with closing(open_store(StoreConfig(url, read_only=True), namespace)) as served:
            assert same(served.get("x", FINGERPRINT).entry, make_entry("x"))
            assert served.changes(0)[:2] == (1, ["x"])
            with pytest.raises(StoreError, match="read_only"):
                served.delete("x")
        assert store.forget_document("d") == 1
        assert list(store.texts()) == []


def test_a_store_is_copied_to_a_server_and_back(url, namespace, tmp_path):
    places = [StoreConfig(tmp_path / "from"), StoreConfig(url), StoreConfig(tmp_path / "to")]
    with closing(open_chunk_store(places[0], namespace)) as first:
        put_texts(first, "xy", Terms("d", 4e9), tokens=50)
        expected = list(first.entries())
    for source, target in pairwise(places):
        with (
            closing(open_chunk_store(source, namespace)) as old,
            closing(open_chunk_store(target, namespace)) as new,
        ):
            assert copy_store(old, new).entries == 2
            assert list(new.entries()) == expected
            assert same(new.get("x", FINGERPRINT).entry, make_entry("x", tokens=50))


def test_what_ends_the_keys_of_a_reading_is_said_once(url, namespace):
    error = StoreError("the list broke off")

    def keys():
        yield "a"
        raise error

    with (
        closing(open_chunk_store(StoreConfig(url), namespace)) as store,
        pytest.raises(StoreError, match=r"^the list broke off$"),
    ):
        list(store.backend.get_many(keys()))


def test_a_limit_of_a_folder_does_not_fit(url):
    with pytest.raises(ConfigError, match="disk_bytes"):
        open_store(StoreConfig(url, disk_bytes=10))


@pytest.mark.parametrize(("url", "package"), [("redis://h", "redis"), ("s3://b", "obstore.store")])
def test_a_missing_package_is_named(url, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependencyError, match=r"pip install '.*\[(redis|s3)\]'"):
        open_store(url)


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RedisServer]:
    pytest.importorskip("redis")
    server = RedisServer(tmp_path)
    yield server
    server.kill()


@pytest.mark.parametrize("memory_bytes", [0, 1 << 30])
def test_an_engine_whose_server_dies_answers_in_full(make_engine, own_server, caplog, memory_bytes):
    chunks = some_chunks(2)
    prompt = "\n\n".join([*chunks, "What is assigned?"])
    kv = make_engine(store=StoreConfig(own_server.url, memory_bytes=memory_bytes))
    expected = make_engine().generate(prompt, method="full", max_new_tokens=6)
    kv.precompute(chunks)
    assert len(kv.generate(prompt, max_new_tokens=2).report.chunks) == 2
    own_server.kill()
    with caplog.at_level(logging.WARNING, "ragkv"):
        answer = kv.generate(prompt, max_new_tokens=6, recompute_ratio=1)
    assert answer.token_ids == expected.token_ids
    if memory_bytes:
        assert len(answer.report.chunks) == 2  # from memory
    else:
        assert [miss.reason for miss in answer.report.misses] == ["unreadable"] * 2
        assert "cannot read the chunk cache" in caplog.text
    kv.wait()
    assert not kv.contains(chunks[0])
    with pytest.raises(StoreError, match="cannot be used"):
        kv.precompute(["a new chunk of text " * 20])
    own_server.start()
    kv.precompute(chunks)
    assert kv.contains(chunks[0])


def test_an_engine_whose_server_hangs_answers_in_full(make_engine, own_server):
    chunks = some_chunks(1)
    prompt = f"{chunks[0]}\n\nWhat is assigned?"
    place = StoreConfig(f"{own_server.url}?socket_timeout=0.2", memory_bytes=0, history_bytes=0)
    kv = make_engine(store=place)
    kv.precompute(chunks)
    expected = kv.generate(prompt, max_new_tokens=6, recompute_ratio=1)
    with own_server.stopped():
        answer = kv.generate(prompt, max_new_tokens=6)
        assert answer.token_ids == expected.token_ids
        assert [miss.reason for miss in answer.report.misses] == ["unreadable"]
        kv.wait()
