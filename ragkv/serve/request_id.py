"""``x-request-id``: the client's own, or a new one, in every response and in the log."""

from __future__ import annotations

import re
import uuid
from contextvars import ContextVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-request-id"
_SANE = re.compile(r"[\w.:/=+-]{1,128}", re.ASCII)
_REQUEST: ContextVar[str] = ContextVar("ragkv_request_id", default="")


def request_id() -> str:
    """Return the id of the request that is answered here; none is an empty text."""
    return _REQUEST.get()


class RequestIds:
    """Middleware around all others."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; a client's id is taken unless it may harm a log."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        name = given if _SANE.fullmatch(given) else f"req_{uuid.uuid4().hex}"
        token = _REQUEST.set(name)

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = name
            await send(message)

        try:
            await self._app(scope, receive, named)
        finally:
            _REQUEST.reset(token)
