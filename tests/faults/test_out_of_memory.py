"""Memory that runs out anywhere on a request's way costs that request alone."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scarce_memory import ScarceMemory, counted_buffers, fail_at_each, outcome, state_of
from tiny import ask, some_chunks

from ragkv import RagKV, ReuseConfig, StoreConfig
from ragkv.config import MEMORY
from ragkv.decode import batch
from ragkv.engine.background import Background
from ragkv.errors import OutOfMemoryError
from ragkv.splice.buffer import SplicedCache

__all__ = ["counted_buffers"]
Make = Callable[..., RagKV]
Buffers = list[weakref.ref[SplicedCache]]
CHUNKS = some_chunks(2, words=24)
PROMPT = ask(CHUNKS, "\n\nWhat does it say?")
EVERY = [
    pytest.param(1, marks=pytest.mark.slow, id="each"),
    pytest.param(61, id="some"),
]


@pytest.fixture(autouse=True)
def _in_the_calling_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do the background's work where memory is scarce."""
    submit = Background._submit

    def run(self: Background, work: Any, *args: Any, thread: Any = None) -> None:
        class Here:
            def submit(self, work: Callable[[], object]) -> None:
                work()

        submit(self, work, *args, thread=Here())

    monkeypatch.setattr(Background, "_submit", run)


def endless(kv: RagKV) -> RagKV:
    kv.model.generation_config.eos_token_id = None
    return kv


@pytest.mark.parametrize("lasts", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("step", EVERY)
@pytest.mark.parametrize(
    "settings",
    [
        {"recompute_ratio": 0.3},
        {"method": "full"},
        {"method": "cachecraft", "recompute_ratio": 0.3, "temperature": 0.7, "seed": 3},
    ],
    ids=["query", "full", "cachecraft"],
)
def test_a_prompt_and_its_answer(
    make_engine: Make,
    counted_buffers: Buffers,
    settings: dict[str, Any],
    step: int,
    *,
    lasts: bool,
) -> None:
    kv = endless(make_engine(layers=2))
    kv.precompute(CHUNKS)

    def way() -> list[int]:
        return kv.generate(PROMPT, max_new_tokens=6, logprobs=2, **settings).token_ids

    ended, failed = fail_at_each(kv, way, counted_buffers, step=step, lasts=lasts)
    assert failed
    assert ended or lasts
