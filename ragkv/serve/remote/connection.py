"""Requests to a server, in an event loop of their own that serves threads and tasks alike."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import weakref
from collections.abc import AsyncIterator, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager
from http import HTTPStatus
from itertools import count
from typing import Any, TypeVar

import httpx

from ragkv.errors import ServerError
from ragkv.model.pool import Pool
from ragkv.serve.remote.errors import closed, error_of, refusal, unreachable

_BUSY = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
_CONNECT_S, _FIRST_PAUSE_S, _LONGEST_PAUSE_S = 10.0, 0.5, 60.0
T = TypeVar("T")


class LoopThread:
    """An event loop in a thread, with a client whose connections live in it."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.process = os.getpid()
        self.client = client
        self._ready: Future[asyncio.AbstractEventLoop] = Future()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve()), name="ragkv-client", daemon=True
        )
        self._thread.start()

    async def _serve(self) -> None:
        async with self.client:
            loop = asyncio.get_running_loop()
            loop.set_default_executor(Pool(8, "ragkv-client"))  # looks up host names
            self._ready.set_result(loop)
            await self._stop.wait()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin work in the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._ready.result())

    def stop(self) -> None:
        """Cancel what is under way; return when the connections are closed."""
        if self.process == os.getpid() and self._thread.is_alive():
            self._ready.result().call_soon_threadsafe(self._stop.set)
            if self._thread is not threading.current_thread():
                self._thread.join()


class Connection:
    """Sends requests; those that cannot have begun an answer are sent again.

    Parameters
    ----------
    address
        Scheme, host and port, without a path behind.
    timeout
        Seconds that one request may take; None is any time.
    max_retries
        How often a request is sent again after a connection that failed, or where the server is
        busy: after the time that its Retry-After names.
    transport
        Replaces the network, in tests.
    """

    def __init__(
        self,
        address: str,
        api_key: str | None,
        timeout: float | None,
        max_retries: int,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.address = address
        self.timeout = timeout
        self._max_retries = max_retries
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._transport = transport
        self._changing = threading.Lock()
        self._loop: LoopThread | None = None
        self._closed = False

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin work in the loop, which starts with the first.

        Raises
        ------
        ClosedError
            After :meth:`close`.
        """
        try:
            with self._changing:  # what is submitted before close() is cancelled by it
                return self._running().submit(work)
        except BaseException:
            work.close()
            raise

    def call(self, method: str, path: str, **content: Any) -> dict[str, Any]:
        """Send a request and wait for its answer, a JSON object.

        ``content`` are httpx's ``json`` and ``params``.

        Raises
        ------
        ServerError, ConfigError, TimeoutError
        """
        return self.submit(self.request(method, path, **content)).result()

    async def request(self, method: str, path: str, **content: Any) -> dict[str, Any]:
        """Send a request, within the loop."""
        async with within(self.timeout, self.address):
            response = await self._send(method, path, **content)
            try:
                body = json.loads(await response.aread())
            except httpx.TransportError as error:
                raise unreachable(error, self.address) from error
            except ValueError:
                body = None
            finally:
                await response.aclose()
        if not isinstance(body, dict):
            raise ServerError(f"{self.address}{path} answers without JSON: is it `ragkv serve`?")
        return body

    @asynccontextmanager
    async def events(
        self, path: str, body: Mapping[str, Any]
    ) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """Open a stream of server-sent events, within the loop; leaving ends the answer."""
        response = await self._send("POST", path, json=body)
        try:
            yield self._read(response)
        except httpx.TransportError as error:
            raise unreachable(error, self.address) from error
        finally:
            await response.aclose()

    async def _read(self, response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
        async for line in response.aiter_lines():
            field, _, value = line.partition(":")
            if field != "data":
                continue
            if value.strip() == "[DONE]":
                return
            try:
                event = json.loads(value)
            except ValueError as error:
                raise ServerError(f"{self.address} sends an event that is no JSON") from error
            if "error" in event:
                raise error_of(event, None, self.address)
            yield event
        raise ServerError(f"{self.address} ended the stream before the answer was complete")

    async def _send(self, method: str, path: str, **content: Any) -> httpx.Response:
        """Return a response of status 2xx, whose body is not read yet."""
        with self._changing:
            client = self._running().client
        for attempt in count():
            pause: float | None = min(_FIRST_PAUSE_S * 2**attempt, _LONGEST_PAUSE_S)
            try:
                request = client.build_request(method, path, **content)
                response = await client.send(request, stream=True)
            except httpx.TransportError as error:
                failure: Exception = unreachable(error, self.address)
            else:
                if response.is_success:
                    return response
                try:
                    await response.aread()
                finally:
                    await response.aclose()
                failure = refusal(response, self.address)
                pause = _pause(response, pause)
            if pause is None or attempt >= self._max_retries:
                raise failure
            await asyncio.sleep(pause)
        raise AssertionError  # count() does not end

    def _running(self) -> LoopThread:
        if self._closed:
            raise closed(self.address)
        if self._loop is None or self._loop.process != os.getpid():  # forked
            client = httpx.AsyncClient(
                base_url=self.address,
                headers=self._headers,
                timeout=httpx.Timeout(None, connect=_CONNECT_S),
                limits=httpx.Limits(max_connections=None),
                transport=self._transport,
            )
            self._loop = LoopThread(client)
            weakref.finalize(self, self._loop.stop)
        return self._loop

    def close(self) -> None:
        """Cancel what is under way and close the connections; later calls raise ClosedError."""
        with self._changing:
            self._closed = True
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.stop()


@asynccontextmanager
async def within(seconds: float | None, address: str) -> AsyncIterator[None]:
    """Bound the time of the block; raise TimeoutError with the reason."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        message = f"{address} has not answered within timeout={seconds:g} seconds"
        raise TimeoutError(message) from None


def _pause(response: httpx.Response, usual: float | None) -> float | None:
    """Return the seconds to wait before a refused request is sent again; None is never."""
    if response.status_code not in _BUSY:
        return None
    after = response.headers.get("retry-after", "")
    return min(float(after), _LONGEST_PAUSE_S) if after.isdecimal() else usual
