"""Read and write JSON bodies within bounds."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse

from ragkv.serve import limits
from ragkv.serve.config import ServeConfig
from ragkv.serve.refusal import RefusedError

_CLOSE = {"Connection": "close"}
"""With responses to bodies whose rest is not read."""


class Json(JSONResponse):
    """Plain ASCII JSON, which any text survives."""

    def render(self, content: Any) -> bytes:
        """Return the bytes."""
        return dump(content).encode()


def dump(content: object) -> str:
    """Return one line of JSON."""
    return json.dumps(content, allow_nan=False, separators=(",", ":"))


async def read_json(request: Request, settings: ServeConfig) -> dict[str, Any]:
    """Return the body, an object; it is never read beyond its bound.

    Raises
    ------
    RefusedError
        413 for a longer body, 415 for another content type or a compressed one, 408 for one that
        does not come, 400 for anything but a JSON object.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # pages in browsers may send others to any address
        raise RefusedError(415, "Send the header Content-Type: application/json.")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        message = f"The body is compressed (Content-Encoding: {encoding:.40}): send it as it is."
        raise RefusedError(415, message, code="unsupported_content_encoding")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > limits.BODY_BYTES:
        raise _too_long()
    body = bytearray()
    try:
        async with asyncio.timeout(settings.timeout):
            async for part in request.stream():
                body += part
                if len(body) > limits.BODY_BYTES:
                    raise _too_long()
    except TimeoutError:
        message = "The request's body did not come in time."
        raise RefusedError(408, message, headers=_CLOSE) from None
    return _object_in(bytes(body))


def _too_long() -> RefusedError:
    return RefusedError(
        413,
        f"The body is longer than {limits.BODY_BYTES} bytes.",
        headers=_CLOSE,
    )


def _object_in(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        why = "too deep" if isinstance(error, RecursionError) else str(error)
        raise RefusedError(400, f"The body is no JSON: {why}.", code="invalid_json") from None
    if not isinstance(found, dict):
        raise RefusedError(400, "The body must be a JSON object.", code="invalid_json")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not in JSON")
