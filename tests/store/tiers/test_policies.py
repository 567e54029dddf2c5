"""PGDSF against a plain loop over all entries; admission."""

import random
from collections import Counter
from itertools import chain

import pytest
from store_entries import FINGERPRINT, make_entry

from ragkv.store.tiers import pgdsf
from ragkv.store.tiers.admission import Admission, CountSketch
from ragkv.store.tiers.pgdsf import PGDSF
from ragkv.store.tiers.tier import MemoryTier, size_of


class Reference:
    """The definition written out; every question is a loop over everything."""

    def __init__(self) -> None:
        self.now, self.clock = 0, 0.0
        self.held: dict[str, int] = {}
        self.ranks: dict[str, tuple[float, int]] = {}
        self.requests: Counter[str] = Counter()
        self.miss_costs: dict[str, list[float]] = {}

    def insert(self, key: str, nbytes: int, cost: float, tokens: int) -> None:
        self.held[key] = nbytes
        self.miss_costs.setdefault(key, []).append(cost / tokens)
        self.hit(key)

    def hit(self, key: str) -> None:
        self.now += 1
        self.requests[key] += 1
        costs = self.miss_costs[key]
        self.ranks[key] = self.clock + self.requests[key] * sum(costs) / len(costs), self.now

    def victims(self, nbytes: int) -> list[str]:
        found: list[str] = []
        for key in sorted(self.held, key=self.ranks.__getitem__):
            if sum(map(self.held.__getitem__, found)) >= nbytes:
                break
            found.append(key)
        return found

    def evict(self, key: str) -> None:
        del self.held[key]
        self.clock = max(self.clock, self.ranks[key][0])


@pytest.mark.parametrize("seed", range(3))
def test_the_victims_are_those_of_the_plain_definition(seed):
    draw = random.Random(seed)
    policy, reference = PGDSF(), Reference()
    sizes = {f"chunk {n}": draw.choice([10, 20, 40, 80]) for n in range(60)}
    evicted = 0
    for _ in range(2500):
        key = f"chunk {min(int(draw.expovariate(0.08)), 59)}"
        if key in policy and draw.random() < 0.02:
            policy.remove(key)
            del reference.held[key]
            continue
        if key in policy:
            policy.hit(key)
            reference.hit(key)
            continue
        need = sum(reference.held.values()) + sizes[key] - 600
        victims = reference.victims(need)
        assert policy.victims(need) == victims
        if draw.random() < 0.1:  # asked for, and let stay
            continue
        for victim in victims:
            policy.evict(victim)
            reference.evict(victim)
        evicted += len(victims)
        tokens = draw.randint(1, 9)
        cost = draw.choice([0.5, 1.0, 3.0]) * tokens
        policy.insert(key, sizes[key], cost, tokens)
        reference.insert(key, sizes[key], cost, tokens)
        assert policy.clock == pytest.approx(reference.clock, rel=1e-9)
        assert set(policy) == set(reference.held)
        assert policy.nbytes == sum(reference.held.values()) <= 600
    assert evicted > 300
    assert len(policy._heap) <= 2 * len(policy) + pgdsf._SPARE


def test_all_leave_where_that_is_not_enough_and_none_where_there_is_room():
    policy = PGDSF()
    assert policy.victims(10) == []
    policy.insert("a", 5)
    policy.insert("b", 5)
    assert policy.victims(0) == policy.victims(-3) == []
    assert policy.victims(100) == ["a", "b"]
    assert (policy.size("a"), policy.size("c")) == (5, 0)
    policy.remove("c")


def test_only_so_much_history_is_kept(monkeypatch):
    monkeypatch.setattr(pgdsf, "REMEMBERED", 5)
    policy = PGDSF()
    for number in range(20):
        policy.insert(number, 1, 1.0, 1)
        policy.evict(number)
    assert len(policy._histories) == 5


# ---- admission


def test_the_sketch_never_counts_too_low_and_seldom_too_high():
    draw = random.Random(0)
    sketch, exact = CountSketch(), Counter()
    for _ in range(8000):
        key = int(draw.paretovariate(1.0)) if draw.random() < 0.5 else draw.randrange(4000)
        sketch.add(key)
        exact[key] += 1
    assert all(sketch.estimate(key) >= min(255, count) for key, count in exact.items())
    wrong = [key for key, count in exact.items() if sketch.estimate(key) > min(255, count) + 1]
    assert len(wrong) < len(exact) / 100
    assert sketch.estimate(1) == 255
    sketch.halve()
    assert sketch.estimate(1) == 127


def test_chunks_wanted_once_do_not_flush_hot_ones():
    hot, scan = [make_entry(f"hot {n}") for n in range(10)], [make_entry(str(n)) for n in range(99)]
    for trace in (hot * 6 + scan + hot, [*chain(*zip(hot * 9, scan, strict=False)), *hot]):
        tier = MemoryTier(sum(map(size_of, hot)), admission=True)
        misses = 0
        for entry in trace:
            if tier.get(entry.text, FINGERPRINT) is None:
                misses += entry.text.startswith("hot")
                tier.put(entry, FINGERPRINT)
        assert 10 <= misses <= 20  # ten of them are the first of their kind


def test_admission_forgets():
    admission = Admission(memory=2)
    for _ in range(150):
        admission.count("once hot", 100)
    assert not admission.admits("new", ["once hot"])
    for number in range(2000):
        admission.count(number % 3, 100)
    admission.count("new", 100)
    assert admission.admits("new", ["once hot"])
    assert not admission.admits("new", [1])
    assert not admission.admits("new", ["once hot", 1])
