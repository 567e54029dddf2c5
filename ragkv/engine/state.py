"""What an engine says of its model, its requests and its memory."""

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
        Requests over the model that have begun and not ended, and those that wait for their turn.
    tiers
        Bytes and hits of each tier, of history and of versions.
    healed_tokens
        Tokens of chunks that were computed exactly while no request ran.
    """

    running: int
    waiting: int
    tiers: tuple[TierUse, ...]
    healed_tokens: int = 0


def info_of(loaded: LoadedModel, reuse: Reuse | None) -> ModelInfo:
    """Return what is known of an engine's model; without ``reuse``, it has no fingerprint."""
    digest = None if reuse is None else reuse.corpus.sinks.fingerprint.digest
    known = (loaded.name, digest, loaded.positions, loaded.unsupported)
    own = getattr(loaded.model, "generation_config", None)
    return ModelInfo(*known, bool(loaded.tokenizer.chat_template), own)


def status_of(requests: RequestQueue, reuse: Reuse | None) -> EngineStatus:
    """Return an engine's state at this moment."""
    known = ((), 0) if reuse is None else (reuse.tiers, reuse.healing.tokens)
    return EngineStatus(requests.running, requests.waiting, *known)
