"""What the server says of itself, and of prompts: models, health, metrics, tokens, sinks."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field, Tag
from starlette.responses import Response

from ragkv.engine.engine import RagKV
from ragkv.serve.body import Json, read_json
from ragkv.serve.engine_calls import text_of_ids, token_ids
from ragkv.serve.fields import TEXT_OR_LIST, Fields, Text, TokenId, Variables, parse, plain_messages
from ragkv.serve.metrics import CONTENT_TYPE
from ragkv.serve.refusal import RefusedError
from ragkv.serve.service import Engine, Service, service_of

router = APIRouter()
_STARTED = int(time.time())
_READ = ["GET", "HEAD"]
"""Methods of what probes look at."""


class TokenizeFields(Fields):
    """The body of ``/tokenize``, as vLLM has it."""

    model: str = "default"
    prompt: str | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: Literal[True] = True
    return_token_strs: bool = False
    messages: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True, default_factory=list)]
    chat_template_kwargs: Variables = Field(default_factory=dict)


class DetokenizeFields(Fields):
    """The body of ``/detokenize``."""

    model: str = "default"
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


class SinkFields(Fields):
    """The body of ``/v1/sink``."""

    template: Annotated[
        Text | Annotated[list[dict[str, Any]], Field(fail_fast=True), Tag("a list")],
        TEXT_OR_LIST,
    ]
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True, default_factory=list)]
    chat_template_kwargs: Variables = Field(default_factory=dict)


@router.api_route("/", methods=_READ)
async def root() -> Response:
    """Say what this is: probes of hosting platforms ask here."""
    return Json({"server": "ragkv"})


@router.api_route("/health", methods=_READ)
async def health(request: Request) -> Response:
    """Say whether answers come at once: 503 until the engines are warm."""
    service = service_of(request)
    service.gate.refuse_draining()
    if not service.ready:
        raise RefusedError(503, "The server is starting.", code="starting")
    return Json({"status": "ok"})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return figures for Prometheus."""
    return Response(service_of(request).metrics.text(), headers={"Content-Type": CONTENT_TYPE})


@router.get("/version")
async def about_version(request: Request, engine: Engine) -> Response:
    """Say what answers here."""
    service = service_of(request)
    return Json(
        {
            "version": version("ragkv"),
            "model": service.model_name,
            "fingerprint": await service.in_thread(lambda: engine.info.fingerprint),
            "namespace": engine.namespace,
            "supported": not engine.info.unsupported,
            "positions": engine.loaded.positions,
        }
    )


@router.api_route("/v1/models", methods=_READ)
async def models(request: Request, engine: Engine) -> Response:
    """List the one model, by both of its names."""
    service = service_of(request)
    names = dict.fromkeys([service.model_name, "default"])
    return Json({"object": "list", "data": [_model(name, service, engine) for name in names]})


@router.api_route("/v1/models/{name:path}", methods=_READ)
async def model(request: Request, engine: Engine, name: str) -> Response:
    """Describe a model."""
    service = service_of(request)
    service.require_model(name)
    return Json(_model(name, service, engine))


def _model(name: str, service: Service, engine: RagKV) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "ragkv",
        "root": service.model_name,
        "max_model_len": engine.loaded.positions,
    }


@router.post("/tokenize")
async def tokenize(request: Request, engine: Engine) -> Response:
    """Return the tokens of a text or of chat messages, as the engine reads them."""
    service = service_of(request)
    body = parse(TokenizeFields, await read_json(request, service.settings))
    service.require_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RefusedError(
            400, "Give either a prompt or messages.", param="prompt", code="invalid_value"
        )
    prompt: Any = body.prompt
    if body.messages is not None:
        prompt = plain_messages(body.messages, body.tools, body.chat_template_kwargs)
    service.check_prompt(prompt)
    special = body.add_special_tokens
    ids = await service.in_thread(token_ids, engine, prompt, add_special_tokens=special)
    found = {"tokens": ids, "count": len(ids), "max_model_len": engine.loaded.positions}
    if body.return_token_strs:
        found["token_strs"] = engine.tokenizer.convert_ids_to_tokens(ids)
    return Json(found)


@router.post("/detokenize")
async def detokenize(request: Request, engine: Engine) -> Response:
    """Return the text of tokens, special ones included."""
    service = service_of(request)
    body = parse(DetokenizeFields, await read_json(request, service.settings))
    service.require_model(body.model)
    return Json({"prompt": await service.in_thread(text_of_ids, engine, body.tokens)})


@router.post("/v1/sink")
async def sink(request: Request, engine: Engine) -> Response:
    """Return a prompt template's text before its first field."""
    service = service_of(request)
    body = parse(SinkFields, await read_json(request, service.settings))
    template: Any = body.template
    if not isinstance(template, str):
        template = plain_messages(template, body.tools, body.chat_template_kwargs)
    given = template, body.tools, body.chat_template_kwargs
    return Json({"sink": await service.in_thread(engine.sink_from, *given)})
