"""A stub of ``ragkv serve`` over HTTP, and clients of it."""

import asyncio
import json
import threading
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from ragkv import ReuseReport
from ragkv.client import RemoteRagKV
from ragkv.report.account import ChunkUse, PromptTokens

VERSION = {
    "version": "0.1.0",
    "model": "tiny",
    "fingerprint": "abc",
    "namespace": "team",
    "supported": True,
    "positions": 4096,
}
TOKENS = PromptTokens(bytes([0, 0, 1, 2, 3, 3]))
REPORT = ReuseReport("query", 0.2, 0.01, TOKENS, chunks=(ChunkUse("A chunk", 2, 4, 1, 1),))


def refused(status, code=None, headers=None, message="No."):
    body = {"error": {"message": message, "type": "x", "param": None, "code": code}}
    return httpx.Response(status, json=body, headers=headers)


def sse(*events):
    lines = [event if isinstance(event, str) else json.dumps(event) for event in events]
    return "".join(f"data: {line}\n\n" for line in lines)


def text_events(*pieces, ids=(), reason="length", report=REPORT):
    choices = [{"index": 0, "text": piece, "finish_reason": None} for piece in pieces]
    choices.append({"index": 0, "text": "", "finish_reason": reason})
    if ids:
        choices[-1]["token_ids"] = list(ids)
    last = {"choices": [], "usage": {}}
    if report:
        last["ragkv"] = report.to_dict()
    return sse(*({"choices": [choice]} for choice in choices), last, "[DONE]")


class Endless(httpx.AsyncByteStream):
    """An answer of one word that never ends by itself."""

    def __init__(self) -> None:
        self.closed = threading.Event()

    async def __aiter__(self):
        yield sse({"choices": [{"text": "Word", "finish_reason": None}]}).encode()
        await asyncio.Event().wait()

    async def aclose(self):
        self.closed.set()


@dataclass
class Stub:
    """Answers by path, the last answer again and again."""

    answers: dict[str, list[Any]] = field(default_factory=dict)
    requests: list[httpx.Request] = field(default_factory=list)

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answers = self.answers[f"{request.method} {request.url.path}"]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, httpx.Response):
            return answer
        if isinstance(answer, str):
            return httpx.Response(200, text=answer)
        return httpx.Response(200, json=answer)

    def bodies(self, path):
        return [json.loads(each.content) for each in self.requests if each.url.path == path]


@pytest.fixture
def stub():
    return Stub(
        {
            "GET /version": [VERSION],
            "POST /tokenize": [{"tokens": [7, 8], "count": 2}],
            "POST /v1/completions": [text_events("Hel", "lo", ids=[7, 8])],
        }
    )


@pytest.fixture
def connect(stub):
    made = []

    def connect(base_url="http://host:8000", **given):
        given.setdefault("transport", httpx.MockTransport(stub))
        made.append(RemoteRagKV(base_url, **given))
        return made[-1]

    yield connect
    for kv in made:
        kv.close()
