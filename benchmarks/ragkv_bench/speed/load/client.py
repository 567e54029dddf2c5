"""One streamed chat request to an OpenAI-compatible endpoint, timed as its answer arrives."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

CHAT = "/v1/chat/completions"
_MESSAGE = 300
"""Characters of an error's message that are kept."""
_SOURCES = ("sink", "history_exact", "history_repaired", "reused", "version", "recomputed", "fresh")
"""Where ragkv's report says that the prompt's tokens came from: they add up to it."""


@dataclass(slots=True)
class ServedAnswer:
    """What one request gave, and when.

    Seconds to the first and the last piece of the answer count from when it was sent. Tokens are
    those of ``usage``; where the endpoint sends none, the pieces are counted, and ``counted`` is
    True. ``error`` is an HTTP
    status, ``timeout``, ``connection``, ``cut off`` or ``stream``, and None for a whole answer;
    ``message`` has the endpoint's words.
    """

    turn: int = 0
    text: str = ""
    ttft_s: float | None = None
    answer_s: float | None = None
    completion_tokens: int = 0
    counted: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    sources: dict[str, int] = field(default_factory=dict)
    error: str | None = None
    message: str = ""

    @property
    def inter_token_s(self) -> float | None:
        """Mean seconds between two tokens."""
        if self.ttft_s is None or self.answer_s is None or self.completion_tokens < 2:
            return None
        return (self.answer_s - self.ttft_s) / (self.completion_tokens - 1)


def open_client(url: str, *, api_key: str | None = None, timeout_s: float) -> httpx.AsyncClient:
    """Return a client on which no request waits for another's connection."""
    return httpx.AsyncClient(
        base_url=url.rstrip("/").removesuffix("/v1"),
        headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
        timeout=httpx.Timeout(timeout_s, pool=None),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        trust_env=False,
    )


async def ask(
    client: httpx.AsyncClient,
    body: Mapping[str, Any],
    clock: Callable[[], float] = time.perf_counter,
) -> ServedAnswer:
    """Post a chat request that streams, and read its answer to the end.

    Whatever goes wrong is in its ``error``.
    """
    found = ServedAnswer()
    start = clock()
    try:
        async with client.stream("POST", CHAT, json=dict(body)) as response:
            if response.status_code != httpx.codes.OK:
                found.error = str(response.status_code)
                found.message = (await response.aread()).decode("utf-8", "replace")[:_MESSAGE]
                return found
            await _read(response, found, lambda: clock() - start)
    except httpx.TimeoutException as error:
        found.error, found.message = "timeout", repr(error)
    except httpx.TransportError as error:
        found.error, found.message = "connection", repr(error)
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        found.error, found.message = "stream", f"not a stream of chat chunks: {error!r}"
    return found


async def _read(response: httpx.Response, found: ServedAnswer, now: Callable[[], float]) -> None:
    """Fill in what a stream says."""
    pieces: list[str] = []
    ended = False
    usage: Mapping[str, Any] = {}
    async for event in events(response):
        if event is None:
            ended = True
            break
        if event.get("error"):
            found.error, found.message = "stream", str(event["error"])[:_MESSAGE]
            return
        usage = event.get("usage") or usage
        found.sources = _sources(event.get("ragkv")) or found.sources
        for choice in event.get("choices") or ():
            ended = ended or choice.get("finish_reason") is not None
            if text := (choice.get("delta") or {}).get("content"):
                pieces.append(text)
                found.answer_s = now()
                found.ttft_s = found.ttft_s or found.answer_s
    found.text = "".join(pieces)
    details = usage.get("prompt_tokens_details") or {}
    found.prompt_tokens = int(usage.get("prompt_tokens") or 0)
    found.cached_tokens = int(details.get("cached_tokens") or 0)
    found.counted = "completion_tokens" not in usage
    found.completion_tokens = len(pieces) if found.counted else int(usage["completion_tokens"])
    if not ended:
        found.error = "cut off"


async def events(response: httpx.Response) -> AsyncIterator[dict[str, Any] | None]:
    r"""Yield a response's server-sent events, and None for ``[DONE]``.

    Lines end at ``\n`` alone: httpx's own lines also end at the separators of Unicode, which
    may stand in a JSON string. Raises ValueError for an event that is no JSON object.
    """
    rest = b""
    async for part in response.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            event = None if data == b"[DONE]" else json.loads(data)
            if not isinstance(event, dict | None):
                raise ValueError(f"an event is {data[:80]!r}")
            yield event


def _sources(report: object) -> dict[str, int]:
    """Return prompt tokens by source from an event's report of ragkv, if there is one."""
    if not isinstance(report, dict):
        return {}
    tokens = report.get("tokens") or {}
    return {name: int(tokens[name]) for name in _SOURCES if name in tokens}
