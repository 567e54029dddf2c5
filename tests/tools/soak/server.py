"""The server under test: a process, its memory, its end."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx

from soak.asking import NAMESPACES

START_S = 180.0
END_S = 150.0
CACHE_BYTES = 128 << 20
"""Caches that are full before the server's memory is looked at: what grows then is a leak."""


class ServerProcess:
    """``ragkv serve`` in a process group of its own, on a store that fills up.

    Its words go to ``serve.log`` in ``folder``, beside the store.
    """

    def __init__(self, folder: Path, model: str | None, dtype: str | None, disk_bytes: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        keys = folder / "keys"
        keys.write_text("".join(f"{name}={key}\n" for name, key in NAMESPACES.items()))
        store = folder / "store.toml"
        store.write_text(
            f"disk_bytes = {2 * disk_bytes}\n"  # two namespaces
            f"memory_bytes = {CACHE_BYTES}\nhistory_bytes = {CACHE_BYTES}\n"
        )
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "serve.log"
        self._command = [
            *(sys.executable, "-c", "from ragkv.cli.main import app; app()", "serve"),
            *("--store", str(folder / "store"), "--store-config", str(store)),
            *("--port", str(port), "--api-key-file", str(keys)),
            *("--max-running", "8", "--max-waiting", "4"),
            *("--timeout", "300", "--drain-timeout", "120"),
            *(() if model is None else ("--model", model)),
            *(() if dtype is None else ("--dtype", dtype)),
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self._groups: list[int] = []

    async def start(self) -> float:
        """Return the seconds until it is healthy."""
        began = time.monotonic()
        paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: ASYNC220  returns at once
                self._command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
                start_new_session=True,
            )
        self._groups.append(self._process.pid)
        async with httpx.AsyncClient(base_url=self.url, trust_env=False) as client:
            while time.monotonic() < began + START_S:
                if self._process.poll() is not None:
                    break
                with suppress(httpx.TransportError):
                    if (await client.get("/health")).status_code == httpx.codes.OK:
                        return time.monotonic() - began
                await asyncio.sleep(0.1)
        raise RuntimeError(f"the server did not start: {self.log.read_text()[-2000:]}")

    def terminate(self) -> None:
        """Send SIGTERM."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)

    async def wait(self) -> int | None:
        """Return its exit code, None if it did not end in time."""
        if self._process is None:
            return None
        with suppress(subprocess.TimeoutExpired):
            return await asyncio.to_thread(self._process.wait, END_S)
        return None

    def rss_bytes(self) -> int:
        """Return its resident memory now."""
        if self._process is None:
            return 0
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def leftovers(self) -> list[int]:
        """Return the process groups that still have a process, and end them."""
        found = []
        for group in self._groups:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
                found.append(group)
        return found
