"""One ``openai`` client for threads and event loops alike, in an event loop of its own."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Coroutine, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from http import HTTPStatus
from http.client import responses
from typing import Any, TypeVar

import httpx
import openai

from ragkv.errors import ClosedError, ConfigError, PromptTooLongError, ServerError, StoreFullError
from ragkv.model.pool import Pool

_CONNECT_S = 10.0
_SETTINGS = (HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, 422)
_LATE = ("timeout", "gateway_timeout")
_NONE: Mapping[str, str] = {}
_FAILURES = (openai.APIError, httpx.TransportError, json.JSONDecodeError)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Loop:
    """An event loop in a thread, and the client whose connections live in it."""

    client: openai.AsyncOpenAI
    loop: asyncio.AbstractEventLoop
    thread: threading.Thread
    process: int

    @classmethod
    def start(cls, client: openai.AsyncOpenAI) -> _Loop:
        loop = asyncio.new_event_loop()
        loop.set_default_executor(Pool(8, "ragkv-client"))  # looks up host names

        def run() -> None:
            loop.run_forever()
            loop.close()

        thread = threading.Thread(target=run, name="ragkv-client", daemon=True)
        thread.start()
        return cls(client, loop, thread, os.getpid())

    def stop(self) -> None:
        """Cancel what is under way; return when the connections are closed."""
        if self.process == os.getpid() and self.thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._end(), self.loop)
            if self.thread is not threading.current_thread():
                self.thread.join()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.client.close()
        self.loop.call_soon(self.loop.stop)  # behind the callbacks of what has just ended


class Connection:
    """Requests to a server, and its errors as ragkv's.

    Parameters
    ----------
    timeout
        Seconds that a request may take that is no answer; None is any time.
    transport
        Replaces the network, in tests.
    program
        What should run there.
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
        self._program = program
        self.timeout = timeout
        self._api_key = api_key or "none"
        self._max_retries = max_retries
        self._headers: Any = {} if api_key else {"Authorization": openai.omit}
        self._transport = transport
        self._changing = threading.Lock()
        self._loop: _Loop | None = None
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
                return asyncio.run_coroutine_threadsafe(work, self._running().loop)
        except BaseException:
            work.close()
            raise

    def call(
        self,
        method: str,
        path: str,
        body: object = None,
        params: Mapping[str, str] = _NONE,
        headers: Mapping[str, str] = _NONE,
    ) -> dict[str, Any]:
        """Send a request and return its answer, a JSON object.

        Raises
        ------
        ServerError, ConfigError, TimeoutError
        """
        answer = self.submit(self.request(method, path, body, params, headers))
        try:
            return answer.result(self.timeout)
        except CancelledError:
            raise self.closed() from None
        except TimeoutError:
            if not answer.cancel():  # the server's own
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
        """Send a request in the loop; as :meth:`call`."""
        content: dict[str, Any] = {"options": {**self._with(headers), "params": params}}
        if body is not None:
            content["body"] = body
        send = getattr(self._client(), method)
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
        """Yield the events of an answer; closing this ends the answer."""
        request_id = None
        try:
            async with await self._client().post(
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

    def _client(self) -> openai.AsyncOpenAI:
        with self._changing:
            return self._running().client

    def _running(self) -> _Loop:
        if self._closed:
            raise self.closed()
        if self._loop is None or self._loop.process != os.getpid():  # forked
            http = httpx.AsyncClient(
                transport=self._transport, limits=httpx.Limits(max_connections=None)
            )
            client = openai.AsyncOpenAI(
                base_url=self.address,
                timeout=httpx.Timeout(None, connect=_CONNECT_S),
                http_client=http,
                api_key=self._api_key,
                max_retries=self._max_retries,
            )
            self._loop = _Loop.start(client)
            weakref.finalize(self, self._loop.stop)
        return self._loop

    def close(self) -> None:
        """Cancel what is under way and close the connections; later calls raise ClosedError."""
        with self._changing:
            self._closed = True
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.stop()

    def closed(self) -> ClosedError:
        """Return the error of a call after :meth:`close`."""
        return ClosedError(f"this client of {self.address} is closed: make another one")

    def _error(self, error: Exception, request_id: str | None = None) -> Exception:
        """Return openai's and httpx's errors as ragkv's."""
        if isinstance(error, json.JSONDecodeError):
            return ServerError(f"{self.address} sends an event that is no JSON")
        if isinstance(error, openai.APIConnectionError | httpx.TransportError):
            cause = error.__cause__ or error
            why = str(cause) or type(cause).__name__
            return ServerError(
                f"{self.address} cannot be reached ({why}): is `{self._program}` running there?"
            )
        status = getattr(error, "status_code", None)
        request_id = getattr(error, "request_id", request_id)
        return self.error_of(getattr(error, "body", None), status, request_id)

    def error_of(
        self, error: object, status: int | None = None, request_id: str | None = None
    ) -> Exception:
        """Return what a server's ``{"message", "code", "type"}`` means.

        Parameters
        ----------
        status
            The HTTP status; None for an error in the middle of a stream, or of a background job.
        """
        found = error if isinstance(error, Mapping) else {}
        code, message = found.get("code"), str(found.get("message") or "it gave no reason")
        if code == "context_length_exceeded":
            return PromptTooLongError(message)
        is_setting = status is None and found.get("type") == "invalid_request_error"
        if is_setting or status in _SETTINGS:
            return ConfigError(f"{self.address} refuses the request: {message}")
        if status == HTTPStatus.UNAUTHORIZED:
            message += " Give api_key=..., or set RAGKV_API_KEY."
        if request_id:
            message += f" (request {request_id})"
        if status == HTTPStatus.GATEWAY_TIMEOUT or code in _LATE:
            return TimeoutError(f"{self.address}: {message}")
        if code == "store_full":
            return StoreFullError(f"{self.address}: {message}")
        title = f"{status} {responses.get(status, '')}: " if status else ""
        return ServerError(f"{self.address}: {title}{message}", status)
