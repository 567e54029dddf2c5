"""Pages in browsers: those of the origins that the operator named may send requests."""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from ragkv.retrieve.route import HEADER
from ragkv.serve import request_id
from ragkv.serve.body import Json
from ragkv.serve.refusal import RefusedError

_METHODS = ("GET", "HEAD", "POST", "DELETE")


class Origins(CORSMiddleware):
    """Middleware that answers browsers' preflight requests, and names the origin in responses.

    Parameters
    ----------
    origins
        Such as ``http://localhost:5173``; ``*`` is any, and none lets no page in.
    """

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=_METHODS,
            allow_headers=["*"],
            expose_headers=[request_id.HEADER, HEADER],
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        """Return 200, or 403 with what lets the page in."""
        if self.is_allowed_origin(request_headers["origin"]):
            return super().preflight_response(request_headers)
        refusal = RefusedError(
            *(403, "Pages of this origin are not let in: start the server with --cors-origin."),
            code="origin_not_allowed",
        )
        return Json(refusal.body(), status_code=refusal.status)
