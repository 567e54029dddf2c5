"""The state of an engine: its model, its requests and its memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
        Numbers of the model's running requests, and of those that wait for a turn.
    max_running
        The limit of running requests.
    tiers
        Bytes and hits of each tier, of the history and of versions.
    healed_tokens
        Number of tokens that were computed exactly while no request ran.
    """

    running: int
    waiting: int
    max_running: int
    tiers: tuple[TierUse, ...] = ()
    healed_tokens: int = 0


def info_of(loaded: LoadedModel, reuse: Reuse | None) -> ModelInfo:
    """Return the facts of an engine's model; without ``reuse`` it has no fingerprint."""
    digest = None if reuse is None else reuse.corpus.sinks.fingerprint.digest
    template = bool(loaded.tokenizer.chat_template)
    config = getattr(loaded.model, "generation_config", None)
    return ModelInfo(loaded.name, digest, loaded.positions, loaded.unsupported, template, config)


def status_of(requests: RequestQueue, reuse: Reuse | None) -> EngineStatus:
    """Return an engine's state at this moment."""
    status = EngineStatus(requests.running, requests.waiting, requests.max_running)
    if reuse is None:
        return status
    return replace(status, tiers=reuse.tiers, healed_tokens=reuse.healing.tokens)
