"""Which version of a chunk is taken, and which are kept."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import torch

from ragkv.chunk.kv import ChunkKV
from ragkv.model.fingerprint import Fingerprint
from ragkv.store.versions.kept import ChunkVersions
from ragkv.store.versions.version import Version

MODEL = Fingerprint("weights", "tokenizer", "attention", "float32", "sink")
PLENTY = 1 << 30


def version(
    text: str,
    prefix: Sequence[str],
    inter: Sequence[float] = (),
    *,
    fingerprint: Fingerprint = MODEL,
    impact: float = 0.8,
    expires_at: float | None = None,
) -> Version:
    kv = torch.zeros(1, 1, 4, 2)
    entry = ChunkKV(text, np.arange(4, dtype=np.int32), np.zeros((4, 2), np.int32), kv, kv)
    paid = np.array(inter or [1.0] * len(prefix))
    return Version(
        text, entry, fingerprint, tuple(prefix), paid, 1.0, impact, np.arange(4), expires_at
    )


def take(kept: ChunkVersions, text: str, before: Sequence[str], known: str = "ABCDEFG") -> Version:
    taken = kept.take(text, MODEL, before, set(known).__contains__)
    return taken and taken[0]  # type: ignore[return-value]


def test_the_version_of_lowest_overhead_is_taken() -> None:
    kept = ChunkVersions(PLENTY)
    near, far = version("D", "AB", [1.0, 3.0]), version("D", "AC", [1.0, 3.0])
    kept.add(near)
    kept.add(far)
    assert kept.take("D", MODEL, ["A", "B"], lambda _: True) == (near, 0.0)
    taken = kept.take("D", MODEL, ["C"], lambda _: True)
    assert taken is not None
    assert taken[0] is far
    assert math.isclose(taken[1], 0.8 * (1 - 3 / 4))


def test_an_entry_is_better_than_a_version_of_another_context() -> None:
    kept = ChunkVersions(PLENTY)
    kept.add(version("D", "ABC"))
    assert take(kept, "D", ["E", "F"]) is None
    assert take(kept, "D", ["A", "F"]) is None  # 0.8 * 2/3 is more than 1/2
    assert take(kept, "D", ["A", "B"]) is not None
    assert take(kept, "E", ["A", "B"]) is None


def test_of_equals_the_nearest_context_is_taken() -> None:
    """A version's overhead says nothing about chunks that only the prompt has."""
    kept = ChunkVersions(PLENTY)
    short, long = version("D", "A"), version("D", "BA")
    kept.add(short)
    kept.add(long)
    assert take(kept, "D", ["B", "A"]) is long
    assert take(kept, "D", ["A"]) is short


def test_what_must_not_be_used_is_not() -> None:
    kept = ChunkVersions(PLENTY)
    kept.add(version("D", "AB", expires_at=1.0))
    kept.add(version("E", "AB", fingerprint=MODEL.with_sink([1, 2])))
    kept.add(version("F", "AB"))
    assert take(kept, "D", "AB") is None  # expired
    assert take(kept, "E", "AB") is None  # another sink
    assert take(kept, "F", "AB", known="AF") is None  # B was deleted
    assert not kept.contains("D", MODEL, "AB")
    assert not kept.contains("F", MODEL, "BA")
    assert kept.contains("F", MODEL, "AB")
    kept.drop_unknown(set("AEF").__contains__)
    assert len(kept) == kept.nbytes == 0


def test_of_a_chunk_the_least_used_version_is_evicted() -> None:
    kept = ChunkVersions(PLENTY, per_chunk=2)
    first, second, third = (version("D", prefix) for prefix in ("A", "B", "C"))
    kept.add(first)
    kept.add(second)
    assert take(kept, "D", ["A"]) is first
    kept.add(third)
    assert len(kept) == 2
    assert take(kept, "D", ["A"]) is first
    assert take(kept, "D", ["B"]) is None
    assert take(kept, "D", ["C"]) is third


def test_the_budget_holds_and_the_least_worth_goes() -> None:
    """Against a plain list: worth 1, and 1 / CFO more for each use, the oldest first."""
    one = version("A", "B").nbytes
    kept = ChunkVersions(6 * one, per_chunk=3)
    plain: list[tuple[Version, float]] = []
    draw = random.Random(3)
    for step in range(400):
        text, prefix = draw.choice("ABC"), "".join(draw.sample("DEFG", draw.randint(1, 3)))
        if draw.random() < 0.5 and not kept.contains(text, MODEL, prefix):
            new = version(text, prefix, [draw.random() + 0.1 for _ in prefix])
            own = [pair for pair in plain if pair[0].text == text]
            if len(own) == 3:
                plain.remove(min(own, key=lambda pair: pair[1]))
            worth = new.nbytes + sum(pair[0].nbytes for pair in plain)
            while worth > kept.budget:
                over = min(plain, key=lambda pair: pair[1])
                plain.remove(over)
                worth -= over[0].nbytes
            plain.append((new, 1.0))
            kept.add(new)
        else:
            taken = kept.take(text, MODEL, list(prefix), lambda _: True)
            costs = {
                id(each): each.overhead(list(prefix)) for each, _ in plain if each.text == text
            }
            least = min(costs.values(), default=1.0)
            assert (taken is None) == (least >= 0.5), step
            if taken is not None:
                assert taken[1] == least == costs[id(taken[0])]
                plain = [
                    (each, worth + (1 / max(least, 0.01) if each is taken[0] else 0.0))
                    for each, worth in plain
                ]
        assert len(kept) == len(plain)
        assert kept.nbytes == sum(each.nbytes for each, _ in plain) <= kept.budget
        for each, _ in plain:
            assert kept.contains(each.text, MODEL, each.prefix)
    assert len(plain) >= 5


def test_other_weights_and_too_large_versions() -> None:
    kept = ChunkVersions(version("A", "B").nbytes)
    kept.add(version("A", "B"))
    kept.add(version("A", "BCDEFG"))
    assert kept.contains("A", MODEL, "B")
    trained = Fingerprint("trained", "tokenizer", "attention", "float32", "sink")
    kept.add(version("C", "B", fingerprint=trained))
    assert len(kept) == 1
    assert not kept.contains("A", MODEL, "B")
    assert kept.contains("C", trained, "B")
    kept.clear()
    assert len(kept) == kept.nbytes == 0
