"""An engine that has the chunks of the explained prompts."""

from collections.abc import Iterator

import pytest
from explain_prompts import CHUNKS
from tiny import tiny_model, tiny_tokenizer

from ragkv import RagKV, ReuseConfig


@pytest.fixture(scope="package")
def engine() -> Iterator[RagKV]:
    first = ReuseConfig(history=False)
    with RagKV(tiny_model(), tiny_tokenizer(), store=":memory:", reuse=first) as kv:
        kv.precompute(CHUNKS)
        yield kv
