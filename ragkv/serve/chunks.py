"""``/v1/chunks``: precompute, prefetch, find and delete chunks; ``/v1/route``: their key."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from ragkv.ingest.documents import check_revision
from ragkv.retrieve.route import route_of
from ragkv.serve.body import Fields, Json
from ragkv.serve.fields import ReuseFields, Texts
from ragkv.serve.refusal import RefusedError
from ragkv.serve.service import Engine, State, check_texts, overrides_of

router = APIRouter()


class RouteFields(Fields):
    """The body of ``POST /v1/route``."""

    texts: Texts


class PrefetchFields(RouteFields):
    """The body of ``/v1/chunks/prefetch``."""

    ragkv: ReuseFields = ReuseFields()


class ChunkFields(PrefetchFields):
    """The body of ``POST /v1/chunks``."""

    document: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    revision: Annotated[str, Field(max_length=4096)] | None = None
    expires_in: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    neighbours: bool = False


class DeletedFields(Fields):
    """The body of ``DELETE /v1/chunks``."""

    text: str | None = None
    document: str | None = None


@router.post("/v1/chunks")
async def precompute(request: Request, service: State, engine: Engine) -> Response:
    """Encode chunks and return the report."""
    body = await service.read(ChunkFields, request)
    check_texts(body.texts, "texts")
    overrides = overrides_of(engine, body.ragkv)
    texts = list(dict.fromkeys(text.strip() for text in body.texts))
    revision = check_revision(body.revision, body.document)
    document = {"document": body.document, "revision": revision} if body.document else {}
    given = {"expires_in": body.expires_in, "neighbours": body.neighbours, **overrides}
    report = await service.ingestion.run(engine, texts, document, **given)
    return Json({"report": report.to_dict()})


@router.post("/v1/chunks/prefetch")
async def prefetch(request: Request, service: State, engine: Engine) -> Response:
    """Start loading chunks of the next prompts."""
    body = await service.read(PrefetchFields, request)
    check_texts(body.texts, "texts")
    overrides = overrides_of(engine, body.ragkv)
    load = partial(engine.prefetch, for_next_answer=False, **overrides)
    await service.in_thread(load, body.texts)
    return Json({"prefetching": len(body.texts)}, status_code=202)


@router.get("/v1/chunks")
async def known(
    service: State,
    engine: Engine,
    text: str,
    sink: str | None = None,
    method: str | None = None,
) -> Response:
    """Return whether a chunk can be reused."""
    check_texts([text], "text")
    overrides = overrides_of(engine, ReuseFields(sink=sink, method=method))
    found = await service.in_thread(engine.contains, text, **overrides)
    return Json({"text_known": found})


@router.delete("/v1/chunks")
async def delete(request: Request, service: State, engine: Engine) -> Response:
    """Delete a chunk, or the chunks of one document only."""
    body = await service.read(DeletedFields, request)
    if (body.text is None) == (body.document is None):
        message = "Give either a text or a document."
        raise RefusedError(400, message, param="text", code="invalid_value")
    deleted = await service.in_thread(engine.forget, body.text, document=body.document)
    return Json({"deleted": deleted})


@router.post("/v1/route")
async def route(request: Request, service: State, engine: Engine) -> Response:
    """Return the routing key of chunks."""
    del engine  # only the client's key is checked
    body = await service.read(RouteFields, request)
    check_texts(body.texts, "texts")
    return Json({"route": route_of(body.texts)})
