"""One streamed request to an OpenAI-compatible endpoint, timed as it arrives."""

from __future__ import annotations

import json
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import httpx

from ragkv_bench.speed.load.answer import ServedAnswer

CHAT = "/v1/chat/completions"
_MESSAGE = 300
"""Characters of an error's message that are kept."""
_SOURCES = (
    "sink_tokens",
    "conversation_tokens",
    "prefix_tokens",
    "reused_tokens",
    "recomputed_tokens",
    "fresh_tokens",
)
"""Fields of ragkv's report that say where the prompt's tokens came from: they add up to it."""


async def ask(
    client: httpx.AsyncClient,
    body: Mapping[str, Any],
    *,
    since: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> ServedAnswer:
    """Post a chat request that streams, and read its answer to the end.

    Whatever goes wrong is in the result's ``error``.

    Parameters
    ----------
    since
        The clock's time that latencies count from, by default now.
    """
    found = ServedAnswer()
    start = clock() if since is None else since
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
    last = math.nan
    usage: Mapping[str, Any] = {}
    async for event in events(response):
        if event is None:
            ended = True
            break
        if event.get("error"):
            found.error, found.message = "stream", str(event["error"])[:_MESSAGE]
            return
        usage = event.get("usage") or usage
        found.sources = _sources(event) or found.sources
        for choice in event.get("choices") or ():
            ended = ended or choice.get("finish_reason") is not None
            if text := (choice.get("delta") or {}).get("content"):
                last, before = now(), last
                if found.ttft_s is None:
                    found.ttft_s = last
                else:
                    found.longest_gap_s = max(found.longest_gap_s, last - before)
                pieces.append(text)
                found.answer_s = last
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
    may stand in a JSON string.

    Raises
    ------
    ValueError
        An event is not a JSON object.
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


def _sources(event: Mapping[str, Any]) -> dict[str, int]:
    """Return prompt tokens by source from the report in an event, if there is one."""
    own = event.get("ragkv")
    if not isinstance(own, dict):
        return {}
    report = own.get("report", own)
    by_source = report.get("sources")
    if isinstance(by_source, dict):
        return {str(name): int(count) for name, count in by_source.items()}
    return {name.removesuffix("_tokens"): int(report[name]) for name in _SOURCES if name in report}
