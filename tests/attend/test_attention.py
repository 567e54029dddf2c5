"""The subset attention against one written out densely."""

import numpy as np
import pytest
import torch
from pairwise import all_pairs

from ragkv.attend.rows import Rows, attend
from ragkv.attend.score_rule import ScoreRule

pytestmark = pytest.mark.usefixtures("each_implementation")
RULES = {
    "softmax": ScoreRule(0.25),
    "capped": ScoreRule(0.25, softcap=1.5),
    "sinks": ScoreRule(0.25, sinks=torch.tensor([3.0, -1.0, 0.0, 2.0, 1.0, 4.0])),
    "both": ScoreRule(0.25, 0.7, torch.tensor([1.0, 2.0, -3.0, 0.0, 3.0, 1.0])),
}


def dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: list[int],
    window: int | None,
    rule: ScoreRule,
) -> torch.Tensor:
    """Row by row, key by key, in float64: nothing shared with the tested code."""
    batch, heads = query.shape[:2]
    group = heads // key.shape[1]
    out = torch.zeros_like(query, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for i, position in enumerate(rows):
                first = 0 if window is None else max(0, position - window + 1)
                seen = list(range(first, position + 1))
                keys = key[b, h // group, seen].double()
                scores = keys @ query[b, h, i].double() * rule.scaling
                if rule.softcap is not None:
                    scores = rule.softcap * torch.tanh(scores / rule.softcap)
                weights = torch.exp(scores)
                sink = 0 if rule.sinks is None else torch.exp(rule.sinks[h].double())
                weights /= weights.sum() + sink
                out[b, h, i] = weights @ value[b, h // group, seen].double()
    return out


ROWS = {
    "first": [0],
    "last": [29],
    "all": list(range(30)),
    "tail": list(range(10, 30)),
    "scattered": [0, 3, 4, 17, 29],
}
SHAPES = [(1, 4, 4), (1, 6, 2), (2, 6, 2), (1, 4, 1)]
"""Batch, heads and KV heads."""


# every pair of values of any two axes, by each implementation
@pytest.mark.parametrize(
    ("where", "window", "shape", "name"),
    all_pairs([*ROWS], [None, 1, 5, 64], SHAPES, [*RULES]),
    ids=str,
)
def test_rows_see_exactly_their_keys(where, window, shape, name):
    torch.manual_seed(0)
    rows, (batch, heads, kv_heads) = ROWS[where], shape
    query = torch.randn(batch, heads, len(rows), 16)
    key, value = torch.randn(2, batch, kv_heads, 30, 16)
    rule, places = RULES[name], Rows.on("cpu", np.array(rows))
    ours = attend(query, key, value, places, window, rule)
    expected = dense(query, key, value, rows, window, rule)
    torch.testing.assert_close(ours.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("count", [280, 300])  # the last rows join a block, or are one
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_blocks_of_rows_join_without_seams(count, window, dtype, limit):
    torch.manual_seed(0)
    rows = sorted(torch.randperm(600)[:count].tolist())
    query = torch.randn(1, 2, len(rows), 8).to(dtype)
    key, value = torch.randn(2, 1, 1, 600, 8).to(dtype)
    rule = ScoreRule(8**-0.5)
    ours = attend(query, key, value, Rows.on("cpu", np.array(rows)), window, rule)
    expected = dense(query, key, value, rows, window, rule)
    torch.testing.assert_close(ours.double(), expected, atol=limit, rtol=limit)


@pytest.mark.parametrize(("count", "sizes"), [(0, []), (95, [95]), (96, [64, 32]), (150, [64, 86])])
def test_few_rows_join_the_block_before_them(count, sizes):
    blocks = Rows.on("cpu", np.arange(count)).blocks(None, torch.float32)
    assert [block.last - block.first for block in blocks] == sizes


def test_masks_cover_the_keys_that_rows_differ_in():
    """Masks of all keys would take a GB for 8,192 rows over 32,768 keys, as many as scores."""
    rows = Rows.on("cpu", np.arange(3, 8192, 4))
    masks = [block.mask for block in rows.blocks(None, torch.float32)]
    assert sum(mask.numel() for mask in masks) <= 64 * 8192
