"""A backend of each kind."""

import secrets
from collections.abc import Callable, Iterator

import pytest
from store_servers import redis_server, s3_server, valkey_server  # noqa: F401

from ragkv.config import StoreConfig
from ragkv.store.backends import open_backend
from ragkv.store.backends.backend import Backend
from ragkv.store.backends.disk import DiskBackend
from ragkv.store.backends.memory import MemoryBackend, Place
from ragkv.store.backends.redis import RedisBackend
from ragkv.store.backends.s3 import S3Backend

Open = Callable[[], Backend]


def memory(_: pytest.FixtureRequest) -> Open:
    place = Place()
    return lambda: MemoryBackend(place)


def disk(request: pytest.FixtureRequest) -> Open:
    folder = request.getfixturevalue("tmp_path")
    return lambda: DiskBackend(folder / "backend")


def redis(request: pytest.FixtureRequest, server: str = "redis_server") -> Open:
    url, name = request.getfixturevalue(server).url, secrets.token_hex(8)
    return lambda: RedisBackend(url, name)


def valkey(request: pytest.FixtureRequest) -> Open:
    return redis(request, "valkey_server")


def s3(request: pytest.FixtureRequest) -> Open:
    url, name = request.getfixturevalue("s3_server"), secrets.token_hex(8)
    return lambda: open_backend(StoreConfig(url), name)


def object_store(request: pytest.FixtureRequest) -> Open:
    """The S3 backend over obstore's own memory, which knows conditional writes for certain."""
    store = pytest.importorskip("obstore.store").MemoryStore()
    return lambda: S3Backend(store, "memory")


KINDS = [memory, disk, redis, valkey, s3, object_store]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def opened(request: pytest.FixtureRequest) -> Iterator[Open]:
    """Give a function that opens the same, at first empty, place every time."""
    made: list[Backend] = []
    open_place = request.param(request)

    def open_again() -> Backend:
        made.append(open_place())
        return made[-1]

    yield open_again
    for backend in made:
        backend.close()


@pytest.fixture
def backend(opened: Open) -> Backend:
    return opened()
