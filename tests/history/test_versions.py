"""Which version of a chunk is taken, and which are kept."""

import math
import random
from collections.abc import Sequence

import numpy as np

from ragkv.history.versions import ChunkVersions
from ragkv.model.fingerprint import Fingerprint
from ragkv.store.version import Version

MODEL = Fingerprint("weights", "tokenizer", "attention", "float32", "sink")


def version(
    text: str,
    prefix: Sequence[str],
    inter: Sequence[float] = (),
    *,
    fingerprint: Fingerprint = MODEL,
    impact: float = 0.8,
    expires_at: float | None = None,
) -> Version:
    paid = np.array(inter or [1.0] * len(prefix))
    path = f"{fingerprint.digest} {prefix} {text}"
    return Version(
        *(text, fingerprint, tuple(prefix), paid, 1.0, impact, np.arange(4), path, 0, expires_at)
    )


def take(kept: ChunkVersions, text: str, before: Sequence[str], known: str = "ABCDEFG") -> Version:
    taken = kept.take(text, MODEL, before, set(known).__contains__)
    return taken and taken[0]


def test_the_version_of_lowest_overhead_is_taken():
    kept = ChunkVersions()
    near, far = version("D", "AB", [1.0, 3.0]), version("D", "AC", [1.0, 3.0])
    kept.add(near)
    kept.add(far)
    assert kept.take("D", MODEL, ["A", "B"], lambda _: True) == (near, 0.0)
    taken = kept.take("D", MODEL, ["C"], lambda _: True)
    assert taken is not None
    assert taken[0] is far
    assert math.isclose(taken[1], 0.8 * (1 - 3 / 4))


def test_a_version_of_another_context_is_better_than_the_entry():
    """It was computed behind some text, as in the prompt; the entry was not."""
    kept = ChunkVersions()
    kept.add(version("D", "ABC"))
    for before in (["E", "F"], ["A", "F"], ["A", "B"]):
        assert take(kept, "D", before) is not None
    assert take(kept, "E", ["A", "B"]) is None


def test_of_equals_the_nearest_context_is_taken():
    """A version's overhead says nothing about chunks that only the prompt has."""
    kept = ChunkVersions()
    short, long = version("D", "A"), version("D", "BA")
    kept.add(short)
    kept.add(long)
    assert take(kept, "D", ["B", "A"]) is long
    assert take(kept, "D", ["A"]) is short


def test_what_must_not_be_used_is_not():
    kept = ChunkVersions()
    kept.add(version("D", "AB", expires_at=1.0))
    kept.add(version("E", "AB", fingerprint=MODEL.with_sink([1, 2])))
    kept.add(version("F", "AB"))
    assert take(kept, "D", "AB") is None  # expired
    assert take(kept, "E", "AB") is None  # another sink
    assert take(kept, "F", "AB", known="AF") is None  # B was deleted
    whole = version("F", "AB")
    assert [each.is_alike(whole) for each in kept.of("F", MODEL) or ()] == [True]
    kept.drop_unknown(set("AEF").__contains__)
    assert len(kept) == 0


def test_the_least_worth_goes():
    """Against a plain list: worth 1, and 1 / CFO more for each use, the oldest first."""
    kept = ChunkVersions(per_chunk=3)
    plain: list[tuple[Version, float]] = []
    draw = random.Random(3)
    for step in range(400):
        text, prefix = draw.choice("ABC"), "".join(draw.sample("DEFG", draw.randint(1, 3)))
        own = [pair for pair in plain if pair[0].text == text]
        if draw.random() < 0.5:
            new = version(text, prefix, [draw.random() + 0.1 for _ in prefix])
            alike = [pair for pair in own if pair[0].is_alike(new)]
            if len(own) == 3:
                least = alike or [min(own, key=lambda pair: pair[1])]
                plain.remove(least[0])
                assert kept.add(new) == ([] if alike else [least[0][0]])
            else:
                plain = [pair for pair in plain if pair not in alike]
                assert kept.add(new) == []
            plain.append((new, 1.0))
        else:
            taken = kept.take(text, MODEL, list(prefix), lambda _: True)
            costs = {id(each): each.overhead(list(prefix)) for each, _ in own}
            least_cost = min(costs.values(), default=1.0)
            assert (taken is None) == (not own), step
            if taken is not None:
                assert taken[1] == least_cost == costs[id(taken[0])]
                gain = 1 / max(least_cost, 0.01)
                plain = [(each, uses + gain * (each is taken[0])) for each, uses in plain]
        assert len(kept) == len(plain)
        for each, _ in plain:
            assert each in (kept.of(each.text, MODEL) or ())
    assert len(plain) >= 5


def test_what_a_store_was_asked_about_is_known_until_too_many_others_were(monkeypatch):
    monkeypatch.setattr("ragkv.history.versions.MOST_CHUNKS", 2)
    kept, trained = ChunkVersions(), MODEL.with_sink([1])
    assert kept.of("A", MODEL) is None
    assert kept.of("A", MODEL) == []
    assert kept.of("A", trained) is None
    one, other = version("A", "B"), version("B", "A")
    kept.add(one)
    assert kept.of("A", MODEL) == [one]
    kept.add(other)
    assert kept.of("A", trained) is None
    assert kept.of("A", MODEL) is None
    kept.add(other)
    kept.discard(other)
    assert kept.of("B", MODEL) == []
    kept.drop_unknown(lambda _: False)
    assert len(kept) == 0
