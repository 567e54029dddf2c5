"""A server of ragkv over an engine: uvicorn in a thread, on a free port of this machine."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from served import until

from ragkv import RagKV
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


@contextmanager
def serving(engine: RagKV, **settings: object) -> Iterator[Listening]:
    """Run a server in the block; ``settings`` are ServeConfig's."""
    config = ServeConfig(port=0, **settings)
    app = make_app(config, dict.fromkeys(config.namespaces, engine))
    ready = threading.Event()
    server = DrainingServer(app, config, on_ready=lambda _: ready.set(), log_level="critical")
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert ready.wait(30)
    until(lambda: app.state.service.ready)  # warm: no pass of its own beside the test's
    yield Listening(server.address, engine, app.state.service, server, thread)
    server.should_exit = True
    thread.join(30)
    assert not thread.is_alive()


@contextmanager
def listening(engine: RagKV, **settings: object) -> Iterator[str]:
    """Yield the address of such a server alone."""
    with serving(engine, **settings) as server:
        yield server.url
