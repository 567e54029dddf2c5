"""The outermost middleware: request ids, and the origins of pages in browsers."""

from __future__ import annotations

import re
import uuid
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragkv.retrieve.route import HEADER as ROUTE
from ragkv.serve.body import Json
from ragkv.serve.refusal import REQUEST_ID, RefusedError

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
