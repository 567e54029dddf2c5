"""What every backend does, whatever it stands on."""

import random
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest
from store_entries import without_syncs  # noqa: F401
from store_servers import RedisServer, redis_server, s3_server, valkey_server  # noqa: F401

from ragkv.config import StoreConfig
from ragkv.errors import ConfigError, StoreError, StoreFullError
from ragkv.store.backends import is_url, open_backend
from ragkv.store.backends.backend import Backend, check_key
from ragkv.store.backends.redis import RedisBackend
from ragkv.store.backends.s3 import S3Backend

pytestmark = pytest.mark.usefixtures("without_syncs")


def bytes_of(seed: object, length: int) -> bytes:
    return random.Random(str(seed)).randbytes(length)


def content(backend: Backend, key: str) -> bytes | None:
    value = backend.get(key)
    return None if value is None else bytes(value)


SIZES = [0, 1, 999, 1000, 1001, 4096, 4097, 65536, 65537, 3 << 20]


@pytest.mark.parametrize("size", SIZES)
def test_returns_what_was_put(backend, size):
    value = bytes_of("value", size)
    assert backend.get("a/key") is None
    assert backend.size("a/key") is None
    cut = size // 3
    backend.put(
        "a/key", [value[:cut], memoryview(value)[cut : 2 * cut], bytearray(value[2 * cut :])]
    )
    assert content(backend, "a/key") == value
    assert backend.size("a/key") == size
    assert [tuple(key) for key in backend.scan("")] == [("a/key", size)]
    assert backend.delete("a/key")
    assert not backend.delete("a/key")
    assert backend.get("a/key") is None
    assert backend.size("a/key") is None
    assert list(backend.scan("")) == []


def test_a_value_may_change_its_size(backend):
    for size in [5, 70_000, 10, 0, 2000, 140_000, 66_000, 3]:
        value = bytes_of("again", size)
        backend.put("key", [value])
        assert content(backend, "key") == value
        assert backend.size("key") == size
        assert [tuple(key) for key in backend.scan("")] == [("key", size)]


def test_large_values_can_be_written_to(backend):
    """Torch wants such memory; what is written there stays in this process."""
    backend.put("key", [bytes(100_000)])
    value = backend.get("key")
    if not isinstance(value, bytes):
        value[0] = 1
    assert content(backend, "key") == bytes(100_000)


KEYS = ["0", "A-b_c.d", "Z", "a", "a/b", "a/b-c", "a/b/c", "a/c", "aa", "b/" + "x" * 500, "z"]


def test_keys_are_scanned_in_order(backend):
    draw = random.Random(0)
    assert list(backend.scan("")) == []
    for key in draw.sample(KEYS, len(KEYS)):
        backend.put(key, [key.encode()])
    assert [key.name for key in backend.scan("")] == sorted(KEYS)
    for prefix in ["", "0", "a", "a/", "a/b", "a/b/", "b/x", "zz", "nothing/"]:
        for after in ["", *KEYS, "a/a", "a/bb", "zzz"]:
            expected = [key for key in sorted(KEYS) if key.startswith(prefix) and key > after]
            assert [key.name for key in backend.scan(prefix, after)] == expected, (prefix, after)
    assert all(key.nbytes == len(key.name) for key in backend.scan(""))
    for key in KEYS:
        assert content(backend, key) == key.encode()


def test_long_scans(backend):
    count = 60 if isinstance(backend, S3Backend) else 1202  # more than a page, but moto is slow
    keys = [f"log/{number:020}" for number in range(1, count + 1)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda key: backend.put(key, [b"x"]), keys))
    assert [key.name for key in backend.scan("log/")] == keys
    assert [key.name for key in backend.scan("log/", keys[-3])] == keys[-2:]
    assert [value is not None for value in backend.get_many([*keys, "none"])] == [True] * count + [
        False
    ]


@pytest.mark.parametrize(
    "key", ["", "/a", "a/", "a//b", "../a", "a/../b", ".a", "-a", "ä", "a b", "a\n", "x" * 513]
)
def test_other_keys_are_refused(key):
    with pytest.raises(ValueError, match="is no key"):
        check_key(key)


