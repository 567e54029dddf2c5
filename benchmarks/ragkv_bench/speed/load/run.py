"""``ragkv bench serve`` as a function: probe, precompute, warm up, measure.

Requests come in a closed loop by clients, or in an open one by a rate.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import platform
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import httpx

from ragkv.errors import ConfigError
from ragkv_bench.speed.load.client import ServedAnswer, ask, open_client
from ragkv_bench.speed.load.endpoint import Endpoint, precompute, probe
from ragkv_bench.speed.load.result import rows_of
from ragkv_bench.speed.load.workload import Dialogue, Workload


@dataclass(frozen=True, slots=True)
class LoadShape:
    """How requests come: ``clients`` in turn each, or ``rate`` a second whatever is answered."""

    clients: int | None = None
    rate: float | None = None
    answer_tokens: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.clients is None) == (self.rate is None):
            raise ConfigError("give one of --clients (closed loop) and --rate (open loop)")
        if self.clients is not None and self.clients < 1:
            raise ConfigError(f"--clients must be at least 1, not {self.clients}")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise ConfigError(f"--rate must be above 0, not {self.rate}")
        if self.answer_tokens < 1:
            raise ConfigError(f"--answer-tokens must be at least 1, not {self.answer_tokens}")


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
) -> dict[str, Any]:
    """Measure an endpoint under a workload.

    Returns its name, the shape, seconds, ``rows`` as :mod:`ragkv_bench.speed.load.result` makes
    them, and the ``setup``. The first ``warm_up`` requests come from one client and are not
    counted; ``on_answer`` is called after them, too.

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
    trace = json.dumps(asdict(workload), sort_keys=True).encode()
    return {
        "name": name or url,
        "clients": shape.clients,
        "rate": shape.rate,
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
            "answer_tokens": shape.answer_tokens,
            "seed": shape.seed,
            "fields": sorted(endpoint.extra),
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "httpx": version("httpx"),
        },
    }


def arrivals(workload: Workload, rate: float, seed: int) -> list[float]:
    """Return the second at which each conversation begins: Poisson, ``rate`` requests a second.

    Later turns begin when the former one was answered, so conversations come at the rate over
    their mean number of turns.
    """
    rng = random.Random(seed)  # noqa: S311  seeded, not secret
    per_second = rate * len(workload.dialogues) / workload.requests
    times, at = [], 0.0
    for _ in workload.dialogues:
        times.append(at)
        at += rng.expovariate(per_second)
    return times


async def run_load(
    client: httpx.AsyncClient,
    endpoint: Endpoint,
    workload: Workload,
    shape: LoadShape,
    on_answer: Callable[[ServedAnswer], None] = lambda _: None,
) -> tuple[list[ServedAnswer], float]:
    """Return an answer a request, as they ended, and seconds from the first start to the last end.

    A conversation ends at its first error.
    """
    answers: list[ServedAnswer] = []
    start = time.perf_counter()

    async def converse(dialogue: Dialogue, planned: float | None = None) -> None:
        said: list[str] = []
        for turn in range(len(dialogue.questions)):
            since = planned if planned is not None else time.perf_counter()
            body = endpoint.body(dialogue.messages(said), shape.answer_tokens)
            answer = await ask(client, body, since=since)
            answer.turn, answer.started_s, planned = turn, since - start, None
            answers.append(answer)
            on_answer(answer)
            if answer.error is not None:
                return
            said.append(answer.text)

    async def take_turns(left: Iterator[Dialogue]) -> None:
        for dialogue in left:
            await converse(dialogue)

    async with asyncio.TaskGroup() as tasks:
        if shape.rate is None:
            left = iter(workload.dialogues)
            for _ in range(shape.clients or 1):
                tasks.create_task(take_turns(left))
        else:
            begins = arrivals(workload, shape.rate, shape.seed)
            for dialogue, begin in zip(workload.dialogues, begins, strict=True):
                await asyncio.sleep(start + begin - time.perf_counter())
                tasks.create_task(converse(dialogue, start + begin))
    return answers, time.perf_counter() - start
