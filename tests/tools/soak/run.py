"""The soak itself: alone, all together, through a restart, and alone again."""

import asyncio
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from ragkv_bench.speed.load.client import open_client
from soak.asking import NAMESPACES, KnownQuestion, ask, in_form, known_questions
from soak.clients import BUSY, Findings, Mischief
from soak.server import ServerProcess

RESTART_AT = 0.25
"""Share of the time after which the server is stopped and started: most samples come later."""
LONG_ANSWERS = 3
LONG_TOKENS = 100
QUIET_POLLS = 300
UNDER_WAY = ("ragkv:num_requests_running", "ragkv:num_requests_waiting")
REQUEST_S = 320.0


@dataclass(frozen=True)
class SoakPlan:
    """How long and how hard; ``rss_tolerance`` is the growth of the last third's median."""

    seconds: float = 600.0
    clients: int = 16
    questions: int = 12
    chunk_tokens: int = 120
    max_tokens: int = 32
    seed: int = 0
    disk_bytes: int = 256 << 20
    rss_tolerance: float = 0.1


@dataclass
class Soak:
    """A soak under way."""

    plan: SoakPlan
    url: str
    server: ServerProcess | None = None
    say: Callable[[str], None] = lambda _: None
    findings: Findings = field(default_factory=Findings)
    rss: list[int] = field(default_factory=list)
    down: bool = False
    over: bool = False
    busy: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared while clients begin nothing new."""

    async def run(self) -> None:
        """Do everything; what is wrong is in ``findings.violations``."""
        plan = self.plan
        questions, documents = known_questions(
            plan.questions, plan.seed, chunk_tokens=plan.chunk_tokens, max_tokens=plan.max_tokens
        )
        mischief = Mischief(self.url, questions, documents, self.findings, random.Random(plan.seed))
        async with self._client() as client:
            for question in questions:
                found = await ask(client, question.body())
                if not found.ended:
                    raise RuntimeError(f"a question was not answered before the soak: {found}")
                question.learn(found)
            self.say(f"{len(questions)} questions answered alone")
            await self._all_together(mischief)
            await self._quiet(client, mischief)

    def _client(self) -> httpx.AsyncClient:
        return open_client(self.url, api_key=NAMESPACES["soak"], timeout_s=REQUEST_S)

    async def _all_together(self, mischief: Mischief) -> None:
        self.busy.set()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self.plan.clients):
                tasks.create_task(self._one_client(mischief))
            await asyncio.sleep(self.plan.seconds * RESTART_AT)
            if self.server is not None:
                await self._restart(self.server, mischief)
            until = time.monotonic() + self.plan.seconds * (1 - RESTART_AT)
            while time.monotonic() < until:
                if self.server is not None:
                    self.rss.append(self.server.rss_bytes())
                await asyncio.sleep(max(self.plan.seconds / 300, 0.1))
            self.over = True

    async def _one_client(self, mischief: Mischief) -> None:
        deeds, weights = mischief.deeds()
        async with self._client() as client:
            while not self.over:
                await self.busy.wait()
                (deed,) = mischief.rng.choices(deeds, weights)
                down = self.down
                try:
                    await deed(client)
                except httpx.TransportError as error:
                    if not (down or self.down):
                        self.findings.violations.append(f"{deed.__name__}: {error!r}")
                if self.down:
                    await asyncio.sleep(0.5)  # refused, as everything is now

    async def _restart(self, server: ServerProcess, mischief: Mischief) -> None:
        """SIGTERM while answers run: they end whole, new ones get 503, the store serves again."""
        async with self._client() as client:
            self.busy.clear()
            begun = [asyncio.Event() for _ in range(LONG_ANSWERS)]
            pairs = zip(mischief.questions, begun, strict=False)
            running = [
                asyncio.create_task(self._long_answer(client, *pair, mischief)) for pair in pairs
            ]
            await asyncio.gather(*(each.wait() for each in begun))
            self.down = True
            server.terminate()
            self.busy.set()
            await self._until_refused(client, mischief.questions[0])
            if all(each.done() for each in running):
                self.findings.counts["answers ended before the refusal"] += 1
            await asyncio.gather(*running)
        code = await server.wait()
        if code != 0:
            self.findings.violations.append(f"after SIGTERM the server ended with {code}")
        seconds = await server.start()
        self.down = False
        self.say(f"stopped and started again on its store in {seconds:.1f} s")

    async def _long_answer(
        self,
        client: httpx.AsyncClient,
        question: KnownQuestion,
        begun: asyncio.Event,
        mischief: Mischief,
    ) -> None:
        body = question.body() | {"max_tokens": LONG_TOKENS, "ignore_eos": True}
        found = await ask(client, body, stop=lambda _: bool(begun.set()))
        while found.status == httpx.codes.SERVICE_UNAVAILABLE:
            await asyncio.sleep(0.05)
            found = await ask(client, body, stop=lambda _: bool(begun.set()))
        begun.set()
        self.findings.add("long answer", found.status, {200}, found.error)
        if not found.ended or len(found.tokens) != LONG_TOKENS:
            self.findings.violations.append(
                f"SIGTERM cut an answer after {len(found.tokens)} tokens: {found.error}"
            )
        mischief.check(question, found.tokens[: len(question.alone)])

    async def _until_refused(self, client: httpx.AsyncClient, question: KnownQuestion) -> None:
        """Ask until the server says that it stops; it has to say so before it is gone."""
        while True:
            try:
                found = await ask(client, question.body())
            except httpx.TransportError as error:
                self.findings.violations.append(f"gone before it refused: {error!r}")
                return
            self.findings.add("after SIGTERM", found.status, {200} | BUSY, found.error)
            if in_form(found.error) and found.error["error"]["code"] == "draining":
                self.findings.counts["refused while stopping"] += 1
                return

    async def _quiet(self, client: httpx.AsyncClient, mischief: Mischief) -> None:
        """Nothing is under way any more, and every answer is what it was."""
        for _ in range(QUIET_POLLS):
            lines = (await client.get("/metrics")).text.splitlines()
            busy = [
                line for line in lines if line.startswith(UNDER_WAY) and float(line.split()[-1])
            ]
            if not busy:
                break
            await asyncio.sleep(0.1)
        else:
            self.findings.violations.append(f"still under way: {busy}")
        for question in mischief.questions:
            mischief.check(question, (await ask(client, question.body())).tokens)
        if self.server is not None:
            await self._stop(self.server)

    async def _stop(self, server: ServerProcess) -> None:
        server.terminate()
        if (code := await server.wait()) != 0:
            self.findings.violations.append(f"at the end the server ended with {code}")
        if left := server.leftovers():
            self.findings.violations.append(f"processes are left over in groups {left}")
        growth = self.growth()
        if growth is not None and growth > self.plan.rss_tolerance:
            self.findings.violations.append(f"memory grew by {growth:.0%} from third to third")

    def growth(self) -> float | None:
        """Return the last third's median memory over the middle third's, less 1."""
        third = len(self.rss) // 3
        if not third:
            return None
        middle, last = self.rss[third : 2 * third], self.rss[2 * third :]
        return statistics.median(last) / statistics.median(middle) - 1


async def soak(
    plan: SoakPlan,
    folder: Path,
    *,
    url: str | None = None,
    model: str | None = None,
    dtype: str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Soak:
    """Soak a server: the one at ``url``, or one that is started in ``folder``.

    A server at ``url`` has the namespaces and keys of ``soak.asking``; it is not restarted, and
    its memory is not looked at.
    """
    if url is not None:
        found = Soak(plan, url, say=say)
        await found.run()
        return found
    server = ServerProcess(folder, model, dtype, plan.disk_bytes)
    try:
        await server.start()
        found = Soak(plan, server.url, server, say)
        await found.run()
    finally:
        server.leftovers()
    return found
