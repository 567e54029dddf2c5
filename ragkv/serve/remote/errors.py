"""A server's refusals as ragkv's errors."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any

import httpx

from ragkv.errors import ClosedError, ConfigError, PromptTooLongError, ServerError, StoreFullError

_LATE = ("timeout", "gateway_timeout")
_SETTINGS = (HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, 422)


def refusal(response: httpx.Response, address: str) -> Exception:
    """Return the error that a response with another status than 2xx means."""
    body: object = None
    with suppress(ValueError):
        body = response.json()
    return error_of(body, response.status_code, address)


def error_of(body: object, status: int | None, address: str) -> Exception:
    """Return the error that ``{"error": {"message", "code"}}`` means.

    Parameters
    ----------
    status
        The HTTP status; None for an error in the middle of a stream, or of a background job.
    """
    error = _error_in(body)
    code, message = error.get("code"), str(error.get("message") or "it gave no reason")
    if code == "context_length_exceeded":
        return PromptTooLongError(message)
    if status == HTTPStatus.GATEWAY_TIMEOUT or code in _LATE:
        return TimeoutError(f"{address}: {message}")
    if code == "store_full":
        return StoreFullError(f"{address}: {message}")
    if status in _SETTINGS or (status is None and error.get("type") == "invalid_request_error"):
        return ConfigError(f"{address} refuses the request: {message}")
    if status == HTTPStatus.UNAUTHORIZED:
        message += " Give api_key=..., or set RAGKV_API_KEY."
    return ServerError(f"{address}: {_title(status)}{message}", status)


def unreachable(error: httpx.TransportError, address: str) -> ServerError:
    """Return the error that a failed connection means."""
    why = str(error) or type(error).__name__
    return ServerError(f"{address} cannot be reached ({why}): is `ragkv serve` running there?")


def closed(address: str) -> ClosedError:
    """Return the error of a call after ``close``."""
    return ClosedError(f"this client of {address} is closed: make another one")


def _error_in(body: object) -> Mapping[str, Any]:
    error = body.get("error") if isinstance(body, Mapping) else None
    return error if isinstance(error, Mapping) else {"message": error}


def _title(status: int | None) -> str:
    try:
        return "" if status is None else f"{status} {HTTPStatus(status).phrase}: "
    except ValueError:
        return f"{status}: "