def test_several_values_at_once(backend):
    expected: list[bytes | None] = []
    for number, size in enumerate(SIZES[:-1]):
        expected += [bytes_of(number, size), None]
        backend.put(f"value/{number}", [bytes_of(number, size)])
    keys = [f"{kind}/{number}" for number in range(len(SIZES) - 1) for kind in ("value", "none")]
    found = list(backend.get_many(iter(keys)))
    assert [value if value is None else bytes(value) for value in found] == expected
    assert list(backend.get_many([])) == []


@pytest.mark.parametrize("size", [10, 100_000])
def test_one_of_many_puts_what_is_absent(opened, size):
    backends = [opened(), opened()]
    for round_ in range(5):
        barrier = threading.Barrier(8)

        def put(number, key=f"key/{round_}", barrier=barrier):
            barrier.wait(30)
            return backends[number % 2].put_if_absent(key, [bytes_of(number, size)])

        with ThreadPoolExecutor(8) as pool:
            first = list(pool.map(put, range(8)))
        assert first.count(True) == 1
        assert content(backends[0], f"key/{round_}") == bytes_of(first.index(True), size)
    assert not backends[0].put_if_absent("key/0", [b"late"])
    backends[1].delete("key/0")
    assert backends[0].put_if_absent("key/0", [b"late"])
    assert content(backends[1], "key/0") == b"late"


def test_no_value_is_seen_in_part(opened):
    sizes = [3, 5000, 5000, 70_000, 130_000]
    values = {bytes_of(number, size) for number, size in enumerate(sizes)}
    writers, reader = [opened(), opened()], opened()
    writers[0].put("key", [next(iter(values))])
    done = threading.Event()

    def write(backend):
        try:
            for value in 12 * list(values):
                backend.put("key", [value[:1000], value[1000:]])
        finally:
            done.set()

    def read():
        while not done.is_set():
            value = reader.get("key")
            assert value is not None
            assert bytes(value) in values

    with ThreadPoolExecutor(4) as pool:
        tasks = [pool.submit(write, backend) for backend in writers]
        tasks += [pool.submit(read) for _ in range(2)]
        for task in tasks:
            task.result()


def test_two_openers_see_each_other(opened):
    first, second = opened(), opened()
    for number, size in enumerate([10, 100_000]):
        first.put(f"key/{number}", [bytes(size)])
        assert content(second, f"key/{number}") == bytes(size)
        second.put(f"key/{number}", [bytes(size + 1)])
        assert first.size(f"key/{number}") == size + 1
        assert [key.nbytes for key in first.scan("")] == [size + 1]
        assert second.delete(f"key/{number}")
        assert first.get(f"key/{number}") is None


def test_a_closed_backend_is_closed(opened):
    backend = opened()
    backend.put("key", [b"value"])
    backend.close()
    backend.close()
    for use in USES:
        with pytest.raises(StoreError, match="closed"):
            use(backend)
    assert content(opened(), "key") == b"value"


USES: list[Callable[[Backend], object]] = [
    lambda backend: backend.get("key"),
    lambda backend: list(backend.get_many(["key"])),
    lambda backend: backend.size("key"),
    lambda backend: backend.put("key", [b"x"]),
    lambda backend: backend.put("large", [bytes(100_000)]),
    lambda backend: backend.put_if_absent("other", [b"x"]),
    lambda backend: backend.delete("key"),
    lambda backend: list(backend.scan("")),
]


# ---- Redis


def test_the_redis_server_dies(tmp_path):
    pytest.importorskip("redis")
    server = RedisServer(tmp_path)
    with closing(RedisBackend(server.url, "n")) as backend:
        backend.put("key", [b"value"])
        server.kill()
        for use in USES:
            with pytest.raises(StoreError, match=rf"server at {server.url} cannot be used"):
                use(backend)
        with pytest.raises(StoreError, match="cannot be used"):
            RedisBackend(server.url, "n")
        server.start()
        try:
            assert backend.get("key") is None
            backend.put("key", [b"value"])
            assert backend.get("key") == b"value"
        finally:
            server.kill()


def test_the_redis_server_hangs(tmp_path):
    pytest.importorskip("redis")
    server = RedisServer(tmp_path)
    with closing(RedisBackend(f"{server.url}?socket_timeout=0.2", "n")) as backend:
        backend.put("key", [b"value"])
        with server.stopped(), pytest.raises(StoreError, match=r"[Tt]ime"):
            backend.get("key")
        assert backend.get("key") == b"value"
    server.kill()


