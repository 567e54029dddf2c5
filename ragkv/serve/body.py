"""JSON bodies: read within limits, validated, written."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import ClientDisconnect

from ragkv.serve.refusal import RefusedError, wrong_field

BODY_BYTES = 8 << 20
"""Longest body of a request."""

_CLOSE = {"Connection": "close"}
"""Header of responses to bodies that are not read to their end."""
_JSON_OF_CLIENTS = ("schema", "parameters", "arguments", "metadata", "chat_template_kwargs")
"""Fields whose value is a client's own JSON, in which null is a value."""
_DEPTH = 8
"""Nesting depth of the API's fields."""


class Fields(BaseModel):
    """A JSON object with exactly the declared fields."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


Body = TypeVar("Body", bound=Fields)


class Json(JSONResponse):
    """A response in ASCII, which can carry any text."""

    def render(self, content: Any) -> bytes:
        """Return the bytes."""
        return dump(content).encode()


def dump(content: object) -> str:
    """Return one line of JSON."""
    return json.dumps(content, allow_nan=False, separators=(",", ":"))


async def read_body(kind: type[Body], request: Request, limit_s: float) -> Body:
    """Read and validate a request's body, at most ``BODY_BYTES`` of it.

    Parameters
    ----------
    limit_s
        Seconds until the body must have arrived.

    Raises
    ------
    RefusedError
        413: the body is too long. 415: its content type or its encoding is unsupported. 408: it
        did not arrive in time. 400: it is not a JSON object, or a field is wrong.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":  # browsers send other types to any address
        raise RefusedError(415, "Send the header Content-Type: application/json.")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        message = f"The body is encoded (Content-Encoding: {encoding:.40}): send it uncompressed."
        raise RefusedError(415, message, code="unsupported_content_encoding")
    length = request.headers.get("content-length", "")
    _check_length(int(length[:20]) if length.isdecimal() else 0)
    body = bytearray()
    try:
        async with asyncio.timeout(limit_s):
            async for part in request.stream():
                body += part
                _check_length(len(body))
    except ClientDisconnect:
        message = "The client left before the request's body had arrived."
        raise RefusedError(400, message, code="client_left", headers=_CLOSE) from None
    except TimeoutError:
        message = "The request's body did not arrive in time."
        raise RefusedError(408, message, headers=_CLOSE) from None
    return parse(kind, _object_in(bytes(body)))


def _check_length(length: int) -> None:
    if length > BODY_BYTES:
        message = f"The body is longer than {BODY_BYTES} bytes."
        raise RefusedError(413, message, headers=_CLOSE)


def _object_in(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        why = "too deep" if isinstance(error, RecursionError) else str(error)
        raise RefusedError(400, f"The body is not JSON: {why}.", code="invalid_json") from None
    if not isinstance(found, dict):
        raise RefusedError(400, "The body must be a JSON object.", code="invalid_json")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not in JSON")


def parse(kind: type[Body], given: Mapping[str, Any]) -> Body:
    """Validate a body; fields that are null count as absent, at any depth.

    Raises
    ------
    RefusedError
        400, with the name of an unknown, unsupported or wrong field.
    """
    try:
        return kind.model_validate(_without_nulls(dict(given)))
    except ValidationError as error:
        raise wrong_field(error) from None


def _without_nulls(value: Any, depth: int = _DEPTH) -> Any:
    if depth and isinstance(value, dict):
        return {
            name: each if name in _JSON_OF_CLIENTS else _without_nulls(each, depth - 1)
            for name, each in value.items()
            if each is not None
        }
    if depth and isinstance(value, list):
        return [
            _without_nulls(each, depth - 1) if isinstance(each, dict | list) else each
            for each in value
        ]
    return value
