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


@pytest.fixture(params=["torch", "onednn"])
def whose_products(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Let ragkv attend by torch's own products, then by oneDNN's, whatever the processor."""
    product = None
    if request.param == "onednn":
        product = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
        if product is None:
            pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr("ragkv.model.matrices._product", product)
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX512")
    with torch.no_grad():
        yield
