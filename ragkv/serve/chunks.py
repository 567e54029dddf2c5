"""``/v1/chunks``: precompute, prefetch, look for and delete chunks; ``/v1/route``: their key."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import Field
from starlette.responses import Response

from ragkv.ingest.arguments import check_revision
from ragkv.retrieve.route import route_of
from ragkv.serve.body import Json, read_json
from ragkv.serve.engine_calls import overrides_of
from ragkv.serve.fields import Fields, ReuseFields, Texts, parse
from ragkv.serve.ingestion import IngestionJob
from ragkv.serve.refusal import RefusedError
from ragkv.serve.service import Engine, service_of

router = APIRouter()


class PrefetchFields(Fields):
    """The body of ``/v1/chunks/prefetch``."""

    texts: Texts
    ragkv: ReuseFields = ReuseFields()


class RouteFields(Fields):
    """The body of ``POST /v1/route``."""

    texts: Texts


class ChunkFields(PrefetchFields):
    """The body of ``POST /v1/chunks``."""

    document: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    revision: Annotated[str, Field(max_length=4096)] | None = None
    expires_in: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    wait: bool = True


class DeletedFields(Fields):
    """The body of ``DELETE /v1/chunks``."""

    text: str | None = None
    document: str | None = None


@router.post("/v1/chunks")
async def precompute(request: Request, engine: Engine) -> Response:
    """Encode chunks: 200 when that is done, 202 while it goes on."""
    service = service_of(request)
    body = parse(ChunkFields, await read_json(request, service.settings))
    service.check_chunks(body.texts, "texts")
    service.check_chunks([body.ragkv.sink or ""], "ragkv.sink")
    overrides = overrides_of(engine, body.ragkv)
    texts = list(dict.fromkeys(text.strip() for text in body.texts))
    named = body.document, check_revision(body.revision, body.document)
    job = IngestionJob(engine, texts, *named, body.expires_in, overrides)
    ended = service.ingestion.submit(job)
    if body.wait:
        await asyncio.wait({ended}, timeout=service.settings.timeout)
    if body.wait and job.failure is not None:
        raise job.failure
    return Json(job.to_dict(), status_code=200 if job.status == "done" else 202)


@router.post("/v1/chunks/prefetch")
async def prefetch(request: Request, engine: Engine) -> Response:
    """Begin to load chunks that the next prompts will contain."""
    service = service_of(request)
    body = parse(PrefetchFields, await read_json(request, service.settings))
    service.check_chunks(body.texts, "texts")
    service.check_chunks([body.ragkv.sink or ""], "ragkv.sink")
    overrides = overrides_of(engine, body.ragkv)
    load = partial(engine.prefetch, for_next_answer=False, **overrides)
    await service.in_thread(load, body.texts)
    return Json({"prefetching": len(body.texts)}, status_code=202)


@router.get("/v1/chunks")
async def known(
    request: Request,
    engine: Engine,
    text: str,
    sink: str | None = None,
    method: str | None = None,
) -> Response:
    """Say whether a chunk can be reused."""
    service = service_of(request)
    service.check_chunks([text, sink or ""], "text")
    overrides = overrides_of(engine, ReuseFields(sink=sink, method=method))
    found = await service.in_thread(engine.contains, text, **overrides)
    return Json({"text_known": found})


@router.get("/v1/chunks/{job_id}")
async def progress(request: Request, engine: Engine, job_id: str) -> Response:
    """Say how far a precomputation is."""
    return Json(service_of(request).ingestion.find(job_id, engine).to_dict())


@router.delete("/v1/chunks")
async def delete(request: Request, engine: Engine) -> Response:
    """Delete one chunk, or those of one document alone."""
    service = service_of(request)
    body = parse(DeletedFields, await read_json(request, service.settings))
    if (body.text is None) == (body.document is None):
        raise RefusedError(
            400, "Give either a text or a document.", param="text", code="invalid_value"
        )
    deleted = await service.in_thread(engine.forget, body.text, document=body.document)
    return Json({"deleted": deleted})


@router.get("/v1/route")
async def route(request: Request, engine: Engine, text: Annotated[list[str], Query()]) -> Response:
    """Return the routing key of chunks, each a ``text=`` of the address."""
    service_of(request).check_chunks(text, "text")
    return Json({"route": route_of(text, engine.namespace)})


@router.post("/v1/route")
async def route_of_many(request: Request, engine: Engine) -> Response:
    """Return the routing key of as many chunks as a body holds."""
    service = service_of(request)
    body = parse(RouteFields, await read_json(request, service.settings))
    service.check_chunks(body.texts, "texts")
    return Json({"route": route_of(body.texts, engine.namespace)})
