"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from tiny import tiny_model, tiny_tokenizer

from ragkv import RagKV


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def make_engine() -> Iterator[Callable[..., RagKV]]:
    """Return ``make(family="llama", attention="sdpa", **RagKV's arguments)``; closed afterwards."""
    engines: list[RagKV] = []

    def make(family: str = "llama", attention: str = "sdpa", **kwargs: object) -> RagKV:
        kwargs.setdefault("store", ":memory:")
        engine = RagKV(tiny_model(family, attention), tiny_tokenizer(), **kwargs)  # type: ignore[arg-type]
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()
