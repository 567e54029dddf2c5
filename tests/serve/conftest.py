"""A server over a tiny model: in this thread's event loop, or listening in a thread."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

import pytest
from fastapi.testclient import TestClient
from listening import Listening, serving
from served import client_of, until
from stub_server import connect, stub  # noqa: F401

from ragkv import RagKV, StoreConfig
from ragkv.config import MEMORY


@pytest.fixture
def make_engine(make_engine) -> Callable[..., RagKV]:
    """Make engines of few layers: what the model says is seldom looked at here."""
    return partial(make_engine, layers=2)


@pytest.fixture
def kv(make_engine) -> RagKV:
    """Return an engine to which a prompt is new every time."""
    return make_engine(store=StoreConfig(MEMORY, history_bytes=0))


@pytest.fixture
def client(kv) -> Iterator[TestClient]:
    with client_of(kv) as client:
        until(lambda: client.app.state.service.ready)
        yield client


@pytest.fixture
def listen(make_engine) -> Iterator[Callable[..., Listening]]:
    """Return ``listen(engine=..., **ServeConfig's arguments)``: uvicorn in a thread."""
    with ExitStack() as stack:

        def start(engine: RagKV | None = None, **settings: object) -> Listening:
            return stack.enter_context(serving(engine or make_engine(), **settings))

        yield start
