"""Questions with a known answer, and the comparison with what comes under load."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import torch

from ragkv_bench.speed.load.client import CHAT, events
from ragkv_bench.speed.load.workload import (
    SourceDocument,
    WorkloadPlan,
    draw_workload,
    language_reference,
)

NAMESPACES = {"soak": "key-of-soak", "other": "key-of-other"}
NEAR_TIE = 1e-3
"""Lead of the best token, in log-probability, below which rounding can choose another."""
NEAR_TIE_QUANTISED = torch.finfo(torch.bfloat16).eps * 40
"""The same with quantised products, which are rounded to bfloat16.

A step of up to 8 rows multiplies by 4-bit weights, a larger one by bfloat16 weights, so an answer's
rounding depends on the answers beside it. SmolLM2's largest logit was 39.75 in comparisons of
steps and passes; the lead changed by 0 in up to 8 rows and by at most 0.25 in more (an AMD EPYC,
fda035d). In float32 it changed by 4e-5.
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
    near_tie: float = NEAR_TIE

    def learn(self, alone: Answered) -> None:
        """Take the answer that comes when nothing else runs, and the bound of its arithmetic."""
        self.alone = alone.tokens
        if "quantised" in alone.report["dtype"]:
            self.near_tie = NEAR_TIE_QUANTISED

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
        pairs = zip(self.alone, tokens, strict=False)
        at = next((n for n, (a, b) in enumerate(pairs) if a.text != b.text), None)
        if at is None:
            if len(self.alone) == len(tokens):
                return "same"
            at = min(len(self.alone), len(tokens))
        lead = self.alone[at].lead if at < len(self.alone) else float("inf")
        if lead < self.near_tie:
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
