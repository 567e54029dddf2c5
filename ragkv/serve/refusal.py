"""Errors in the form of OpenAI's API."""

from __future__ import annotations

import logging
from collections.abc import Mapping
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
from ragkv.serve.request_id import request_id

_log = logging.getLogger(__name__)
_ONCE = {"x-should-retry": "false"}
"""Keeps openai's clients from sending again what has failed, or has taken too long."""


class RefusedError(Exception):
    """A request that is not answered, or no longer.

    Parameters
    ----------
    status
        The HTTP status.
    message
        What the client can do about it.
    param
        The field that is wrong.
    code
        What programs know the error by.
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
        once = {} if status < 500 or status == HTTPStatus.SERVICE_UNAVAILABLE else _ONCE
        self.headers = {**once, **(headers or {})}

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
    """Return what a client is told of an error; what it must not see goes to the log alone."""
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
        case ServerError():  # vLLM, which decodes here
            down = error.status in (None, HTTPStatus.SERVICE_UNAVAILABLE)
            refusal = RefusedError(
                *(503 if down else 502, "vLLM, which decodes here, does not answer."),
                code="vllm_unavailable" if down else "vllm_failed",
                headers={"Retry-After": "1"} if down else None,
            )
        case OutOfMemoryError():  # there may be room when other answers have ended
            after = {"Retry-After": "1"}
            refusal = RefusedError(503, str(error), code="out_of_memory", headers=after)
        case StoreFullError():
            refusal = RefusedError(507, "The store is full.", code="store_full")
        case StoreError():
            refusal = RefusedError(503, "The store cannot be used.", code="store_unavailable")
        case _:
            refusal = RefusedError(500, "The server failed; its log says how.")
    _log.error("the request %s failed", request_id(), exc_info=error)
    return refusal


def draining() -> RefusedError:
    """Return the refusal of a server that is stopping."""
    headers = {"Retry-After": "1"}
    return RefusedError(503, "The server is stopping.", code="draining", headers=headers)


def not_without(param: str, other: str) -> RefusedError:
    """Return the refusal of a field that needs another one."""
    message = f"{param!r} is only allowed when {other!r} is enabled."
    return RefusedError(400, message, param=param, code="invalid_value")


def missing(param: str) -> RefusedError:
    """Return the refusal of a body without this field."""
    code = "missing_required_parameter"
    return RefusedError(400, f"Missing required parameter: {param!r}.", param=param, code=code)


def unsupported(param: str, what: str) -> RefusedError:
    """Return the refusal of what this server does not do."""
    message = f"This server does not support {what}."
    return RefusedError(400, message, param=param, code="unsupported_parameter")


def wrong_field(error: ValidationError) -> RefusedError:
    """Return the refusal of a body by what pydantic found, the first field that is wrong.

    Of a union's errors those of the member that the value is nearest to say what is wrong.
    """
    found = error.errors(include_url=False, include_context=False, include_input=False)
    same = [each for each in found if each["loc"][:1] == found[0]["loc"][:1]]
    first = max(same, key=_closeness)
    # a union's own names for its members are no part of the place
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
