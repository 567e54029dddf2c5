"""What tests of both wrappers share: an engine, a model over it or its server, a model's folder."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from frameworks import FRAMEWORKS
from listening import listening
from llama_index.core import Settings
from llama_index.core.embeddings import MockEmbedding
from tiny import saved, tiny_tokenizer

from ragkv import Completion, RagKV, ReuseConfig, ReuseReport


@pytest.fixture(autouse=True)
def _no_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let LlamaIndex load neither embeddings nor a tokenizer."""
    monkeypatch.setattr(Settings, "_embed_model", MockEmbedding(embed_dim=4))
    monkeypatch.setattr(Settings, "_tokenizer", tiny_tokenizer().encode)


@pytest.fixture
def make_engine(make_engine: Callable[..., RagKV]) -> Callable[..., RagKV]:
    """Make engines of few layers: what the model says is seldom looked at here."""
    return partial(make_engine, layers=2)


@pytest.fixture
def kv(make_engine: Callable[..., RagKV]) -> RagKV:
    return make_engine(reuse=ReuseConfig())


@pytest.fixture(params=["here", "served"])
def place(request: pytest.FixtureRequest, kv: RagKV) -> Iterator[dict[str, Any]]:
    """Return where a model is: ``kv`` itself, or the ``url`` of its server."""
    if request.param == "here":
        yield {"kv": kv}
        return
    with listening(kv) as url:
        yield {"url": url}


@pytest.fixture
def make(place: dict[str, Any]) -> Iterator[Callable[..., Any]]:
    """Return ``make(kind, **settings)``: a wrapper's model that is there."""
    made = []

    def make(kind: Any, **settings: Any) -> Any:
        address = "api_base" if "api_base" in kind.model_fields else "base_url"
        there = {address if name == "url" else name: value for name, value in place.items()}
        made.append(kind(**there, **settings))
        return made[-1]

    yield make
    for llm in made:
        llm.kv.close()


@pytest.fixture(params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> Any:
    return FRAMEWORKS[request.param]


@pytest.fixture
def model(framework: Any, make: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``model(length, **settings)``: a chat model of the framework that is there."""

    def model(length: int = 12, **settings: Any) -> Any:
        given = {framework.length: length, **framework.form, **settings}
        return make(framework.kind, **given)

    return model


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[ReuseReport]:
    """Return the reports of all answers, in order."""
    found: list[ReuseReport] = []
    complete = RagKV._complete

    def keep(kv: RagKV, *given: Any, **more: Any) -> Completion:
        answer = complete(kv, *given, **more)
        found.append(answer.report)
        return answer

    monkeypatch.setattr(RagKV, "_complete", keep)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Return the folder of a tiny model."""
    return saved(tmp_path / "model")
