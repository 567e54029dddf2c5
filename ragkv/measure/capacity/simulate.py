"""Replay a retrieval trace against the policies, to see which would have served it best.

A trace is a JSONL file with one request a line, in the order of time::

    {"t": 12.5, "chunks": [{"id": "a", "tokens": 400}, {"id": "b", "tokens": 380}]}

``t`` (seconds) and other fields are ignored, and ``tokens`` defaults to 400. A line may also be
just a list of ids. A chunk that a request has twice counts once.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ragkv.errors import ConfigError
from ragkv.store.tiers.admission import Admission
from ragkv.store.tiers.policies import Policy, make_policy

DEFAULT_TOKENS = 400


class Wanted(NamedTuple):
    """A chunk of a request: a number for its id, and its tokens."""

    chunk: int
    tokens: int = DEFAULT_TOKENS


Request = Sequence[Wanted]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one policy made of a trace.

    Attributes
    ----------
    hit_rate, token_hit_rate
        Share of the chunks, and of their tokens, that were in the tier when requested.
    saved_s, saved
        Seconds of prefill that the hits saved, and their share of all prefill seconds.
    evictions, refused
        Evicted entries, and entries that were not admitted.
    """

    policy: str
    hit_rate: float
    token_hit_rate: float
    saved_s: float
    saved: float
    evictions: int
    refused: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON-ready types."""
        return asdict(self)


def read_trace(path: str | Path) -> list[Request]:
    """Read a trace.

    Raises
    ------
    ConfigError
        The file cannot be read or has a line that is no request; the message says which.
    """
    numbers: dict[str, int] = {}
    requests: list[Request] = []
    try:
        lines = Path(path).read_bytes().removeprefix(codecs.BOM_UTF8).splitlines()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
            requests.append(
                _request(found["chunks"] if isinstance(found, dict) else found, numbers)
            )
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ConfigError(
                f"{path}, line {number}, is no request: {error!r}. It must be "
                '{"t": 0.0, "chunks": [{"id": "a", "tokens": 400}]} or ["a", "b"]'
            ) from error
    if not requests:
        raise ConfigError(f"{path} has no requests")
    return requests


def _request(chunks: Any, numbers: dict[str, int]) -> Request:
    if not isinstance(chunks, list):
        raise TypeError("the chunks are no list")
    wanted = [_wanted(chunk, numbers) for chunk in chunks]
    return list({each.chunk: each for each in wanted}.values())


def _wanted(chunk: Any, numbers: dict[str, int]) -> Wanted:
    fields = chunk if isinstance(chunk, dict) else {"id": chunk}
    number = numbers.setdefault(str(fields["id"]), len(numbers))
    tokens = int(fields.get("tokens", DEFAULT_TOKENS))
    if tokens < 1:
        raise ValueError("tokens must be at least 1")
    return Wanted(number, tokens)


def zipf_trace(
    chunks: int = 10_000, requests: int = 20_000, seed: int = 0, per_request: int = 4
) -> list[Request]:
    """Draw a trace in which 3% of the chunks take 60% of the requests.

    That is what RAGCache found in its data sets (arXiv 2404.12457, section 3.2). Popularity
    falls as a power of the rank, with the exponent that gives these shares. Chunks have 64 to
    1024 tokens.

    Parameters
    ----------
    per_request
        Different chunks in a request.
    """
    for name, value, least in (
        ("chunks", chunks, 100),
        ("requests", requests, 1),
        ("per_request", per_request, 1),
    ):
        if value < least:
            raise ConfigError(f"zipf: {name} must be at least {least}, not {value}")
    draw = np.random.default_rng(seed)
    popularity = _popularity(chunks)
    tokens = draw.integers(64, 1025, chunks)
    numbers = draw.permutation(chunks)
    picks = draw.choice(chunks, size=(requests, per_request), p=popularity)
    return [
        [Wanted(int(numbers[rank]), int(tokens[rank])) for rank in dict.fromkeys(row.tolist())]
        for row in picks
    ]


def _popularity(chunks: int, top: float = 0.03, share: float = 0.6) -> Any:
    """Return ``[chunks]`` probabilities, by bisection over the exponent of Zipf's law."""
    ranks = np.arange(1, chunks + 1, dtype=np.float64)
    low, high = 0.0, 4.0
    for _ in range(60):
        weights = ranks ** -((low + high) / 2)
        weights /= weights.sum()
        if weights[: max(1, round(top * chunks))].sum() < share:
            low = (low + high) / 2
        else:
            high = (low + high) / 2
    return weights


def simulate(
    trace: Iterable[Request],
    policy: str,
    budget: int,
    *,
    bytes_per_token: int,
    costs: Callable[[int, int], float],
    admission: bool = False,
) -> Outcome:
    """Replay a trace against one tier.

    A request's hits are read, the rest is computed behind them and offered to the tier.

    Parameters
    ----------
    budget
        Bytes of the tier.
    costs
        Seconds of a prefill of ``(cached, new)`` tokens.
    admission
        Let chunks in as the tiers of a store do (:mod:`ragkv.store.tiers.admission`).
    """
    tier = _Tier(make_policy(policy), budget, bytes_per_token, admission=admission)
    wanted = hits = wanted_tokens = hit_tokens = 0
    spent = full = 0.0
    for request in trace:
        missed = [chunk for chunk in request if not tier.has(chunk)]
        tokens, new = sum(c.tokens for c in request), sum(c.tokens for c in missed)
        seconds = costs(tokens - new, new) if new else 0.0
        full += costs(0, tokens)
        spent += seconds
        for chunk in missed:
            tier.offer(chunk, seconds * chunk.tokens / new, chunk.tokens)
        wanted, hits = wanted + len(request), hits + len(request) - len(missed)
        wanted_tokens, hit_tokens = wanted_tokens + tokens, hit_tokens + tokens - new
    return Outcome(
        policy=policy,
        hit_rate=hits / max(1, wanted),
        token_hit_rate=hit_tokens / max(1, wanted_tokens),
        saved_s=full - spent,
        saved=(full - spent) / full if full else 0.0,
        evictions=tier.evictions,
        refused=tier.refused,
    )


class _Tier:
    """A tier without entries: who would be in it."""

    def __init__(
        self, policy: Policy, budget: int, bytes_per_token: int, *, admission: bool
    ) -> None:
        self.evictions = self.refused = 0
        self._policy, self._budget, self._bytes = policy, budget, bytes_per_token
        self._admission = Admission() if admission else None

    def has(self, wanted: Wanted) -> bool:
        """Ask for a chunk."""
        if self._admission is not None:
            self._admission.count(wanted.chunk, len(self._policy))
        held = wanted.chunk in self._policy
        if held:
            self._policy.hit(wanted.chunk)
        return held

    def offer(self, wanted: Wanted, seconds: float, tokens: int) -> None:
        """Let a chunk in that was missed and computed, if it may."""
        nbytes = wanted.tokens * self._bytes
        victims = self._policy.victims(self._policy.nbytes + nbytes - self._budget)
        refused = self._admission is not None and not self._admission.admits(wanted.chunk, victims)
        if nbytes > self._budget or (victims and refused):
            self.refused += 1
            return
        for victim in victims:
            self._policy.evict(victim)
        self.evictions += len(victims)
        self._policy.insert(wanted.chunk, nbytes, seconds, tokens)
