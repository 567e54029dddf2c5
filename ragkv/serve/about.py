"""The server's model, health and metrics; a prompt's tokens and sink."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Tag
from starlette.responses import Response

from ragkv.engine.engine import RagKV
from ragkv.prompt.render import Prompt, Rendered, render
from ragkv.prompt.tokens import tokenize as tokens_of
from ragkv.serve.body import Fields, Json
from ragkv.serve.fields import TEXT_OR_LIST, Objects, Text, Variables, chat_of
from ragkv.serve.metrics import CONTENT_TYPE
from ragkv.serve.refusal import RefusedError
from ragkv.serve.service import Engine, Service, State

router = APIRouter()
_STARTED = int(time.time())
_READ = ["GET", "HEAD"]
"""Methods of paths that probes request."""


class TokenizeFields(Fields):
    """The body of ``/tokenize``, as in vLLM."""

    model: str = "default"
    prompt: str | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: Literal[True] = True
    messages: Objects | None = None
    tools: Objects = []
    chat_template_kwargs: Variables = {}


class SinkFields(Fields):
    """The body of ``/v1/sink``."""

    template: Annotated[Text | Annotated[Objects, Tag("a list")], TEXT_OR_LIST]
    tools: Objects = []
    chat_template_kwargs: Variables = {}


@router.api_route("/", methods=_READ)
async def root() -> Response:
    """Return the program's name, for probes of hosting platforms."""
    return Json({"server": "ragkv"})


@router.api_route("/health", methods=_READ)
async def health(service: State) -> Response:
    """Return 200, or 503 until the engines are warm and while the server stops."""
    service.gate.refuse_draining()
    if not service.ready:
        raise RefusedError(503, "The server is starting.", code="starting")
    return Json({"status": "ok"})


@router.get("/metrics")
async def metrics(service: State) -> Response:
    """Return metrics for Prometheus."""
    return Response(service.metrics.text(), headers={"Content-Type": CONTENT_TYPE})


@router.get("/version")
async def about_version(service: State, engine: Engine) -> Response:
    """Return the model and the namespace of the key."""
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
async def models(service: State, engine: Engine) -> Response:
    """List the model under both of its names."""
    names = dict.fromkeys([service.model_name, "default"])
    return Json({"object": "list", "data": [_model(name, service, engine) for name in names]})


@router.api_route("/v1/models/{name:path}", methods=_READ)
async def model(service: State, engine: Engine, name: str) -> Response:
    """Describe a model."""
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
async def tokenize(request: Request, service: State, engine: Engine) -> Response:
    """Return the tokens of a text or of chat messages, as the engine reads them."""
    body = await service.read(TokenizeFields, request)
    service.require_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        message = "Give either a prompt or messages."
        raise RefusedError(400, message, param="prompt", code="invalid_value")
    prompt: Any = body.prompt
    if body.messages is not None:
        prompt = chat_of(body.messages, body.tools, body.chat_template_kwargs)
    service.check_prompt(prompt)
    ids = await service.in_thread(_ids_of, engine, prompt, body.add_special_tokens)
    positions = engine.loaded.positions
    return Json({"tokens": ids, "count": len(ids), "max_model_len": positions})


def _ids_of(engine: RagKV, prompt: Prompt, special: bool | None) -> list[int]:  # noqa: FBT001
    """Return a prompt's token ids.

    Parameters
    ----------
    special
        False leaves out the tokens that the tokenizer adds to a text; True adds them to chat
        messages, too.
    """
    rendered = render(prompt, engine.tokenizer)
    if special is False or (special and not isinstance(prompt, str)):
        rendered = Rendered(rendered.text, special)
    return [int(token) for token in tokens_of(rendered, engine.tokenizer).ids]


@router.post("/v1/sink")
async def sink(request: Request, service: State, engine: Engine) -> Response:
    """Return a prompt template's text before its first field."""
    body = await service.read(SinkFields, request)
    template: Any = body.template
    if not isinstance(template, str):
        template = chat_of(template, body.tools, body.chat_template_kwargs)
    found = await service.in_thread(
        engine.sink_from, template, body.tools, body.chat_template_kwargs
    )
    return Json({"sink": found})
