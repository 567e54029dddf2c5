"""A server over a tiny model: in this thread's event loop, or listening in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from ragkv import RagKV, StoreConfig
from ragkv.config import MEMORY
from ragkv.serve.app import make_app
from ragkv.serve.config import ServeConfig
from ragkv.serve.run import DrainingServer
from ragkv.serve.service import Service


@dataclass
class Listening:
    url: str
    engine: RagKV
    service: Service
    server: DrainingServer
    thread: threading.Thread


@pytest.fixture
def kv(make_engine) -> RagKV:
    """Return an engine to which a prompt is new every time."""
    return make_engine(store=StoreConfig(MEMORY, prefix_bytes=0))


@pytest.fixture
def client(kv) -> Iterator[TestClient]:
    with TestClient(make_app(ServeConfig(), {"default": kv})) as client:
        yield client


@pytest.fixture
def listen(make_engine) -> Iterator[Callable[..., Listening]]:
    """Return ``listen(engine=..., **ServeConfig's arguments)``: uvicorn in a thread."""
    with ExitStack() as stack:

        def start(engine: RagKV | None = None, **settings: object) -> Listening:
            engine = engine or make_engine()
            config = ServeConfig(port=0, **settings)  # type: ignore[arg-type]
            app = make_app(config, dict.fromkeys(config.namespaces, engine))
            return stack.enter_context(_listening(app, config, engine))

        yield start


@contextmanager
def _listening(app: FastAPI, config: ServeConfig, engine: RagKV) -> Iterator[Listening]:
    ready = threading.Event()
    server = DrainingServer(app, config, on_ready=lambda _: ready.set(), log_level="critical")
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert ready.wait(30)
    yield Listening(server.address, engine, app.state.service, server, thread)
    server.should_exit = True
    thread.join(30)
    assert not thread.is_alive()
