"""Engines whose answers llama.cpp, or a stand-in for it, decodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
from gguf_files import write_gguf
from llama_stand_in import StandIn
from llamacpp_ragkv.decoder import LlamaCppDecoder
from tiny import some_chunks, tiny_model

from ragkv import RagKV, ReuseConfig
from ragkv.engine import settings
from ragkv.model import gguf

Open = Callable[..., RagKV]


@pytest.fixture
def open_engine(tmp_path, monkeypatch) -> Iterator[Open]:
    """Return ``open_engine(family, library, **RagKV's arguments)`` over a GGUF file in float32.

    ``library`` is called with the file and the number of threads; None decodes by ragkv.
    """
    monkeypatch.setenv(gguf.CACHE, "off")
    with ExitStack() as stack:

        def open_over(family: str = "llama", library: Any = None, **given: Any) -> RagKV:
            path = tmp_path / f"{family}.gguf"
            if not path.exists():
                write_gguf(path, tiny_model(family))
            if library is not None:
                opens = partial(LlamaCppDecoder, library=library)
                monkeypatch.setattr(settings, "extension", lambda *_: opens)
                given["decoder"] = "llama.cpp"
            given = {"store": ":memory:", "reuse": ReuseConfig(history=False)} | given
            kv = stack.enter_context(RagKV(path, dtype="float32", **given))
            kv.precompute(some_chunks())
            return kv

        yield open_over


@pytest.fixture
def library() -> StandIn:
    return StandIn(tiny_model("llama"))


@pytest.fixture
def kv(open_engine, library) -> RagKV:
    return open_engine(library=lambda *_: library)


@pytest.fixture
def plain(open_engine) -> RagKV:
    return open_engine()
