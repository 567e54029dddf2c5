"""The application: routes, middleware, errors in OpenAI's form."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragkv.engine.engine import RagKV
from ragkv.errors import RagKVError
from ragkv.retrieve.route import HEADER as ROUTE
from ragkv.serve import about, answering, chunks
from ragkv.serve.body import Json
from ragkv.serve.config import ServeConfig
from ragkv.serve.refusal import REQUEST_ID, RefusedError, draining, refusal_of
from ragkv.serve.service import Service

_HEADER = "x-request-id"
_SAFE = re.compile(r"[\w.:/=+-]{1,128}", re.ASCII)


class RequestIds:
    """Sets ``x-request-id`` of responses: the client's, if it is safe in a log, or a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(_HEADER, "")
        request_id = given if _SAFE.fullmatch(given) else f"req_{uuid.uuid4().hex}"
        token = REQUEST_ID.set(request_id)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[_HEADER] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            REQUEST_ID.reset(token)


class Origins(CORSMiddleware):
    """Lets pages of these origins send requests.

    Parameters
    ----------
    origins
        Such as ``http://localhost:5173``; ``*`` is any.
    """

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=("GET", "HEAD", "POST", "DELETE"),
            allow_headers=["*"],
            expose_headers=[_HEADER, ROUTE],
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        """Return 200, or 403 with the missing option."""
        if self.is_allowed_origin(request_headers["origin"]):
            return super().preflight_response(request_headers)
        message = "Pages of this origin are not allowed: start the server with --cors-origin."
        refusal = RefusedError(403, message, code="origin_not_allowed")
        return Json(refusal.body(), status_code=refusal.status)


class _App(FastAPI):
    """Adds the middleware around starlette's own, which sends 500."""

    def build_middleware_stack(self) -> ASGIApp:
        inner, service = super().build_middleware_stack(), self.state.service
        return RequestIds(Origins(inner, service.settings.cors_origins))


class _RefuseCancelled:
    """Middleware that refuses requests which the stopping server cancels."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError as error:
            raise draining() from error


def make_app(settings: ServeConfig, engines: Mapping[str, RagKV]) -> FastAPI:
    """Return an application over engines.

    Parameters
    ----------
    engines
        One for each namespace, all over one model. The caller closes them after the server.

    Returns
    -------
    FastAPI
        ``app.state.service`` is its :class:`ragkv.serve.service.Service`.

    Raises
    ------
    ConfigError
        A served namespace has no engine.
    """
    # no openapi_url: its pages load scripts from another host
    app = _App(title="ragkv", lifespan=_lifespan, openapi_url=None)
    app.add_middleware(_RefuseCancelled)
    app.state.service = Service(settings, engines)
    for module in (answering, chunks, about):
        app.include_router(module.router)
    for kind in (HTTPException, RequestValidationError, RefusedError, RagKVError, Exception):
        app.add_exception_handler(kind, _refuse)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    service: Service = app.state.service
    warming = asyncio.create_task(service.warm_up())
    try:
        yield
    finally:
        warming.cancel()
        with suppress(asyncio.CancelledError, Exception):  # already logged
            await warming
        await service.close()


async def _refuse(request: Request, error: Exception) -> Response:
    refusal = _refusal_of(error)
    service: Service = request.app.state.service
    service.metrics.record_error(refusal.code)
    return Json(refusal.body(), status_code=refusal.status, headers=refusal.headers)


def _refusal_of(error: Exception) -> RefusedError:
    if isinstance(error, HTTPException):
        phrase = HTTPStatus(error.status_code).phrase
        return RefusedError(error.status_code, f"{phrase}.", headers=error.headers)
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        name = str(first["loc"][-1])
        return RefusedError(400, f"{name}: {first['msg']}.", param=name, code="invalid_value")
    return refusal_of(error)
