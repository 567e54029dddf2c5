"""Servers that tests start, on free ports, and end."""

import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

import pytest

PROGRAMS = ("redis-server", "valkey-server")


def installed(preferred: str = PROGRAMS[0]) -> str:
    """Return the program that is here, the preferred one if it is; empty if none is."""
    names = sorted(filter(shutil.which, PROGRAMS), key=lambda name: name != preferred)
    return names[0] if names else ""


class RedisServer:
    """A server of our own, Redis or Valkey, with nothing on disk unless it is ``durable``.

    ``program``: which of ``PROGRAMS`` is preferred, and named in ``url``. Where it is not installed
    the other one runs: they speak the same protocol.
    """

    def __init__(self, folder: Path, program: str = PROGRAMS[0], *, durable: bool = False) -> None:
        self.program = installed(program)
        if not self.program:
            pytest.skip(f"there is no {PROGRAMS[0]} on this machine: apt-get install {PROGRAMS[0]}")
        self.port = free_port()
        self.url = f"{program.removesuffix('-server')}://127.0.0.1:{self.port}/0"
        self.settings = {"port": self.port, "bind": "127.0.0.1", "save": "", "dir": folder}
        if durable:
            self.settings |= {"appendonly": "yes", "appendfsync": "always"}
        self.start()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        pairs = self.settings.items()
        options = [text for name, value in pairs for text in (f"--{name}", str(value))]
        self.process = subprocess.Popen([self.program, *options], stdout=subprocess.DEVNULL)
        for _ in range(600):
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1) as asked:
                asked.sendall(b"PING\r\n")
                if asked.recv(16).startswith(b"+PONG"):  # "-LOADING" while it reads its file
                    return
            time.sleep(0.05)
        raise RuntimeError(f"{self.program} does not start")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Let the server hang: connections stand, and nothing is answered."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    yield from _serve(tmp_path_factory.mktemp("redis"), "redis-server")


@pytest.fixture(scope="session")
def valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    yield from _serve(tmp_path_factory.mktemp("valkey"), "valkey-server")


def _serve(folder: Path, program: str) -> Iterator[RedisServer]:
    pytest.importorskip("redis")
    server = RedisServer(folder, program)
    yield server
    server.kill()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """Give ``s3://bucket?endpoint=…`` of a local server."""
    for module in ("obstore", "boto3", "moto.server"):
        pytest.importorskip(module)
    with S3Server() as server:
        yield server.url


class S3Server:
    """A stand-in for S3 in a thread; what it holds outlasts its restart."""

    def __init__(self) -> None:
        import boto3
        from moto.s3.responses import S3Response

        put, one_at_a_time = S3Response.put_object, threading.Lock()

        def put_object(response: object) -> object:
            """Decide whether a key is absent and write it in one, as S3 does."""
            with one_at_a_time:
                return put(response)

        self._patch = pytest.MonkeyPatch()
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            self._patch.setenv(name, "test")
        self._patch.setenv("AWS_REGION", "us-east-1")
        self._patch.setattr(S3Response, "put_object", put_object)
        self._port = free_port()
        self.start()
        endpoint = f"http://127.0.0.1:{self._port}"
        client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
        client.create_bucket(Bucket="chunks")
        client.close()
        self.url = f"s3://chunks/some/prefix?endpoint={endpoint}"

    def start(self) -> None:
        """Start it, and return when it listens."""
        from moto.server import ThreadedMotoServer

        self._server = ThreadedMotoServer("127.0.0.1", self._port, verbose=False)
        self._server.start()

    def kill(self) -> None:
        self._server.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._patch.undo()
