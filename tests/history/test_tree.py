"""The tree of earlier prompts, against a list of all prompts that were given to it."""

from collections.abc import Sequence
from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from threads import each_in_a_thread

from ragkv.history import tree as module
from ragkv.history.node import ABSENT, EXACT, NODE_OVERHEAD, PrefixMatch, PrefixNode
from ragkv.history.tree import ComputedPrompt, PrefixTree
from ragkv.model.fingerprint import Fingerprint

MODEL = Fingerprint("weights", "tokenizer", "attention", "float32")
OTHER = Fingerprint("other weights", "tokenizer", "attention", "float32")
LAYERS, HEADS, WIDTH = 2, 2, 4
TOKEN_BYTES = 2 * LAYERS * HEADS * WIDTH * 4 + 16
PLENTY = 1 << 24
MOST = 64  # tokens of a prompt


def given(
    ids: list[int], freshness: float | list[float] = EXACT, number: int = 0, **more: object
) -> ComputedPrompt:
    """Make a prompt whose rows tell its number and their positions."""
    keys = torch.zeros(LAYERS, HEADS, len(ids) + 3, WIDTH)  # a cache is longer than its prompt
    keys += number * MOST + torch.arange(len(ids) + 3.0)[:, None]
    keys += torch.arange(LAYERS * HEADS * WIDTH).view(LAYERS, HEADS, 1, WIDTH) / 64
    fresh = np.broadcast_to(np.array(freshness, np.float32), len(ids)).copy()
    more.setdefault("model", MODEL)
    return ComputedPrompt(np.array(ids, np.int32), fresh, (keys, -keys), **more)


def find(
    tree: PrefixTree, ids: list[int], model: Fingerprint = MODEL, root: object = None
) -> PrefixMatch:
    return tree.match(np.array(ids, np.int32), model, root)


