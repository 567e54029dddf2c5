"""Sparse attention of decoding steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from tiny import FAMILIES, some_chunks

from ragkv import RagKV, SparseDecoding

Make = Callable[..., RagKV]
CHUNKS = some_chunks(3)
PROMPT = [{"role": "user", "content": "\n\n".join(CHUNKS) + "\n\nWhat does it say?"}]
SMALL = SparseDecoding(block_size=8, second_block_count=4, initial_window=4, local_window=12)


@pytest.mark.parametrize("family", FAMILIES)
def test_x(make_engine: Make, family: str) -> None:
    engine = make_engine(family)
    engine.precompute(CHUNKS)
    dense = engine.generate(PROMPT, max_new_tokens=20, ignore_eos=True, drafts=False)
    found = engine.generate(PROMPT, max_new_tokens=20, ignore_eos=True, drafts=False, sparse=SMALL)
    print(found.report.blocks, found.report.blocks_read, dense.token_ids == found.token_ids)
    assert found.report.blocks_read < found.report.blocks
    engine.generate(PROMPT, max_new_tokens=20, ignore_eos=True, sparse=replace(SMALL, preselect_block_count=3,representative="dynamic"))
