"""Algorithm 1 of Cache-Craft: which chunks are focused, and from which layer on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ragkv.attend.observe import LayerCall
from ragkv.recompute import focus
from ragkv.recompute.focus import FocusedChunks, focused_chunks
from ragkv.splice.layout import Layout, Placed


@pytest.mark.parametrize(
    ("paid", "expected"),
    [
        # gaps 4, 1: of three chunks i is 1, whatever the gaps are
        ([6.0, 2.0, 1.0], {0}),
        # shares 0.2, 0.6, 0.2: h grows by 0.306, then by 0.322
        ([0.0, 0.5, 0.1, 0.4], {1, 3}),
        # shares 2/7, 4/7, 1/7: h grows by 0.320, then by 0.278
        ([0.8, 0.3, 1.0, 0.4], {2}),
        # shares 0.8, 0.05, 0.15: h grows by 0.150, then by 0.285; the largest gap is the first
        ([10.0, 2.0, 1.5, 0.0], {0, 1}),
        # shares 1/4, 1/12, 1/2, 1/6: h grows by 0.207, 0.347, 0.299; the largest gap is the third
        ([12.0, 9.0, 8.0, 2.0, 0.0], {0, 1}),
        # shares 1, 0, 0: 0 log 0 is 0, h does not grow, and the fewest are focused
        ([3.0, 1.0, 1.0, 1.0], {0}),
        ([0.5, 0.5, 0.5], set()),
    ],
)
def test_cases_computed_by_hand(paid: list[float], expected: set[int]) -> None:
    assert focused_chunks(np.array(paid)) == expected


def test_attention_adds_up_until_the_same_are_focused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums 1 1 1 focus no chunk; 1 4 2 the second; 5 4 2, and what follows, the first."""
    placed = [Placed(None, np.arange(2), np.arange(at, at + 2), at, at + 2) for at in (1, 3, 5)]
    layout = Layout(np.arange(8), np.zeros((8, 2)), 1, tuple(placed), np.zeros(8, np.uint8))
    paid = [[1, 1, 1], [0, 3, 1], [4, 0, 0], [0, 0, 0], [9, 0, 0]]
    calls = [LayerCall(at, *[torch.zeros(0)] * 4, None, 1.0) for at in range(len(paid))]

    def attention(call: LayerCall, _: int) -> torch.Tensor:
        return torch.tensor([9.0, *np.repeat(paid[call.layer], 2) / 2, 9.0])

    monkeypatch.setattr(focus, "attention_of_last_rows", attention)
    for layers, ended_at, stay in ((1, 2, [4, 7]), (2, 4, [2, 7]), (3, 5, [2, 7]), (4, None, [])):
        chunks = FocusedChunks(layout, np.array([2, 4, 5, 7]), layers)
        for _ in range(2):  # it begins again with every pass
            found = next((rows for rows in map(chunks, calls) if rows is not None), np.zeros(0))
            assert (chunks.ended_at, found.tolist()) == (ended_at, stay)
