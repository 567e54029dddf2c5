"""``ragkv bench serve`` as a function: probe, precompute, warm up, measure."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import httpx

from ragkv.errors import ConfigError
from ragkv_bench.results import Found
from ragkv_bench.speed.load.client import ServedAnswer, ask, open_client
from ragkv_bench.speed.load.endpoint import Endpoint, precompute, probe
from ragkv_bench.speed.load.result import rows_of
from ragkv_bench.speed.load.workload import Dialogue, Workload


async def bench_serve(
    url: str,
    workload: Workload,
    *,
    clients: int,
    answer_tokens: int = 64,
    name: str | None = None,
    model: str | None = None,
    api_key: str | None = None,
    timeout_s: float = 600.0,
    warm_up: int = 0,
    on_answer: Callable[[ServedAnswer], None] = lambda _: None,
) -> Found:
    """Measure an endpoint under a workload: each client sends a request after each answer.

    Returns its name, the number of clients, seconds, ``rows`` as
    :mod:`ragkv_bench.speed.load.result` makes them, and the ``setup``. The first ``warm_up``
    requests come from one client and are not counted; ``on_answer`` is called after them, too.

    Raises PeerError: the endpoint does not answer a plain chat request, or refuses chunks;
    ConfigError: A number is below 1, or a warm-up of everything.
    """
    if min(clients, answer_tokens) < 1:
        raise ConfigError("--clients and --answer-tokens must be at least 1")
    warming, measured = workload.split(warm_up)
    async with open_client(url, api_key=api_key, timeout_s=timeout_s) as client:
        endpoint = await probe(client, model)
        precompute_s = await precompute(client, workload.documents)
        ask_all = partial(run_load, client, endpoint, answer_tokens=answer_tokens)
        await ask_all(warming, clients=1, on_answer=on_answer)
        answers, wall_s = await ask_all(measured, clients=clients, on_answer=on_answer)
    notes = [*endpoint.notes]
    if precompute_s is None:
        notes.append("/v1/chunks is not there: nothing was precomputed")
    if (missed := measured.requests - len(answers)) > 0:
        notes.append(f"{missed} later turns of conversations with an error were not sent")
    trace = json.dumps(asdict(workload), sort_keys=True).encode()
    return {
        "name": name or url,
        "clients": clients,
        "wall_s": wall_s,
        "precompute_s": precompute_s,
        "rows": rows_of(answers, wall_s),
        "setup": {
            "url": url,
            "warm_up": warm_up,
            "notes": notes,
            "model": endpoint.model,
            "trace": hashlib.sha256(trace).hexdigest()[:12],
            "requests": workload.requests,
            "conversations": len(workload.dialogues),
            "documents": len(workload.documents),
            "answer_tokens": answer_tokens,
            "fields": sorted(endpoint.extra),
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
        },
    }


async def run_load(
    client: httpx.AsyncClient,
    endpoint: Endpoint,
    workload: Workload,
    *,
    clients: int,
    answer_tokens: int,
    on_answer: Callable[[ServedAnswer], Any] = lambda _: None,
) -> tuple[list[ServedAnswer], float]:
    """Return an answer a request, as they ended, and seconds from the first start to the last end.

    A conversation ends at its first error.
    """
    answers: list[ServedAnswer] = []
    start = time.perf_counter()

    async def converse(dialogue: Dialogue) -> None:
        said: list[str] = []
        for turn in range(len(dialogue.questions)):
            answer = await ask(client, endpoint.body(dialogue.messages(said), answer_tokens))
            answer.turn = turn
            answers.append(answer)
            on_answer(answer)
            if answer.error is not None:
                return
            said.append(answer.text)

    async def take_turns(left: Iterator[Dialogue]) -> None:
        for dialogue in left:
            await converse(dialogue)

    async with asyncio.TaskGroup() as tasks:
        left = iter(workload.dialogues)
        for _ in range(clients):
            tasks.create_task(take_turns(left))
    return answers, time.perf_counter() - start
