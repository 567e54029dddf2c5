"""``/v1/chat/completions`` and ``/v1/completions``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ragkv.config.json_schema import check_schema
from ragkv.engine.engine import RagKV
from ragkv.errors import ConfigError
from ragkv.prompt.chat import Chat, TokenIds
from ragkv.retrieve.route import HEADER, route_of
from ragkv.serve.answers import AnswerPart, Answers
from ragkv.serve.body import Json, dump
from ragkv.serve.fields import AnswerFields, ChatFields, CompletionFields, prompts_in
from ragkv.serve.metrics import ServerMetrics
from ragkv.serve.refusal import RefusedError, refusal_of
from ragkv.serve.response import AnswerWriter, ChatWriter, TextWriter
from ragkv.serve.service import (
    Engine,
    Service,
    State,
    check_answers,
    check_texts,
    overrides_of,
)

router = APIRouter()
T = TypeVar("T")
_log = logging.getLogger(__name__)
_UNREAD_S = 5.0
"""Seconds beyond an answer's deadline until its unread events are dropped."""
CHAT_TOKENS = 1024
"""Default length of a chat answer."""
COMPLETION_TOKENS = 16
"""Default length of a text completion, as in OpenAI's API."""


class ClientLeftError(Exception):
    """The client has closed the connection."""


@router.post("/v1/chat/completions")
async def chat_completions(request: Request, service: State, engine: Engine) -> Response:
    """Answer chat messages."""
    body = await service.read(ChatFields, request)
    prompt, schema = body.chat, body.response_format.schema_of_answers
    await _check_schema(service, "response_format", schema)
    if prompt.has_to_call:  # a call has its own schema
        schema = None
        await _check_schema(service, "tools", prompt.forced_schema)
    settings = body.decode_settings() | {
        "max_new_tokens": body.max_completion_tokens or body.max_tokens or CHAT_TOKENS,
        "logprobs": body.top_logprobs if body.logprobs else None,
        "json_schema": schema,
    }
    return await _answer(request, engine, body, [prompt], settings=settings, writer_of=ChatWriter)


async def _check_schema(service: Service, param: str, schema: dict[str, Any] | None) -> None:
    """Compile a schema, in a thread; the answer uses the result."""
    try:
        if schema is not None:
            await service.in_thread(check_schema, param, schema)
    except ConfigError as error:
        raise RefusedError(400, str(error), param=param, code="invalid_value") from error


@router.post("/v1/completions")
async def completions(request: Request, service: State, engine: Engine) -> Response:
    """Complete texts or token ids."""
    body = await service.read(CompletionFields, request)
    prompts = await service.in_thread(prompts_in, body.prompt)
    settings = body.decode_settings() | {
        "max_new_tokens": body.max_tokens or COMPLETION_TOKENS,
        "logprobs": body.logprobs,
    }
    return await _answer(request, engine, body, prompts, settings=settings, writer_of=TextWriter)


async def _answer(
    request: Request,
    engine: RagKV,
    fields: AnswerFields,
    prompts: Sequence[str | Chat | TokenIds],
    *,
    settings: Mapping[str, Any],
    writer_of: type[AnswerWriter],
) -> Response:
    """Answer prompts; ``settings`` are keyword arguments of :meth:`RagKV.stream`."""
    service: Service = request.app.state.service
    service.require_model(fields.model)
    count = fields.n * len(prompts)
    check_answers(count)
    for prompt in prompts:
        service.check_prompt(prompt)
    retrieved = fields.ragkv.retrieved
    check_texts(retrieved, "ragkv.retrieved")
    overrides = overrides_of(engine, fields.ragkv)
    answers = Answers(asyncio.get_running_loop().time() + service.settings.timeout)
    answers.leave = service.gate.enter(count, answers.fail)
    writer = writer_of(fields, service, engine, count)
    try:
        if retrieved:
            load = partial(engine.prefetch, for_next_answer=False, **overrides)
            await service.in_thread(load, retrieved)
        for prompt in prompts:
            for index in range(fields.n):
                seed = None if fields.seed is None else (fields.seed + index) % 2**63
                answers.add(engine.stream(prompt, seed=seed, **settings, **overrides))
        if fields.stream:
            # an error before the first text still has a status of its own
            first = await _unless_left(request, anext(answers))
            return EventStream(answers, first, writer, service.metrics, _route(answers, retrieved))
        await _unless_left(request, _collect(answers, writer))
    except ClientLeftError:
        answers.close()
        service.metrics.record_abort(writer.unfinished)
        return Response(status_code=499)
    except BaseException:
        answers.close()
        raise
    answers.close()
    return Json(writer.whole(), headers=_route(answers, retrieved))


def _route(answers: Answers, retrieved: Sequence[str]) -> dict[str, str]:
    """Return the header with the routing key; none without a known chunk."""
    key = route_of([*retrieved, *answers.chunks])
    return {HEADER: key} if key else {}


async def _collect(answers: Answers, writer: AnswerWriter) -> None:
    async for part in answers:
        writer.take(part)


async def _unless_left(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``; cancel it if the client closes the connection.

    Raises
    ------
    ClientLeftError
    """
    tasks = working, leaving = asyncio.create_task(work), asyncio.create_task(_left(request))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeftError
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Sends an answer's chunks as server-sent events; the answers end with the connection.

    Parameters
    ----------
    first
        The part that has already been read.
    """

    def __init__(
        self,
        answers: Answers,
        first: AnswerPart,
        writer: AnswerWriter,
        metrics: ServerMetrics,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(
            self._events(first),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers},
        )
        self._answers = answers
        self._writer = writer
        self._metrics = metrics
        self._failed = False

    async def _events(self, first: AnswerPart) -> AsyncIterator[str]:
        try:
            yield _event(self._writer.chunk(first))
            async for part in self._answers:
                yield _event(self._writer.chunk(part))
            if self._writer.with_usage:
                yield _event(self._writer.usage_chunk())
        except Exception as error:  # noqa: BLE001  the status has been sent
            self._failed = True
            refusal = refusal_of(error)
            self._metrics.record_error(refusal.code)
            yield _event(refusal.body())
        yield "data: [DONE]\n\n"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the end, or until the client leaves or reads no more."""
        try:
            async with asyncio.timeout_at(self._answers.deadline + _UNREAD_S):
                await super().__call__(scope, receive, send)
        except TimeoutError:
            _log.warning("a client did not read its answer in time; its connection is closed")
        finally:
            self._answers.close()
            if self._writer.unfinished and not self._failed:
                self._metrics.record_abort(self._writer.unfinished)


def _event(content: object) -> str:
    return f"data: {dump(content)}\n\n"
