"""An engine whose answers a stand-in for vLLM decodes, over the same tiny model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from served import CHUNKS
from tiny import tiny_model
from vllm_over_http import StandIn, running
from vllm_ragkv.decoder import VllmDecoder
from vllm_ragkv.server import VllmServer

from ragkv import RagKV


@pytest.fixture
def vllm(tmp_path) -> StandIn:
    return StandIn(tiny_model(layers=2), tmp_path / "kv")


@pytest.fixture
def connect(vllm) -> Iterator[Callable[..., VllmServer]]:
    """Return ``connect(*engines, **limits)``: from now on the stand-in decodes for them."""
    with ExitStack() as stack:

        def make(*engines: RagKV, **limits: float) -> VllmServer:
            url = stack.enter_context(running(vllm))
            decoder = VllmDecoder(url, vllm.folder, **limits)
            stack.callback(decoder.close)
            for engine in engines:
                engine._decoder = decoder
            return decoder.server

        yield make


@pytest.fixture
def kv(make_engine) -> RagKV:
    kv = make_engine(layers=2)
    kv.precompute(CHUNKS)
    return kv
