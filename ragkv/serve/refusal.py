"""Errors in the form of OpenAI's API."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ragkv.errors import (
    ClosedError,
    ConfigError,
    MissingDependencyError,
    OutOfMemoryError,
    PromptTooLongError,
    ServerError,
    StoreError,
    StoreFullError,
)

REQUEST_ID: ContextVar[str] = ContextVar("ragkv_request_id", default="")
"""The id of the request that this context answers."""

_log = logging.getLogger(__name__)
_RETRY_AFTER = {"Retry-After": "1"}
_NO_RETRY = {"x-should-retry": "false"}
"""Stops openai's clients from repeating a request that failed or took too long."""


class RefusedError(Exception):
    """The refusal of a request, or the early end of its answer.

    Parameters
    ----------
    status
        The HTTP status.
    message
        The reason, and the client's remedy.
    param
        The wrong field.
    code
        The error's identifier for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code or HTTPStatus(status).phrase.lower().replace(" ", "_")
        can_retry = status < 500 or status == HTTPStatus.SERVICE_UNAVAILABLE
        self.headers = {**({} if can_retry else _NO_RETRY), **(headers or {})}

    def body(self) -> dict[str, Any]:
        """Return ``{"error": {"message", "type", "param", "code"}}``."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        if self.status == HTTPStatus.UNAUTHORIZED:
            kind = "authentication_error"
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }


def refusal_of(error: BaseException) -> RefusedError:
    """Return an error's refusal; details of the machine go to the log only."""
    match error:
        case RefusedError():
            return error
        case PromptTooLongError():
            return RefusedError(400, str(error), code="context_length_exceeded")
        case MissingDependencyError():
            return RefusedError(400, f"Not on this server: {error}", code="unsupported_parameter")
        case ConfigError():
            return RefusedError(400, str(error), code="invalid_value")
        case ClosedError():
            return draining()
        case ServerError():
            refusal = _vllm_refusal(error)
        case OutOfMemoryError():  # the end of other answers can make room
            refusal = RefusedError(503, str(error), code="out_of_memory", headers=_RETRY_AFTER)
        case StoreFullError():
            refusal = RefusedError(507, "The store is full.", code="store_full")
        case StoreError():
            refusal = RefusedError(503, "The store cannot be used.", code="store_unavailable")
        case _:
            refusal = RefusedError(500, "The server failed; see its log.")
    _log.error("the request %s failed", REQUEST_ID.get(), exc_info=error)
    return refusal


def _vllm_refusal(error: ServerError) -> RefusedError:
    message = "vLLM, the decoder of this server, does not respond."
    if error.status in (None, HTTPStatus.SERVICE_UNAVAILABLE):
        return RefusedError(503, message, code="vllm_unavailable", headers=_RETRY_AFTER)
    return RefusedError(502, message, code="vllm_failed")


def draining() -> RefusedError:
    """Return the refusal of a server that is stopping."""
    return RefusedError(503, "The server is stopping.", code="draining", headers=_RETRY_AFTER)


def not_without(param: str, other: str) -> RefusedError:
    """Return the refusal of a field that needs another one."""
    message = f"{param!r} is only allowed when {other!r} is enabled."
    return RefusedError(400, message, param=param, code="invalid_value")


def missing(param: str) -> RefusedError:
    """Return the refusal of a body without a required field."""
    code = "missing_required_parameter"
    return RefusedError(400, f"Missing required parameter: {param!r}.", param=param, code=code)


def unsupported(param: str, what: str) -> RefusedError:
    """Return the refusal of an unsupported field or value."""
    message = f"This server does not support {what}."
    return RefusedError(400, message, param=param, code="unsupported_parameter")


def wrong_field(error: ValidationError) -> RefusedError:
    """Return the refusal of a body's first wrong field.

    For a union the error of the closest member is chosen.
    """
    found = error.errors(include_url=False, include_context=False, include_input=False)
    same = [each for each in found if each["loc"][:1] == found[0]["loc"][:1]]
    first = max(same, key=_closeness)
    # names of a union's members are not identifiers
    parts = [str(part) for part in first["loc"] if isinstance(part, int) or part.isidentifier()]
    if len(parts) > 1 and parts[-1] in {"str", "float"}:
        del parts[-1]
    where = ".".join(parts)
    if first["type"] == "extra_forbidden":
        return RefusedError(
            400, f"Unknown field: {where!r}.", param=where, code="unknown_parameter"
        )
    code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
    message = first["msg"].removeprefix("Value error, ")
    return RefusedError(400, f"{where}: {message}.", param=where, code=code)


def _closeness(error: ErrorDetails) -> tuple[int, bool]:
    depth = sum(isinstance(part, int) for part in error["loc"])
    return depth, not error["type"].endswith(("_type", "literal_error"))
