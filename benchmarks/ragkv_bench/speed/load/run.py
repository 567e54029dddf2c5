"""Run a workload against an endpoint: closed loop by clients, open loop by a rate."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx

from ragkv.errors import ConfigError
from ragkv_bench.speed.load.answer import ServedAnswer
from ragkv_bench.speed.load.client import ask
from ragkv_bench.speed.load.endpoint import Endpoint
from ragkv_bench.speed.load.workload import Dialogue, Workload, messages_of


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
    """Ask everything in the workload.

    Parameters
    ----------
    on_answer
        Called after each request.

    Returns
    -------
    tuple
        An answer a request, in the order in which they ended, and seconds from the start of the
        first request to the end of the last. A conversation ends at its first error.
    """
    answers: list[ServedAnswer] = []
    start = time.perf_counter()

    async def converse(dialogue: Dialogue, planned: float | None = None) -> None:
        said: list[str] = []
        for turn in range(len(dialogue.questions)):
            since = planned if planned is not None else time.perf_counter()
            body = endpoint.body(messages_of(dialogue, said), shape.answer_tokens)
            answer = await ask(client, body, since=since)
            answer.turn, answer.started_s, planned = turn, since - start, None
            answers.append(answer)
            on_answer(answer)
            if answer.error is not None:
                return
            said.append(answer.text)

    if shape.rate is None:
        left = iter(workload.dialogues)

        async def work() -> None:
            for dialogue in left:
                await converse(dialogue)

        await asyncio.gather(*(work() for _ in range(shape.clients or 1)))
    else:
        planned = [start + at for at in arrivals(workload, shape.rate, shape.seed)]
        async with asyncio.TaskGroup() as tasks:
            for dialogue, at in zip(workload.dialogues, planned, strict=True):
                await asyncio.sleep(at - time.perf_counter())
                tasks.create_task(converse(dialogue, at))
    return answers, time.perf_counter() - start
