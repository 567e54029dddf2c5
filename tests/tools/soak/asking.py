"""Questions with a known answer, and the comparison with what comes under load."""

import json
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from ragkv_bench.speed.load.client import CHAT, events
from ragkv_bench.speed.load.workload import (
    SourceDocument,
    WorkloadPlan,
    draw_workload,
    language_reference,
)

NAMESPACES = {"soak": "key-of-soak", "other": "key-of-other"}


@dataclass(frozen=True)
class Tolerance:
    """What rounding can do to an answer, in log-probability."""

    near_tie: float
    """Lead of the best token below which another can be chosen."""
    mean_change: float
    """Mean change of the leads of ``COMPARED`` equal tokens or more."""


COMPARED = 8
"""Fewest equal tokens whose changes are averaged."""
IN_FLOAT32 = Tolerance(near_tie=1e-3, mean_change=1e-3)
QUANTISED = Tolerance(near_tie=0.5, mean_change=0.15)
"""Products rounded to bfloat16; a step's rows decide which weights it multiplies by.

SmolLM2's leads differed from float32's by 0.03 on average, and for one token of 100 by 0.11 or more
(571 tokens, an Intel Xeon with AMX); by at most 0.15 with attention in float32, and 0.27 in
bfloat16. Under load they differed by at most 0.36, those of an answer by at most 0.08 on average
(310 answers). In float32 a lead changed by 4e-5.
"""
EXACT = {"recompute_ratio": 1.0}
"""At ratio 1 an answer is the full prefill's, whichever chunks are found in the store."""


@dataclass(frozen=True)
class Token:
    text: str
    lead: float
    """Over the second-best token, in log-probability."""


@dataclass
class Answered:
    """What a request gave: its status, tokens, and the error in its body or stream."""

    status: int
    tokens: list[Token] = field(default_factory=list)
    error: Any = None
    ended: bool = False
    report: dict[str, Any] = field(default_factory=dict)


@dataclass
class KnownQuestion:
    messages: list[dict[str, str]]
    max_tokens: int
    alone: list[Token] = field(default_factory=list)
    tolerance: Tolerance = IN_FLOAT32

    def learn(self, alone: Answered) -> None:
        """Take the answer that comes when nothing else runs, and the tolerance of its arithmetic."""
        self.alone = alone.tokens
        if "quantised" in alone.report["dtype"]:
            self.tolerance = QUANTISED

    def body(self) -> dict[str, Any]:
        return {
            "model": "default",
            "messages": self.messages,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "stream": True,
            "logprobs": True,
            "top_logprobs": 2,
            "ragkv": {**EXACT, "report": True},
        }

    def compare(self, tokens: list[Token]) -> str:
        """Return ``same``, ``near-tie``, or what is different."""
        pairs = list(zip(self.alone, tokens, strict=False))
        at = next((n for n, (a, b) in enumerate(pairs) if a.text != b.text), len(pairs))
        changes = [abs(a.lead - b.lead) for a, b in pairs[:at]]
        if at >= COMPARED and (change := statistics.fmean(changes)) > self.tolerance.mean_change:
            return f"leads of {at} equal tokens differ by {change:.3g}"
        if at == len(self.alone) == len(tokens):
            return "same"
        lead = self.alone[at].lead if at < len(self.alone) else float("inf")
        if lead < self.tolerance.near_tie:
            return "near-tie"
        return f"token {at} of {len(self.alone)}, which led by {lead:.3g}, is another"


async def ask(
    client: httpx.AsyncClient,
    body: dict[str, Any],
    *,
    stop: Callable[[int], bool] = lambda _: False,
) -> Answered:
    """Post a streaming chat request; close the connection where ``stop(events so far)``."""
    async with client.stream("POST", CHAT, json=body) as response:
        found = Answered(response.status_code)
        if response.status_code != httpx.codes.OK:
            found.error = _json(await response.aread())
            return found
        seen = 0
        async for event in events(response):
            seen += 1
            if event is None:
                found.ended = found.error is None
                break
            found.error = event if "error" in event else found.error
            found.report = event.get("ragkv", found.report)
            for choice in event.get("choices", ()):
                content = (choice.get("logprobs") or {}).get("content") or ()
                found.tokens += [_token(each) for each in content]
            if stop(seen):
                break
        return found


def _token(content: dict[str, Any]) -> Token:
    leads = sorted((each["logprob"] for each in content["top_logprobs"]), reverse=True)
    return Token(content["token"], leads[0] - leads[1])


def _json(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return raw[:200]


def in_form(error: Any) -> bool:
    """Whether a body is an error as OpenAI's API has them."""
    inner = error.get("error") if isinstance(error, dict) else None
    return (
        isinstance(inner, dict)
        and set(inner) == {"message", "type", "param", "code"}
        and isinstance(inner["message"], str)
        and isinstance(inner["type"], str)
    )


def known_questions(
    count: int, seed: int, *, chunk_tokens: int, max_tokens: int
) -> tuple[list[KnownQuestion], list[SourceDocument]]:
    """Return questions over shared documents, some of them later turns, and the documents."""
    plan = WorkloadPlan(count, documents=8, chunks_per_prompt=4, turns=0.3, seed=seed)
    workload = draw_workload(plan, language_reference(chunk_tokens, 2))
    rng = random.Random(seed)
    found = []
    for dialogue in workload.dialogues:
        said = [f"It says {n}." for n in range(len(dialogue.questions) - 1)]
        length = rng.randint(max_tokens // 2, max_tokens)
        found.append(KnownQuestion(dialogue.messages(said), length))
    return found, list(workload.documents)
