"""What clients do to the server, well-behaved and otherwise."""

import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import httpx

from ragkv_bench.speed.load.client import CHAT
from ragkv_bench.speed.load.workload import SourceDocument
from soak.asking import NAMESPACES, KnownQuestion, ask, in_form

BUSY = {503, 504}
"""The queue is full or the server stops, and the deadline."""
OVERSIZED = 17 << 20
_RAW = """
import socket, sys
address, request = sys.argv[1].split(":"), sys.stdin.buffer.read()
connection = socket.create_connection((address[0], int(address[1])))
connection.sendall(request)
connection.recv(1)
print(flush=True)
connection.recv(1 << 30)
sys.stdin.read()
import time
time.sleep(600)
"""
_MALFORMED = (
    *(b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"messages": 1}'),
    *(b'{"model": "default", "messages": []}', b'{"messages": [{"role": "user"}], "n": NaN}'),
    b'{"messages": [{"role": "user", "content": "a"}], "temperature": "hot"}',
)


@dataclass
class Findings:
    """Counts of what was done and answered, and every violation."""

    counts: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    def add(self, what: str, status: int, expected: set[int], error: object = None) -> None:
        """Count a status; one that is not expected, or an error in another form, is wrong."""
        self.statuses[f"{what} {status}"] += 1
        if status not in expected:
            self.violations.append(f"{what}: status {status}: {str(error)[:300]}")
        elif status >= 400 and not in_form(error):
            self.violations.append(f"{what}: error {status} has another form: {str(error)[:300]}")


@dataclass
class Mischief:
    """The deeds of clients; each is a method that counts what came of it."""

    url: str
    questions: Sequence[KnownQuestion]
    documents: Sequence[SourceDocument]
    findings: Findings
    rng: random.Random
    unique: int = 0

    def deeds(self) -> tuple[list[Callable[[httpx.AsyncClient], Awaitable[None]]], list[int]]:
        """Return what clients do, and how often of each."""
        each = {
            self.answer: 12,
            self.cancel: 4,
            self.killed: 1,
            self.oversized: 1,
            self.wrong_key: 1,
            self.malformed: 2,
            self.unknown_model: 1,
            self.precompute: 2,
            self.delete: 1,
            self.fill: 3,
            self.look: 1,
        }
        return list(each), list(each.values())

    async def answer(self, client: httpx.AsyncClient) -> None:
        question = self.rng.choice(self.questions)
        found = await ask(client, question.body())
        self.findings.add("answer", found.status, {200} | BUSY, found.error)
        if found.status != httpx.codes.OK:
            return
        if found.error is not None:
            code = found.error["error"]["code"] if in_form(found.error) else found.error
            self.findings.counts[f"stream ended: {code}"] += 1
            if code != "timeout":
                self.findings.violations.append(f"a stream ended with {code}")
        elif not found.ended:
            self.findings.violations.append("a stream ended without [DONE]")
        else:
            self.check(question, found.tokens)

    def check(self, question: KnownQuestion, tokens: list) -> None:
        """Compare an answer with the one got alone."""
        compared = question.compare(tokens)
        if compared in {"same", "near-tie"}:
            self.findings.counts[compared] += 1
        else:
            self.findings.counts["wrong"] += 1
            self.findings.violations.append(f"a wrong answer: {compared}")

    async def cancel(self, client: httpx.AsyncClient) -> None:
        leave = self.rng.randint(0, 8)
        body = self.rng.choice(self.questions).body() | {"max_tokens": 64, "ignore_eos": True}
        found = await ask(client, body, stop=lambda seen: seen > leave)
        self.findings.add("cancel", found.status, {200} | BUSY, found.error)

    async def killed(self, _: httpx.AsyncClient) -> None:
        """A client process that ends by SIGKILL while its answer comes."""
        body = json.dumps(self.rng.choice(self.questions).body()).encode()
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {NAMESPACES['soak']}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-S", "-c", _RAW, self.url.removeprefix("http://")),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(head.encode() + body)
            process.stdin.close()
            await process.stdout.readline()
            self.findings.counts["killed clients"] += 1
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def oversized(self, client: httpx.AsyncClient) -> None:
        """The server may close the connection before it has read everything."""
        try:
            response = await client.post(
                CHAT, content=b"{" + b" " * OVERSIZED, headers={"Content-Type": "application/json"}
            )
        except (httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError):
            self.findings.counts["oversized: connection closed"] += 1
        else:
            self._add("oversized", response, {413})

    async def wrong_key(self, client: httpx.AsyncClient) -> None:
        headers = {"Authorization": f"Bearer {self.rng.choice(['no', 'wrong', 'key-of-sok'])}"}
        body = self.rng.choice(self.questions).body()
        self._add("wrong key", await client.post(CHAT, json=body, headers=headers), {401})

    async def malformed(self, client: httpx.AsyncClient) -> None:
        response = await client.post(
            CHAT, content=self.rng.choice(_MALFORMED), headers={"Content-Type": "application/json"}
        )
        self._add("malformed", response, {400})

    async def unknown_model(self, client: httpx.AsyncClient) -> None:
        body = self.rng.choice(self.questions).body() | {"model": "another"}
        self._add("unknown model", await client.post(CHAT, json=body), {404})

    async def precompute(self, client: httpx.AsyncClient) -> None:
        document = self.rng.choice(self.documents)
        body = {"texts": list(document.chunks), "document": document.name}
        response = await client.post("/v1/chunks", json=body)
        self._add("precompute", response, {200} | BUSY)

    async def delete(self, client: httpx.AsyncClient) -> None:
        body = {"document": self.rng.choice(self.documents).name}
        response = await client.request("DELETE", "/v1/chunks", json=body)
        self._add("delete", response, {200} | BUSY)

    async def fill(self, client: httpx.AsyncClient) -> None:
        """Chunks that nobody asks about, in both namespaces."""
        self.unique += 1
        texts = [f"{self.unique} {part} " + "filling the store " * 20 for part in range(8)]
        key = self.rng.choice(list(NAMESPACES.values()))
        response = await client.post(
            "/v1/chunks", json={"texts": texts}, headers={"Authorization": f"Bearer {key}"}
        )
        self._add("fill", response, {200} | BUSY)

    async def look(self, client: httpx.AsyncClient) -> None:
        path = self.rng.choice(["/health", "/metrics", "/v1/models", "/version"])
        self._add("look", await client.get(path), {200, 503})

    def _add(self, what: str, response: httpx.Response, expected: set[int]) -> None:
        error = None
        if response.is_error:
            try:
                error = response.json()
            except ValueError:
                error = response.text
        # a server that stops refuses everything with 503
        self.findings.add(what, response.status_code, expected | {503}, error)
