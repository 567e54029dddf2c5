"""Requests to a server through one ``openai`` client, from threads and event loops."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Coroutine, Mapping
from concurrent.futures import CancelledError, Future
from functools import cache
from http import HTTPStatus
from http.client import responses
from typing import Any, TypeVar

import httpx
import openai

from ragkv.errors import ClosedError, ConfigError, PromptTooLongError, ServerError, StoreFullError
from ragkv.model.pool import Pool

_CONNECT_S = 10.0
_BAD_SETTING = (HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, 422)
_TIMEOUT_CODES = ("timeout", "gateway_timeout")
_NONE: Mapping[str, str] = {}
_FAILURES = (openai.APIError, httpx.TransportError, httpx.InvalidURL, json.JSONDecodeError)
T = TypeVar("T")


@cache
def _loop_of(process: int) -> asyncio.AbstractEventLoop:
    """Start the event loop that all clients of a process share, in a daemon thread."""
    del process  # a fork has no threads of its parent
    loop = asyncio.new_event_loop()
    loop.set_default_executor(Pool(8, "ragkv-client"))  # looks up host names
    threading.Thread(target=loop.run_forever, name="ragkv-client", daemon=True).start()
    return loop


class Connection:
    """Sends requests to a server, and raises its errors as ragkv's.

    The requests run in a background event loop: unlike one in a blocking client, a request there
    can be cancelled at any time, also before the response begins.

    Parameters
    ----------
    timeout
        Seconds until :meth:`call` gives up; None for no limit.
    transport
        Replaces the network in tests.
    program
        Name of the server's command, for error messages.
    """

    def __init__(
        self,
        address: str,
        api_key: str | None,
        timeout: float | None,
        max_retries: int,
        transport: httpx.AsyncBaseTransport | None = None,
        *,
        program: str = "ragkv serve",
    ) -> None:
        self.address = address
        self.timeout = timeout
        self._program = program
        self._api_key = api_key or "none"
        self._max_retries = max_retries
        self._headers: Any = {} if api_key else {"Authorization": openai.omit}
        self._transport = transport
        self._process: int | None = None
        self._client: openai.AsyncOpenAI | None = None
        self._lock = threading.Lock()
        self._running: set[Future[Any]] = set()
        self._closed = False

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the event loop.

        Raises
        ------
        ClosedError
            After :meth:`close`.
        """
        with self._lock:  # close() cancels what was submitted before it
            if self._closed:
                work.close()
                raise self.closed()
            future = asyncio.run_coroutine_threadsafe(work, _loop_of(os.getpid()))
            self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the event loop and return its result.

        Raises
        ------
        ClosedError, TimeoutError
        """
        future = self.submit(work)
        try:
            return future.result(self.timeout)
        except CancelledError:
            raise self.closed() from None
        except TimeoutError:
            if not future.cancel():  # the server's own
                raise
            raise TimeoutError(
                f"{self.address} has not answered within timeout={self.timeout:g} seconds"
            ) from None

    async def request(
        self,
        method: str,
        path: str,
        body: object = None,
        params: Mapping[str, str] = _NONE,
        headers: Mapping[str, str] = _NONE,
    ) -> dict[str, Any]:
        """Send a request and return the response, a JSON object.

        Raises
        ------
        ServerError, ConfigError, TimeoutError
        """
        content: dict[str, Any] = {"options": {**self._with(headers), "params": params}}
        if body is not None:
            content["body"] = body
        send = getattr(self._openai(), method)
        try:
            found = await send(path, cast_to=object, **content)
        except _FAILURES as error:
            raise self._error(error) from error
        if not isinstance(found, dict):
            raise ServerError(
                f"{self.address}{path} answers without JSON: is it `{self._program}`?"
            )
        return found

    async def events(
        self, path: str, body: object, headers: Mapping[str, str] = _NONE
    ) -> AsyncGenerator[dict[str, Any]]:
        """Yield the events of an answer; closing the generator ends the answer."""
        request_id = None
        try:
            async with await self._openai().post(
                path,
                body=body,
                options=self._with(headers),
                cast_to=object,
                stream=True,
                stream_cls=openai.AsyncStream[Any],
            ) as stream:
                request_id = stream.response.headers.get("x-request-id")
                async for event in stream:
                    yield event
        except _FAILURES as error:
            raise self._error(error, request_id) from error

    def _with(self, headers: Mapping[str, str]) -> Any:
        return {"headers": {**self._headers, **headers}}

    def _openai(self) -> openai.AsyncOpenAI:
        """Return the client of this process; used in the event loop only."""
        if self._client is None or self._process != os.getpid():
            http = httpx.AsyncClient(
                transport=self._transport, limits=httpx.Limits(max_connections=None)
            )
            self._client = openai.AsyncOpenAI(
                base_url=self.address,
                timeout=httpx.Timeout(None, connect=_CONNECT_S),
                http_client=http,
                api_key=self._api_key,
                max_retries=self._max_retries,
            )
            self._process = os.getpid()
            weakref.finalize(self, _close_soon, self._client, self._process).atexit = False
        return self._client

    def close(self) -> None:
        """Cancel running requests and close the connections; later calls raise ClosedError."""
        with self._lock:
            self._closed = True
        for future in list(self._running):
            future.cancel()
        if self._client is not None and self._process == os.getpid():
            _close_soon(self._client, self._process)

    def closed(self) -> ClosedError:
        """Return the error of a call after :meth:`close`."""
        return ClosedError(f"this client of {self.address} is closed: make another one")

    def _error(self, error: Exception, request_id: str | None = None) -> Exception:
        """Return an error of openai or httpx as ragkv's."""
        if isinstance(error, json.JSONDecodeError):
            return ServerError(f"{self.address} sends an event that is not JSON")
        if isinstance(error, httpx.InvalidURL):
            return ConfigError(f"the text is too long to look up at {self.address}")
        if isinstance(error, openai.APIConnectionError | httpx.TransportError):
            cause = error.__cause__ or error
            why = str(cause) or type(cause).__name__
            return ServerError(
                f"{self.address} cannot be reached ({why}): is `{self._program}` running there?"
            )
        status: int | None = getattr(error, "status_code", None)  # none within a stream
        return self._refusal(
            getattr(error, "body", None), status, getattr(error, "request_id", request_id)
        )

    def _refusal(self, body: object, status: int | None, request_id: str | None) -> Exception:
        """Return a server's ``{"message", "code", "type"}`` as ragkv's error."""
        found = body if isinstance(body, Mapping) else {}
        code, message = found.get("code"), str(found.get("message") or "it gave no reason")
        if code == "context_length_exceeded":
            return PromptTooLongError(message)
        is_setting = status is None and found.get("type") == "invalid_request_error"
        if is_setting or status in _BAD_SETTING:
            return ConfigError(f"{self.address} refuses the request: {message}")
        if status == HTTPStatus.UNAUTHORIZED:
            message += " Give api_key=..., or set RAGKV_API_KEY."
        if request_id:
            message += f" (request {request_id})"
        if status == HTTPStatus.GATEWAY_TIMEOUT or code in _TIMEOUT_CODES:
            return TimeoutError(f"{self.address}: {message}")
        if code == "store_full":
            return StoreFullError(f"{self.address}: {message}")
        title = f"{status} {responses.get(status, '')}: " if status else ""
        return ServerError(f"{self.address}: {title}{message}", status)


def _close_soon(client: openai.AsyncOpenAI, process: int) -> None:
    """Close a client's connections without waiting for it; those of another process stay."""
    if process == os.getpid():
        loop = _loop_of(process)
        loop.call_soon_threadsafe(lambda: loop.create_task(client.close()))
