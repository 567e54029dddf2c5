"""An OpenAI-compatible endpoint on 127.0.0.1 that says what a test has written for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

Part = dict | str | bytes | float
"""An event, raw bytes, or seconds to wait."""
DONE = "[DONE]"


@dataclass
class Reply:
    """What comes back: a status, then parts. A ``torn`` one ends before its length says so."""

    parts: Sequence[Part] = ()
    status: int = 200
    torn: bool = False


@dataclass
class StubEndpoint:
    url: str
    bodies: list[dict] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    most_at_once: int = 0


def piece(text: str, **more: object) -> dict:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}], **more}


def end(reason: str = "length") -> dict:
    return {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}


def usage(prompt: int, completion: int, cached: int = 0) -> dict:
    details = {"cached_tokens": cached}
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return {"choices": [], "usage": {**counts, "prompt_tokens_details": details}}


def whole(*texts: str) -> list[Part]:
    return [*map(piece, texts), end(), usage(100, len(texts), 40), DONE]


def _bytes(part: dict | str | bytes) -> bytes:
    if isinstance(part, bytes):
        return part
    text = part if isinstance(part, str) else json.dumps(part, ensure_ascii=False)
    return f"data: {text}\n\n".encode()


@asynccontextmanager
async def stub_endpoint(answer: Callable[[str, dict], Reply]) -> AsyncIterator[StubEndpoint]:
    """Serve ``answer(path, body)`` to every request."""
    running = 0
    tasks: set[asyncio.Task] = set()
    stub = StubEndpoint("")

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal running
        tasks.add(asyncio.current_task())
        running += 1
        stub.most_at_once = max(stub.most_at_once, running)
        try:
            await reply_to(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client left
        finally:
            running -= 1
            writer.close()
            tasks.discard(asyncio.current_task())

    async def reply_to(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        lengths = [line for line in head.split("\r\n") if line.startswith("content-length")]
        raw = await reader.readexactly(int(lengths[0].split(":")[1])) if lengths else b"{}"
        path, body = head.split()[1], json.loads(raw or b"{}")
        stub.paths.append(path)
        stub.bodies.append(body)
        reply = answer(path, body)
        promised = "Content-Length: 100000\r\n" if reply.torn else ""
        writer.write(f"HTTP/1.1 {reply.status} X\r\n{promised}Connection: close\r\n\r\n".encode())
        for part in reply.parts:
            if isinstance(part, float):
                await asyncio.sleep(part)
            else:
                writer.write(_bytes(part))
                await writer.drain()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    stub.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield stub
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()
