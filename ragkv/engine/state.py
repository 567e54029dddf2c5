"""The state of an engine: its model, its requests and its memory."""

from __future__ import annotations

from dataclasses import dataclass

from ragkv.answer.engine import ModelInfo
from ragkv.engine.reuse import Reuse
from ragkv.model.loaded import LoadedModel
from ragkv.schedule.requests import RequestQueue
from ragkv.store.types import TierUse


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """An engine at one moment.

    Attributes
    ----------
    running, waiting
        Numbers of requests of the model that have begun and not ended, and that wait for a turn.
    tiers
        Bytes and hits of each tier, of the history and of versions.
    healed_tokens
        Number of tokens that were computed exactly while no request ran.
    """

    running: int
    waiting: int
    tiers: tuple[TierUse, ...]
    healed_tokens: int = 0


def info_of(loaded: LoadedModel, reuse: Reuse | None) -> ModelInfo:
    """Return the facts of an engine's model; without ``reuse`` it has no fingerprint."""
    digest = None if reuse is None else reuse.corpus.sinks.fingerprint.digest
    return ModelInfo(
        loaded.name,
        digest,
        loaded.positions,
        loaded.unsupported,
        bool(loaded.tokenizer.chat_template),
        getattr(loaded.model, "generation_config", None),
    )


def status_of(requests: RequestQueue, reuse: Reuse | None) -> EngineStatus:
    """Return an engine's state at this moment."""
    if reuse is None:
        return EngineStatus(requests.running, requests.waiting, ())
    return EngineStatus(requests.running, requests.waiting, reuse.tiers, reuse.healing.tokens)