def test_a_redis_server_without_room(redis_server):  # noqa: F811
    with closing(RedisBackend(redis_server.url, secrets.token_hex(8))) as backend:
        backend.put("key", [bytes(70_000)])
        before = backend._client.dbsize()
        used = backend._client.info("memory")["used_memory"]
        backend._client.config_set("maxmemory", used)
        try:
            for key in ("key", "other"):
                with pytest.raises(StoreFullError, match="raise maxmemory"):
                    backend.put(key, [b"x" * 1_000_000])
            assert content(backend, "key") == bytes(70_000)
        finally:
            backend._client.config_set("maxmemory", 0)
        assert backend._client.dbsize() == before


def test_redis_keeps_nothing_of_old_values(redis_server):  # noqa: F811
    with closing(RedisBackend(redis_server.url, secrets.token_hex(8))) as backend:
        before = backend._client.dbsize()
        for size in (70_000, 90_000, 3, 80_000):
            backend.put("key", [bytes(size)])
            assert not backend.put_if_absent("key", [bytes(70_000)])
            assert backend.size("key") == size
        assert backend._client.dbsize() == before + 2
        backend.delete("key")
        assert backend._client.dbsize() == before


def test_a_value_above_redis_limit_is_refused(
    redis_server,  # noqa: F811
    monkeypatch,
):
    monkeypatch.setattr("ragkv.store.backends.redis.LARGEST_VALUE", 1000)
    with closing(RedisBackend(redis_server.url, secrets.token_hex(8))) as backend:
        backend.put("key", [bytes(1000)])
        for write in (backend.put, backend.put_if_absent):
            with pytest.raises(StoreFullError, match="smaller chunks or an int8"):
                write("other", [bytes(500), bytes(501)])
        assert [key.name for key in backend.scan("")] == ["key"]


# ---- addresses


def test_addresses(redis_server):  # noqa: F811
    assert is_url("redis://host")
    assert is_url("s3://bucket")
    assert not is_url("/a/folder")
    assert not is_url("C:/a/folder")
    with pytest.raises(ConfigError, match="as a string"):
        is_url(Path("redis://host"))
    for unknown in ("http://host", "redis+ssl://host"):
        with pytest.raises(ConfigError, match="unknown store"):
            open_backend(StoreConfig(unknown), "n")
    with closing(
        open_backend(StoreConfig(redis_server.url.replace("redis", "valkey")), "n")
    ) as backend:
        assert backend.get("key") is None
    with pytest.raises(StoreError):
        open_backend(StoreConfig("redis://127.0.0.1:port"), "n")
    with pytest.raises(StoreError, match=r"//127[.]0[.]0[.]1:1/0") as raised:
        open_backend(StoreConfig("redis://user:secret@127.0.0.1:1/0"), "n")
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("url", ["s3://", "s3:///prefix", "s3://bucket?unknown=1"])
def test_wrong_buckets(url):
    pytest.importorskip("obstore")
    with pytest.raises(ConfigError, match="is no s3://"):
        open_backend(StoreConfig(url), "n")


def test_a_bucket_that_does_not_answer(s3_server):  # noqa: F811
    from obstore.store import S3Store

    for url in ("s3://chunks?endpoint=http://127.0.0.1:1", s3_server.replace("chunks", "nowhere")):
        with pytest.raises(StoreError, match="cannot be used"):
            open_backend(StoreConfig(url), "n")
    options = {"allow_http": True, "timeout": "1s"}
    gone = S3Store(
        "chunks",
        endpoint="http://127.0.0.1:1",
        client_options=options,
        retry_config={"max_retries": 0},
    )
    with closing(S3Backend(gone, "gone")) as backend:
        for use in USES:
            with pytest.raises(StoreError, match="gone cannot be used"):
                use(backend)


def test_prefixes_keep_namespaces_apart(s3_server):  # noqa: F811
    names = [secrets.token_hex(4) for _ in range(3)]
    backends = [open_backend(StoreConfig(s3_server), name) for name in names]
    for backend, name in zip(backends, names, strict=True):
        backend.put("key", [name.encode()])
    for backend, name in zip(backends, names, strict=True):
        assert content(backend, "key") == name.encode()
        assert [key.name for key in backend.scan("")] == ["key"]
        backend.close()
    assert len({backend.get for backend in backends}) == 3
    assert all(first != second for first, second in pairwise(names))
