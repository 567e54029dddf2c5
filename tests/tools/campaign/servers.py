"""A Redis or Valkey server of the campaign's own, which it may kill."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Self

_PROGRAM = shutil.which("redis-server") or shutil.which("valkey-server") or ""


class RedisServer:
    """Serves from a folder, and keeps there what it has acknowledged."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    @staticmethod
    def is_here() -> bool:
        """Whether the server and its client are installed."""
        return bool(_PROGRAM) and find_spec("redis") is not None

    @property
    def url(self) -> str:
        """Address of the server."""
        return f"redis://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start it, and wait until it answers."""
        options = {
            "port": self._port,
            "bind": "127.0.0.1",
            "dir": self._folder,
            "save": "",
            "appendonly": "yes",
            "appendfsync": "always",
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        self._process = subprocess.Popen([_PROGRAM, *words], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 1) as asked:
                asked.sendall(b"PING\r\n")
                if asked.recv(16).startswith(b"+PONG"):  # "-LOADING" while it reads its file
                    return
            time.sleep(0.02)
        raise RuntimeError(f"{_PROGRAM} does not start")

    def kill(self) -> None:
        """SIGKILL it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
