"""Cache-Craft's formulas, against plain loops."""

import random

import pytest

from ragkv.store.version import fix_overhead, order_penalty, prefix_overlap


def swaps(order: list[int]) -> int:
    """Neighbours that bubble sort swaps: Kendall's tau distance from the sorted order."""
    order, count = list(order), 0
    for end in range(len(order), 1, -1):
        for at in range(end - 1):
            if order[at] > order[at + 1]:
                order[at], order[at + 1] = order[at + 1], order[at]
                count += 1
    return count


@pytest.mark.parametrize("seed", range(50))
def test_overlap_and_penalty_are_those_of_plain_loops(seed):
    draw = random.Random(seed)
    texts = [f"chunk {at}" for at in range(7)]
    old, new = draw.sample(texts, draw.randint(1, 6)), draw.sample(texts, draw.randint(0, 6))
    inter = [draw.random() for _ in old]
    kept = total = 0.0
    for text, paid in zip(old, inter, strict=True):
        total += paid
        kept += paid if text in new else 0.0
    assert prefix_overlap(old, inter, new) == pytest.approx(kept / total)
    order = [new.index(text) for text in old if text in new]
    pairs = len(order) * (len(order) - 1) / 2
    assert order_penalty(old, new) == pytest.approx(swaps(order) / pairs if pairs else 0.0)


def test_a_hand_made_example():
    """Of attention 4 + 1 + 3, the new prompt has 4 + 3, in the other order, and one more chunk."""
    old, new, inter = ["A", "B", "C"], ["C", "X", "A"], [4.0, 1.0, 3.0]
    assert prefix_overlap(old, inter, new) == 7 / 8
    assert order_penalty(old, new) == 1.0
    assert fix_overhead(0.6, 7 / 8, 1.0) == 0.6
    assert order_penalty(old, ["A", "X", "C"]) == 0.0
    assert fix_overhead(0.6, 7 / 8, 0.0) == pytest.approx(0.6 / 8)
    assert order_penalty(["A", "B", "C"], ["A", "C", "B"]) == pytest.approx(1 / 3)


def test_the_edges():
    assert prefix_overlap(["A"], [2.0], ["A"]) == 1.0
    assert prefix_overlap(["A"], [2.0], ["B"]) == prefix_overlap(["A"], [2.0], []) == 0.0
    assert prefix_overlap(["A"], [0.0], ["B"]) == 1.0  # it attends to none of them
    assert order_penalty(["A", "B"], ["B"]) == 0.0
    assert fix_overhead(0.9, 0.0, 0.0, alpha=3.0) == 1.0
    assert fix_overhead(0.9, 1.0, 0.0, alpha=3.0) == 0.0
