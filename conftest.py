"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import itertools
import os
import ssl
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from tiny import saved, tiny_model, tiny_tokenizer

from ragkv import RagKV, ReuseConfig
from ragkv.decode import loop
from ragkv.model.implementation import override_implementation
from ragkv.store.backends import index


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Name what was skipped, and why: the reason says which command brings it."""
    skipped = [report.longrepr[2] for report in terminalreporter.stats.get("skipped", ())]
    for reason, count in Counter(skipped).most_common():
        terminalreporter.write_line(f"{count} skipped: {reason.removeprefix('Skipped: ')}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests longer that take minutes without hanging."""
    for item in items:
        if not {"slow", "gpu", "vllm", "ray"}.isdisjoint(item.keywords):
            item.add_marker(pytest.mark.timeout(1800))


def pytest_collection_finish() -> None:
    """Exempt all modules and collected tests from later garbage collections, to make them fast."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _without_waiting() -> Iterator[None]:
    """No test loses power or speaks TLS: nothing is synced, and certificates are read once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        patch.setattr(index, "_SETTINGS", (*index._SETTINGS, "PRAGMA synchronous = OFF"))
        patch.setattr(ssl, "create_default_context", cache(ssl.create_default_context))
        yield


@pytest.fixture
def make_engine() -> Iterator[Callable[..., RagKV]]:
    """Return ``make(family="llama", attention="sdpa", layers=None, **RagKV's arguments)``.

    The engines are closed afterwards.

    Unless ``reuse`` is given, each prompt is answered as if it were the first.
    """
    engines: list[RagKV] = []

    def make(
        family: str = "llama", attention: str = "sdpa", layers: int | None = None, **kwargs: object
    ) -> RagKV:
        kwargs.setdefault("store", ":memory:")
        kwargs.setdefault("reuse", ReuseConfig(history=False))
        model = tiny_model(family, attention, layers=layers)
        engine = RagKV(model, tiny_tokenizer(), **kwargs)  # type: ignore[arg-type]
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(scope="session")
def auxiliary(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a model that scores tokens for ``cacheclip``."""
    return saved(tmp_path_factory.mktemp("auxiliary"), "qwen2", seed=5)


@pytest.fixture
def make_say(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return ``say(engine, *texts)``: the engine's next answers are these texts, again and again.

    The model is asked as ever, and what it would have said is ignored. Where a schema forbids a
    token it says what it may.
    """

    def say(engine: RagKV, *texts: str) -> None:
        said, end = itertools.cycle(texts), engine.loaded.model.generation_config.eos_token_id
        draw, answer = loop.Loop.__call__, iter(list[int]())

        def begin(*args: Any, **given: Any) -> Any:
            nonlocal answer
            ids = engine.tokenizer(next(said), add_special_tokens=False)["input_ids"]
            answer = iter([*ids, end])
            return draw(*args, **given)

        monkeypatch.setattr(loop.Loop, "__call__", begin)

        def drawn(scores: torch.Tensor, **_: object) -> torch.Tensor:
            token = next(answer, end)
            allowed = scores[0, token] > float("-inf")
            return torch.tensor([[token]]) if allowed else scores.argmax(dim=-1, keepdim=True)

        monkeypatch.setattr(loop, "_drawn", drawn)

    return say


@pytest.fixture(params=["torch", "onednn"])
def each_implementation(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let ragkv attend by torch's own products, then by oneDNN's, whatever the processor."""
    if request.param == "onednn" and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    with override_implementation(request.param), torch.no_grad():
        yield
