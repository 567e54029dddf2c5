"""What tests of the server share."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fastapi.testclient import TestClient
from tiny import ask, some_chunks

from ragkv import RagKV
from ragkv.serve.app import make_app
from ragkv.serve.config import ServeConfig

CHUNKS = some_chunks(3)
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def client_of(engine: RagKV, *, raise_errors: bool = True, **settings: Any) -> TestClient:
    """Return a client of a server in this event loop; ``settings`` are ServeConfig's."""
    config = ServeConfig(**settings)
    app = make_app(config, dict.fromkeys(config.namespaces, engine))
    return TestClient(app, raise_server_exceptions=raise_errors)


def chat(**fields: object) -> dict[str, Any]:
    """Return a short greedy chat request."""
    return {"messages": ask(CHUNKS), "max_tokens": 6, **fields}


def events(text: str) -> list[dict[str, Any]]:
    """Return a stream's chunks; it has to end as OpenAI's do."""
    lines = [line for line in text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def refused(response, status, *, code=None, param=None):
    """Check an error's form; return its message."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(response.json()) == {"error"}
    assert set(error) == {"message", "type", "param", "code"}
    assert param is None or error["param"] == param
    assert code is None or error["code"] == code
    return error["message"]


def until(condition: Callable[[], object], seconds: float = 30) -> None:
    """Wait for what another thread does and nothing announces."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.002)


@contextmanager
def model_held(engine: RagKV) -> Iterator[None]:
    """Hold the model in another thread, so that every answer waits."""
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with engine.turn():
            held.set()
            release.wait(60)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    assert held.wait(30)
    try:
        yield
    finally:
        release.set()
        thread.join()
