"""``/v1/chat/completions`` and ``/v1/completions``."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from ragkv.config.schema import check_schema
from ragkv.engine.engine import RagKV
from ragkv.errors import ConfigError
from ragkv.prompt.chat import Chat, TokenIds
from ragkv.retrieve.route import HEADER, route_of
from ragkv.serve import limits
from ragkv.serve.answers import Answers
from ragkv.serve.body import Json, read_json
from ragkv.serve.engine_calls import overrides_of
from ragkv.serve.events import EventStream
from ragkv.serve.fields import AnswerFields, ChatFields, CompletionFields, parse, prompts_in
from ragkv.serve.forms import ChatForm, Form, TextForm
from ragkv.serve.refusal import RefusedError
from ragkv.serve.service import Engine, Service, service_of
from ragkv.serve.writer import AnswerWriter

router = APIRouter()
T = TypeVar("T")
COMPLETION_TOKENS = 16
"""Longest text completion where the request does not say, as in OpenAI's API."""


class ClientLeft(Exception):  # noqa: N818  internal
    """Raised where nobody waits for the answer any more."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks for, whichever form it has."""

    fields: AnswerFields
    prompts: Sequence[str | Chat | TokenIds]
    most_tokens: int
    logprobs: int | None
    form: Form
    schema: dict[str, Any] | None = None


@router.post("/v1/chat/completions")
async def chat_completions(request: Request, engine: Engine) -> Response:
    """Answer chat messages."""
    service = service_of(request)
    body = parse(ChatFields, await read_json(request, service.settings))
    prompt, schema = body.chat, body.response_format.schema_of_answers
    await _check(service, "response_format", schema)
    if prompt.has_to_call:  # a call, which has its own schema
        schema = None
        await _check(service, "tools", prompt.forced_schema)
    most = body.max_completion_tokens or body.max_tokens or limits.ANSWER_TOKENS
    logprobs = body.top_logprobs if body.logprobs else None
    return await _answer(request, engine, Asked(body, [prompt], most, logprobs, ChatForm(), schema))


async def _check(service: Service, param: str, schema: dict[str, Any] | None) -> None:
    """Check a schema, in a thread; what is found is kept for the answer."""
    try:
        if schema is not None:
            await service.in_thread(check_schema, param, schema)
    except ConfigError as error:
        raise RefusedError(400, str(error), param=param, code="invalid_value") from error


@router.post("/v1/completions")
async def completions(request: Request, engine: Engine) -> Response:
    """Complete texts, each given as such or as token ids."""
    service = service_of(request)
    body = parse(CompletionFields, await read_json(request, service.settings))
    prompts = await service.in_thread(prompts_in, body.prompt)
    service.check_answers(body.n * len(prompts))
    most = body.max_tokens or COMPLETION_TOKENS
    return await _answer(request, engine, Asked(body, prompts, most, body.logprobs, TextForm()))


async def _answer(request: Request, engine: RagKV, asked: Asked) -> Response:
    service = service_of(request)
    fields = asked.fields
    service.require_model(fields.model)
    count = fields.n * len(asked.prompts)
    service.check_answers(count)
    if fields.ragkv.report and not service.settings.reports:
        raise RefusedError(
            *(400, "This server sends no reports."),
            param="ragkv.report",
            code="unsupported_parameter",
        )
    for prompt in asked.prompts:
        service.check_prompt(prompt)
    service.check_chunks(fields.ragkv.retrieved, "ragkv.retrieved")
    service.check_chunks([fields.ragkv.sink or ""], "ragkv.sink")
    overrides = overrides_of(engine, fields.ragkv)
    answers = Answers(asyncio.get_running_loop().time() + service.settings.timeout)
    answers.leave = service.gate.enter(count, answers.fail)
    writer = AnswerWriter(asked.form, fields, service, engine, count)
    try:
        if fields.ragkv.retrieved:
            load = partial(engine.prefetch, for_next_answer=False, **overrides)
            await service.in_thread(load, fields.ragkv.retrieved)
        _start(answers, engine, asked, overrides)
        if fields.stream:
            # what is wrong with the prompt has a status of its own: that of a stream is sent
            # with the first text
            first = await _unless_left(request, anext(answers))
            return EventStream(
                answers, first, writer, service.metrics, _route(engine, answers, fields)
            )
        await _unless_left(request, _collect(answers, writer))
    except ClientLeft:
        answers.close()
        service.metrics.record_abort(writer.unfinished)
        return Response(status_code=499)
    except BaseException:
        answers.close()
        raise
    answers.close()
    return Json(writer.whole(), headers=_route(engine, answers, fields))


def _route(engine: RagKV, answers: Answers, fields: AnswerFields) -> dict[str, str]:
    """Return the header with the routing key; none where no chunk is known."""
    key = route_of([*fields.ragkv.retrieved, *answers.chunks], engine.namespace)
    return {HEADER: key} if key else {}


def _start(answers: Answers, engine: RagKV, asked: Asked, overrides: dict[str, Any]) -> None:
    fields = asked.fields
    generation = {"min_p": fields.min_p, "repetition_penalty": fields.repetition_penalty}
    for prompt in asked.prompts:
        for index in range(fields.n):
            seed = None if fields.seed is None else (fields.seed + index) % 2**63
            stream = engine.stream(
                prompt,
                max_new_tokens=asked.most_tokens,
                temperature=fields.temperature,
                top_p=fields.top_p,
                top_k=max(fields.top_k, 0),
                stop=fields.stop,
                seed=seed,
                stop_token_ids=fields.stop_token_ids,
                ignore_eos=fields.ignore_eos,
                sparse=fields.sparse,
                logprobs=asked.logprobs,
                json_schema=asked.schema,
                generation=generation,
                retrieved=fields.ragkv.retrieved,
                **overrides,
            )
            answers.add(stream)


async def _collect(answers: Answers, writer: AnswerWriter) -> None:
    async for part in answers:
        writer.take(part)


async def _unless_left(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return what the work returns; end it when the client closes the connection.

    Raises
    ------
    ClientLeft
        The client did.
    """
    tasks = working, leaving = asyncio.create_task(work), asyncio.create_task(_left(request))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeft
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
