"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from tiny import tiny_model, tiny_tokenizer

from ragkv import RagKV
from ragkv.decode import loop
from ragkv.engine import costs
from ragkv.model.implementation import override_implementation


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _nothing_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep passes of the background out of tests that watch the model's."""
    monkeypatch.setattr(costs.PrefillCosts, "measure", lambda _: None)


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


@pytest.fixture
def make_say(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return ``say(engine, *texts)``: the engine's next answers are these texts, in turn."""

    def say(engine: RagKV, *texts: str) -> None:
        end = engine.model.generation_config.eos_token_id
        tokens = iter(
            [
                token
                for text in texts
                for token in (*engine.tokenizer(text, add_special_tokens=False)["input_ids"], end)
            ]
        )
        monkeypatch.setattr(loop, "_drawn", lambda *_, **__: torch.tensor([[next(tokens)]]))

    return say


@pytest.fixture(params=["torch", "onednn"])
def each_implementation(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let ragkv attend by torch's own products, then by oneDNN's, whatever the processor."""
    if request.param == "onednn" and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    with override_implementation(request.param), torch.no_grad():
        yield
