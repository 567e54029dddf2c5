"""An endpoint: the model that it serves, the fields that it takes, its chunks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httpx

from ragkv_bench.errors import PeerError
from ragkv_bench.speed.load.client import ask
from ragkv_bench.speed.load.workload import SourceDocument

_NEARLY_GREEDY = {"temperature": 1e-5}
"""For servers that divide by the temperature."""
_FIELDS: dict[str, Any] = {
    "stream_options": {"include_usage": True},
    "ignore_eos": True,
    "ragkv": {"report": True},
}
_MISSING = {HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.NOT_IMPLEMENTED}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What was found out about an endpoint by asking it.

    ``extra`` are the fields beyond OpenAI's oldest that it takes, ``notes`` say what it does not.
    """

    model: str
    extra: dict[str, Any]
    notes: tuple[str, ...] = ()

    def body(self, messages: Sequence[dict[str, str]], answer_tokens: int) -> dict[str, Any]:
        """Return a greedy, streamed request."""
        return {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": answer_tokens,
            "temperature": 0,
            "stream": True,
            **self.extra,
        }


async def probe(client: httpx.AsyncClient, model: str | None = None) -> Endpoint:
    """Ask which model is served and, by a short request each, how many of the fields are taken.

    Raises PeerError where not even a plain request is answered.
    """
    name = model or await _only_model(client)
    plain = Endpoint(name, {}).body([{"role": "user", "content": "Say yes."}], 2)
    for count in (len(_FIELDS), 1, 0):
        extra = dict(list(_FIELDS.items())[:count])
        answer = await ask(client, plain | extra)
        if answer.error is None:
            break
    else:
        raise PeerError(
            f"{client.base_url} does not answer a chat request for {name!r} "
            f"({answer.error}): {answer.message or 'the stream has no end'}"
        )
    notes = [f"{field} is not taken" for field in _FIELDS if field not in extra]
    if not answer.text and (await ask(client, plain | extra | _NEARLY_GREEDY)).text:
        extra |= _NEARLY_GREEDY
        notes.append(f"says nothing at temperature 0: {_NEARLY_GREEDY['temperature']:g} instead")
    return Endpoint(name, extra, tuple(notes))


async def _only_model(client: httpx.AsyncClient) -> str:
    response = await _send(client, "GET", "/v1/models")
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise PeerError(
            f"{response.url} names no model ({response.status_code}): give --model"
        ) from error


async def precompute(
    client: httpx.AsyncClient, documents: Sequence[SourceDocument]
) -> float | None:
    """Post each document's chunks to ``/v1/chunks``.

    Returns the seconds that it took; None where the endpoint has no such path. Raises PeerError
    where it refuses chunks.
    """
    started = time.perf_counter()
    for document in documents:
        body = {"texts": list(document.chunks), "document": document.name}
        response = await _send(client, "POST", "/v1/chunks", json=body)
        if response.status_code in _MISSING:
            return None
        if not response.is_success:
            raise PeerError(f"{document.name} was not precomputed: {response.text[:300]}")
    return time.perf_counter() - started


async def _send(client: httpx.AsyncClient, method: str, path: str, **given: Any) -> httpx.Response:
    try:
        return await client.request(method, path, **given)
    except httpx.HTTPError as error:
        raise PeerError(f"{client.base_url} does not answer: {error!r}") from error