def found_in(match: PrefixMatch) -> list[tuple[int, float, int]]:
    """Return each row's position, freshness and the number of its prompt, from its numbers."""
    out = []
    for part in match.parts:
        assert len(part.positions) == len(part.freshness) == part.rows[0].shape[2] > 0
        assert torch.equal(part.rows[0], -part.rows[1])
        places = torch.arange(LAYERS * HEADS * WIDTH).view(LAYERS, HEADS, 1, WIDTH) / 64
        numbers = part.rows[0] - places
        assert torch.equal(numbers, numbers[:1, :1, :, :1].expand_as(numbers))
        for at, fresh, number in zip(
            part.positions.tolist(), part.freshness.tolist(), numbers[0, 0, :, 0], strict=True
        ):
            assert int(number) % MOST == at
            out.append((at, fresh, int(number) // MOST))
    assert [at for at, _, _ in out] == match.positions.tolist()
    assert [fresh for _, fresh, _ in out] == match.freshness.tolist()
    return out


def nodes_of(tree: PrefixTree) -> list[PrefixNode]:
    found, waiting = list[PrefixNode](), list(tree._roots.values())
    while waiting:
        node = waiting.pop()
        found.append(node)
        waiting += node.children.values()
    return [node for node in found if node.parent is not None]


def assert_sound(tree: PrefixTree) -> None:
    nodes = nodes_of(tree)
    assert sorted(map(id, nodes)) == sorted(map(id, tree._policy))
    assert tree.nbytes == sum(node.nbytes for node in nodes) <= tree.budget
    for node in nodes:
        assert node.parent is not None
        assert node.start == node.parent.end < node.end
        assert node.parent.children[int(node.ids[0])] is node
        known = node.known
        assert np.all(np.diff(known.positions, prepend=node.start - 1, append=node.end) > 0)
        assert np.all(known.freshness > ABSENT)
        for part in known.rows:
            assert part.shape == (LAYERS, HEADS, len(known.positions), WIDTH)
            assert part.untyped_storage().nbytes() == part.nbytes  # keeps no other rows in memory


# ---- against a plain reference


@dataclass
class Given:
    ids: list[int]
    freshness: list[float]
    root: bool

    def agrees(self, ids: list[int], root: bool) -> int:
        same = [a == b for a, b in zip(self.ids, ids, strict=False)] if self.root == root else []
        return [*same, False].index(False)


IDS = st.lists(st.integers(0, 1), min_size=1, max_size=9)
FRESH = st.lists(st.sampled_from([ABSENT, 0.1, 0.2, EXACT]), min_size=9, max_size=9)


class Trees(RuleBasedStateMachine):
    """Of a position's rows the first of the freshest stays; evicted ones may be missing."""

    @initialize(tight=st.booleans())
    def start(self, tight: bool) -> None:
        self.tight = tight
        self.tree = PrefixTree(11 * (NODE_OVERHEAD + TOKEN_BYTES) if tight else PLENTY)
        self.model = MODEL
        self.forget()

    def forget(self) -> None:
        self.given: list[Given] = []

    @rule(ids=IDS, fresh=FRESH, root=st.booleans())
    def add(self, ids: list[int], fresh: list[float], root: bool) -> None:
        one = Given(ids, [float(np.float32(each)) for each in fresh[: len(ids)]], root)
        number = len(self.given)
        self.given.append(one)
        self.tree.add(given(ids, one.freshness, number, model=self.model, root=root))
        if self.tight:  # what came last is there
            found = {at: fresh for at, fresh, _ in found_in(find(self.tree, ids, self.model, root))}
            assert all(found.get(at, ABSENT) >= best for at, best in enumerate(one.freshness))

    @rule(ids=IDS, root=st.booleans())
    def match(self, ids: list[int], root: bool) -> None:
        expected, possible = list[tuple[int, float, int]](), set[tuple[int, float, int]]()
        for at in range(len(ids)):
            rows = [
                (-one.freshness[at], number)
                for number, one in enumerate(self.given)
                if one.agrees(ids, root) > at and one.freshness[at] > ABSENT
            ]
            expected += [(at, -fresh, number) for fresh, number in sorted(rows)[:1]]
            possible |= {(at, -fresh, number) for fresh, number in rows}
        match = find(self.tree, ids, self.model, root)
        found = found_in(match)
        assert set(found) <= possible if self.tight else found == expected
        exact = {at for at, fresh, _ in found if fresh == EXACT}
        assert match.exact == min(set(range(len(ids) + 1)) - exact)
        for least in (0.2, EXACT):
            some = [row for row in found if row[1] >= np.float32(least)]
            assert found_in(match.at_least(np.float32(least))) == some

    @rule()
    def clear(self) -> None:
        self.tree.clear()
        self.forget()

    @rule(what=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def cut(self, what: list[int]) -> None:
        """Paths that are equal up to where it begins are cut there, too."""

        def first(ids: Sequence[int]) -> int:
            found = (at for at in range(len(ids)) if list(ids[at : at + len(what)]) == what)
            return next(found, len(ids))

        self.tree.settle(self.model)
        self.tree.cut(first, len(what))
        heads = [(one.root, one.ids[: first(one.ids) + 1]) for one in self.given]
        heads = [(root, ids) for root, ids in heads if first(ids) < len(ids) and not self.tight]
        for one in self.given:
            others = [ids for root, ids in heads if root == one.root]
            at = [len(ids) - 1 for ids in others if one.ids[: len(ids)] == ids]
            one.ids = one.ids[: min([first(one.ids), *at])]
        for node in nodes_of(self.tree):
            ids = [each for part in reversed(node.path()) for each in part.ids.tolist()]
            assert first(ids) == len(ids)
        policy = self.tree._policy
        stale = [node for *_, node in policy._heap if node not in policy]
        assert self.tight or not any(len(node.known.positions) for node in stale)

    @rule()
    def change_the_model(self) -> None:
        """What was computed by the old one comes too late."""
        old, self.model = self.model, OTHER if self.model == MODEL else MODEL
        self.tree.settle(self.model)
        self.tree.add(given([0, 0, 0, 1], number=40, model=old))
        self.forget()

    @invariant()
    def is_sound(self) -> None:
        if hasattr(self, "tree"):
            self.tree.settle(self.model)
            assert_sound(self.tree)


Trees.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestTrees = Trees.TestCase


# ---- single cases


def test_a_prompt_that_ends_within_a_node_gives_it_what_is_fresher():
    tree = PrefixTree(PLENTY)
    tree.add(given([1, 2, 3, 4, 5], [EXACT, 0.1, ABSENT, ABSENT, 0.1]))
    tree.add(given([1, 2, 3], [0.5, 0.5, 0.1], number=1))
    tree.add(given([1, 2, 3], [EXACT, 0.5, ABSENT], number=2))
    rows = [(0, EXACT, 0), (1, 0.5, 1), (2, np.float32(0.1), 1), (4, np.float32(0.1), 0)]
    assert found_in(find(tree, [1, 2, 3, 4, 5, 6])) == rows
    assert len(tree) == 1  # prompts that part nowhere share a node


def test_a_match_visits_its_path_alone(monkeypatch):
    tree = PrefixTree(PLENTY)
    for first in range(1, 200):
        tree.add(given([first, 2, 3]))
    for length in range(4, 40):
        tree.add(given([1, 2, 3, *[4] * (length - 4), 5]))
    tree.settle(MODEL)
    visited, reached = [], PrefixNode.reached
    monkeypatch.setattr(PrefixNode, "reached", lambda *given: visited.append(1) or reached(*given))
    match = find(tree, [1, 2, 3, *[4] * 10, 5, 6])
    assert match.exact == 14
    assert len(visited) <= len(match.parts) + 1 < 16 < len(tree)


def test_a_path_of_many_nodes_may_be_too_large_itself():
    tree = PrefixTree(4 * NODE_OVERHEAD + 40 * TOKEN_BYTES)
    for length in range(1, 20):
        tree.add(given([1] * length))
        tree.add(given([*[1] * length, 2]))
        tree.settle(MODEL)
        assert_sound(tree)


def test_nothing_is_kept_of_a_prompt_larger_than_the_budget():
    tree = PrefixTree(5 * NODE_OVERHEAD + 6 * TOKEN_BYTES)
    tree.add(given([1, 2, 3]))
    tree.add(given(list(range(200))))
    assert find(tree, [1, 2, 3, 4]).exact == 3
    tree.add(given(list(range(1, 200)), [EXACT] * 5 + [ABSENT] * 194))  # its rows fit
    assert find(tree, list(range(1, 200))).exact == 5
    assert_sound(tree)


def test_what_a_request_reads_stays_whole():
    """Whether its node is improved, split, evicted or dropped."""
    tree = PrefixTree(4 * NODE_OVERHEAD + 12 * TOKEN_BYTES)
    tree.add(given([1, 2, 3, 4, 5], 0.1))
    match = find(tree, [1, 2, 3, 4, 5, 6])
    before = found_in(match)
    tree.add(given([1, 2, 3, 4, 5], 0.2, number=1))
    tree.add(given([1, 2, 9], 0.3, number=2))
    assert [number for _, _, number in found_in(find(tree, [1, 2, 3, 4]))] == [2, 2, 1, 1]
    for first in range(10, 60):
        tree.add(given([first, 2, 3, 4, 5], number=first))
    assert found_in(find(tree, [1, 2, 3, 4, 5, 6])) == []
    tree.clear()
    assert found_in(match) == before


def test_what_is_wanted_often_and_costs_much_stays():
    room = 3 * (NODE_OVERHEAD + 4 * TOKEN_BYTES)
    tree = PrefixTree(room + NODE_OVERHEAD, costs=lambda cached, new: float(new))
    for first in (10, 20, 30):
        tree.add(given([first, 2, 3, 4]))
        tree.settle(MODEL)
    for _ in range(3):
        find(tree, [10, 2, 3, 4, 5])
    tree.add(given([40, 2, 3, 4]))
    left = [find(tree, [first, 2, 3, 4, 5]).exact for first in (10, 20, 30, 40)]
    assert left == [4, 0, 4, 4]


@pytest.mark.parametrize("calls", range(6))
def test_a_lack_of_memory_costs_the_rows_alone(monkeypatch, caplog, calls):
    """Wherever it comes: the tree is whole, and what it has is right."""
    tree, copy, made = PrefixTree(2 * NODE_OVERHEAD + 11 * TOKEN_BYTES), module.copy_rows, []
    tree.add(given([1, 2, 3, 4, 5], 0.1))
    tree.add(given([8, 9]))
    tree.settle(MODEL)

    def refuse(*asked):
        made.append(1)
        if len(made) > calls:
            raise MemoryError
        return copy(*asked)

    with monkeypatch.context() as patch:
        patch.setattr(module, "copy_rows", refuse)
        tree.add(given([1, 2, 9], 0.2, number=1))
        tree.settle(MODEL)
    assert ("not kept" in caplog.text) == (calls < 5)
    assert_sound(tree)
    tree.add(given([1, 2, 3, 4, 5], 0.3, number=2))
    assert [number for _, _, number in found_in(find(tree, [1, 2, 3, 4, 5, 6]))] == [2] * 5
    assert_sound(tree)


def test_threads_share_it():
    tree, wrong = PrefixTree(20 * NODE_OVERHEAD + 200 * TOKEN_BYTES), list[Exception]()
    paths = np.random.default_rng(0).integers(3, size=(50, 10))

    def work(seed):
        draw = np.random.default_rng(seed)
        for _ in range(60):
            number = int(draw.integers(50))
            ids = paths[number, : draw.integers(1, 11)].tolist()
            try:
                for at, _, other in found_in(find(tree, ids)):
                    assert paths[other, : at + 1].tolist() == ids[: at + 1]
                tree.add(given(ids, float(draw.choice([0.1, EXACT])), number))
            except Exception as error:  # noqa: BLE001  shown below
                wrong.append(error)

    each_in_a_thread(work, range(6))
    tree.settle(MODEL)
    assert wrong == []
    assert_sound(tree)
