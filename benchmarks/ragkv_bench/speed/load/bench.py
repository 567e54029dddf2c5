"""``ragkv bench serve`` as a function: probe, precompute, warm up, measure."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from ragkv_bench.speed.load.answer import ServedAnswer
from ragkv_bench.speed.load.endpoint import Endpoint, open_client, precompute, probe
from ragkv_bench.speed.load.result import LoadResult, rows_of
from ragkv_bench.speed.load.run import LoadShape, run_load
from ragkv_bench.speed.load.workload import Workload


async def bench_serve(
    url: str,
    workload: Workload,
    shape: LoadShape,
    *,
    name: str | None = None,
    model: str | None = None,
    api_key: str | None = None,
    timeout_s: float = 600.0,
    warm_up: int = 0,
    with_precompute: bool = True,
    ignore_eos: bool = True,
    on_answer: Callable[[ServedAnswer], None] = lambda _: None,
) -> LoadResult:
    """Measure an endpoint under a workload.

    Parameters
    ----------
    name
        What tables call the endpoint; by default its URL.
    warm_up
        So many requests come first, from one client, and are not counted.
    with_precompute
        Post the documents' chunks to ``/v1/chunks`` before the run, where that exists.
    ignore_eos
        Ask for answers of full length.
    on_answer
        Called after each request, those of the warm-up too.

    Raises
    ------
    PeerError
        The endpoint does not answer a plain chat request, or refuses chunks.
    ConfigError
        A warm-up of everything.
    """
    warming, measured = workload.split(warm_up)
    async with open_client(url, api_key=api_key, timeout_s=timeout_s) as client:
        endpoint = await probe(client, model=model, ignore_eos=ignore_eos)
        precompute_s = await precompute(client, workload.documents) if with_precompute else None
        one = LoadShape(clients=1, answer_tokens=shape.answer_tokens)
        await run_load(client, endpoint, warming, one, on_answer)
        answers, wall_s = await run_load(client, endpoint, measured, shape, on_answer)
    notes = [*endpoint.notes]
    if with_precompute and precompute_s is None:
        notes.append("/v1/chunks is not there: nothing was precomputed")
    if (missed := measured.requests - len(answers)) > 0:
        notes.append(f"{missed} later turns of conversations with an error were not asked")
    return LoadResult(
        name=name or url,
        clients=shape.clients,
        rate=shape.rate,
        wall_s=wall_s,
        precompute_s=precompute_s,
        rows=rows_of(answers, wall_s),
        setup={
            "url": url,
            "warm_up": warm_up,
            "notes": notes,
            **_setup(workload, endpoint, shape),
        },
    )


def _setup(workload: Workload, endpoint: Endpoint, shape: LoadShape) -> dict[str, Any]:
    """Return what figures depend on; the trace by a digest, which equal ones share."""
    trace = json.dumps(asdict(workload), sort_keys=True).encode()
    return {
        "model": endpoint.model,
        "trace": hashlib.sha256(trace).hexdigest()[:12],
        "requests": workload.requests,
        "conversations": len(workload.dialogues),
        "documents": len(workload.documents),
        "answer_tokens": shape.answer_tokens,
        "seed": shape.seed,
        "fields": sorted(endpoint.extra),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "httpx": version("httpx"),
    }
