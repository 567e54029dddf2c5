"""The knowledge tree, against a list of all prompts that were given to it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from ragkv.model.fingerprint import Fingerprint
from ragkv.store.prefixes import tree as module
from ragkv.store.prefixes.node import NODE_OVERHEAD, PrefixMatch, PrefixNode, RepairTerms
from ragkv.store.prefixes.tree import AnsweredPrompt, PrefixTree

MODEL = Fingerprint("weights", "tokenizer", "attention", "float32")
OTHER = Fingerprint("other weights", "tokenizer", "attention", "float32")
LAYERS, HEADS, WIDTH = 2, 1, 4
TOKEN_BYTES = 2 * LAYERS * HEADS * WIDTH * 4 + 4
PLENTY = 1 << 24


def terms(ratio: float | str = 0.2, *settings: object) -> RepairTerms:
    return RepairTerms(settings, ratio)  # type: ignore[arg-type]


def rows_of(ids: np.ndarray, salt: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Make rows that tell which tokens, and whose repair, they are of."""
    path = [hash((salt, *ids[: at + 1].tolist())) % 10_007 for at in range(len(ids))]
    keys = torch.tensor(path, dtype=torch.float32).expand(LAYERS, HEADS, -1)
    keys = keys[..., None] + torch.arange(WIDTH)
    return keys.clone(), -keys


def given(
    prompt: list[int],
    answer: list[int] = [],  # noqa: B006
    exact: int | None = None,
    ratio: float | str = 0.2,
    salt: int = 0,
    **more: object,
) -> AnsweredPrompt:
    ids = np.array([*prompt, *answer], dtype=np.int32)
    exact = len(ids) if exact is None else exact
    keys, values = rows_of(ids)
    repaired = rows_of(ids, 1 + salt)
    keys[:, :, exact:], values[:, :, exact:] = (part[:, :, exact:] for part in repaired)
    more.setdefault("model", MODEL)
    return AnsweredPrompt(ids, len(prompt), exact, (keys, values), terms(ratio), **more)  # type: ignore[arg-type]


def find(tree: PrefixTree, prompt: list[int], ratio: float | str = 0.2) -> PrefixMatch | None:
    return tree.match(np.array(prompt, dtype=np.int32), terms(ratio), MODEL)


def rows_in(match: PrefixMatch) -> tuple[torch.Tensor, torch.Tensor]:
    ends = [0, *(part.end for part in match.parts)]
    assert ends[:-1] == [part.start for part in match.parts]
    assert ends[-1] == match.length
    keys = torch.cat([part.keys for part in match.parts], dim=2)
    return keys, torch.cat([part.values for part in match.parts], dim=2)


def assert_rows(match: PrefixMatch, of: AnsweredPrompt) -> None:
    for found, expected in zip(rows_in(match), of.rows, strict=True):
        assert torch.equal(found, expected[:, :, : match.length])


def nodes_of(tree: PrefixTree) -> list[PrefixNode]:
    found, waiting = [], list(tree._roots.values())
    while waiting:
        node = waiting.pop()
        found.append(node)
        waiting += [*node.children.values(), *node.turns]
    return [node for node in found if node.parent is not None]


def assert_sound(tree: PrefixTree) -> None:
    nodes = nodes_of(tree)
    assert sorted(map(id, nodes)) == sorted(map(id, tree._policy))
    assert tree.nbytes == sum(node.nbytes for node in nodes) <= tree.budget
    for node in nodes:
        assert node.alive
        assert len(node.ids) == node.rows[0].shape[2] == node.rows[1].shape[2] > 0
        if node.terms is None:
            assert node.start == node.parent.end
            assert node.parent.children[int(node.ids[0])] is node
        else:
            assert node.parent.start < node.start <= node.parent.end or node.start == 0
            assert node in node.parent.turns


# ---- which rows may be used


def test_exact_rows_serve_whatever_begins_with_their_tokens() -> None:
    tree, one = PrefixTree(PLENTY), given([1, 2, 3, 4, 5], [6, 7])
    tree.add(one)
    for prompt, length, conversation in (
        ([1, 2, 3, 9], 3, False),
        ([1, 2, 3, 4, 5, 9], 5, True),
        ([1, 2, 3, 4, 5, 6, 8, 9], 6, True),
        ([1, 2, 3, 4, 5, 6, 7, 8], 7, True),
        ([1, 2, 3, 4, 5], 4, True),  # the last token is always computed
        ([1, 2, 3], 2, False),
    ):
        for ratio in (0.0, 0.2, 1.0, "auto"):
            match = find(tree, prompt, ratio)
            assert (match.length, match.exact, match.conversation) == (length, length, conversation)
            assert_rows(match, one)
    assert find(tree, [2, 3, 4]) is None
    assert find(tree, [1]) is None


def test_repaired_rows_serve_only_prompts_that_begin_with_the_whole_prompt() -> None:
    tree, one = PrefixTree(PLENTY), given([1, 2, 3, 4, 5], [6, 7], exact=2)
    tree.add(one)
    for prompt, length, exact in (
        ([1, 2, 3, 4, 9, 9], 2, 2),  # the same documents, another question
        ([1, 2, 3, 4], 2, 2),
        ([1, 2, 3, 4, 5], 4, 2),
        ([1, 2, 3, 4, 5, 9], 5, 2),
        ([1, 2, 3, 4, 5, 6, 9], 6, 2),
        ([1, 2, 3, 4, 5, 6, 7, 8], 7, 2),
    ):
        match = find(tree, prompt)
        assert (match.length, match.exact, match.conversation) == (length, exact, length > exact)
        assert_rows(match, one)


@pytest.mark.parametrize(
    ("made", "wanted", "served"),
    [
        (0.2, 0.2, True),
        (0.2, 0.0, True),
        (0.2, 0.3, False),
        (0.9, 1.0, False),
        (1.0, 1.0, False),
        ("auto", "auto", True),
        ("auto", 0.0, False),
        (0.2, "auto", False),
    ],
)
def test_repaired_rows_serve_no_higher_ratio(made: object, wanted: object, *, served: bool) -> None:
    tree = PrefixTree(PLENTY)
    tree.add(given([1, 2, 3, 4], exact=2, ratio=made))
    assert find(tree, [1, 2, 3, 4, 5], wanted).length == (4 if served else 2)


def test_repaired_rows_serve_no_other_settings() -> None:
    assert terms(0.2, "query", b"sink").serve(terms(0.1, "query", b"sink"))
    assert not terms(0.2, "query", b"sink").serve(terms(0.1, "query", b"another"))
    assert not terms(0.2, "query", b"sink").serve(terms(0.1, "epic", b"sink"))


def test_exact_rows_come_before_repaired_ones_of_the_same_tokens() -> None:
    tree, exact = PrefixTree(PLENTY), given([1, 2, 3, 4])
    tree.add(given([1, 2, 3, 4], exact=2))
    tree.add(exact)
    match = find(tree, [1, 2, 3, 4, 5])
    assert match.exact == match.length == 4
    assert_rows(match, exact)


def test_two_conversations_over_the_same_documents_keep_apart() -> None:
    tree = PrefixTree(PLENTY)
    both = [given([1, 2, 3, last], [7], exact=1, salt=last) for last in (4, 5)]
    for one in both:
        tree.add(one)
    for one, last in zip(both, (4, 5), strict=True):
        match = find(tree, [1, 2, 3, last, 7, 8])
        assert match.length == 5
        assert_rows(match, one)


def test_a_turn_hangs_from_the_rows_that_it_continued() -> None:
    """Also where others of the same tokens came, and its own node was split, meanwhile."""
    tree, first = PrefixTree(PLENTY), given([1, 2, 3, 4], [5, 6, 7], exact=2, ratio=0.5)
    tree.add(first)
    continued = find(tree, [1, 2, 3, 4, 5, 6, 9])
    assert continued.length == 6
    tree.add(given([1, 2, 3, 4], [5, 8], exact=2, ratio=0.2, salt=5))
    branch = find(tree, [1, 2, 3, 4, 5, 0])
    tree.add(given([1, 2, 3, 4, 5, 0], exact=2, continued=branch))
    second = given([1, 2, 3, 4, 5, 6, 9], [8], exact=2, continued=continued)
    for part, of in zip(second.rows, first.rows, strict=True):
        part[:, :, :6] = of[:, :, :6]
    tree.add(second)
    match = find(tree, [1, 2, 3, 4, 5, 6, 9, 8, 1])
    assert (match.length, match.exact) == (8, 2)
    assert_rows(match, second)
    assert_sound(tree)


def test_a_prompt_asked_again_adds_its_answer_alone() -> None:
    tree, prompt = PrefixTree(PLENTY), [1, 2, 3, 4]
    tree.add(given(prompt, [5], exact=2))
    again = find(tree, prompt)
    before = len(tree)
    tree.add(given(prompt, [6, 7], exact=2, continued=again))
    assert find(tree, [*prompt, 6, 7, 8]).length == 6
    assert find(tree, [*prompt, 5, 8]).length == 5
    assert len(tree) == before + 1


def test_what_it_continued_may_be_gone() -> None:
    tree = PrefixTree(PLENTY)
    tree.add(given([1, 2, 3, 4], [5], exact=2))
    continued = find(tree, [1, 2, 3, 4, 5, 6])
    tree.clear()
    tree.add(given([1, 2, 3, 4, 5, 6], exact=2, continued=continued))
    assert find(tree, [1, 2, 3, 4, 5, 6, 7]).length == 6
    assert find(tree, [1, 2, 3, 4, 5, 9]).length == 2
    assert_sound(tree)


def test_another_models_rows_are_dropped() -> None:
    tree, ids = PrefixTree(PLENTY), np.array([1, 2, 3, 4], dtype=np.int32)
    tree.add(given([1, 2, 3, 4]))
    assert find(tree, [1, 2, 3, 4]) is not None
    tree.add(given([1, 2, 3, 4]))  # began before the weights changed
    assert tree.match(ids, terms(), OTHER) is None
    assert tree.nbytes == 0
    assert find(tree, [1, 2, 3, 4]) is None


def test_roots_share_nothing() -> None:
    tree = PrefixTree(PLENTY)
    tree.add(given([1, 2, 3, 4], root=True))
    assert find(tree, [1, 2, 3, 4]) is None
    assert tree.match(np.array([1, 2, 3, 4], np.int32), terms(), MODEL, root=True).length == 3


# ---- against a plain reference


@dataclass
class Plain:
    """Every prompt that was given, and a search through all of them."""

    given: list[AnsweredPrompt] = field(default_factory=list)

    def length(self, prompt: list[int], wanted: float) -> int:
        best = 0
        for one in self.given:
            agree = 0
            while agree < min(len(prompt), len(one.ids)) and one.ids[agree] == prompt[agree]:
                agree += 1
            whole = agree >= one.prompt and one.terms.serve(terms(wanted))
            best = max(best, agree if whole else min(agree, one.exact))
        return min(best, len(prompt) - 1)


@pytest.mark.parametrize("seed", range(12))
def test_the_longest_usable_prefix_is_found(seed: int) -> None:
    draw = np.random.default_rng(seed)
    tree, plain = PrefixTree(PLENTY), Plain()
    for _ in range(60):
        base = plain.given[draw.integers(len(plain.given))].ids.tolist() if plain.given else []
        head = base[: draw.integers(len(base) + 1)]
        prompt = [*head, *draw.integers(3, size=draw.integers(1, 6)).tolist()]
        ratio = float(draw.choice([0.1, 0.3, 1.0]))
        match = find(tree, prompt, ratio)
        expected = plain.length(prompt, ratio)
        assert (0 if match is None else match.length) == expected
        if match is not None:
            exact = rows_of(np.array(prompt[: match.exact], dtype=np.int32))
            for found, wanted in zip(rows_in(match), exact, strict=True):
                assert torch.equal(found[:, :, : match.exact], wanted)
        is_repaired = match is not None and match.exact < match.length
        limit = match.exact if is_repaired else draw.integers(expected, len(prompt) + 3)
        answer = draw.integers(3, size=draw.integers(4)).tolist()
        exact = len(prompt) + len(answer) if limit >= len(prompt) else int(limit)
        one = given(prompt, answer, exact=exact, ratio=min(ratio, 0.3), continued=match)
        tree.add(one)
        plain.given.append(one)
        tree.settle(MODEL)
        assert_sound(tree)


def test_a_match_visits_its_path_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = PrefixTree(PLENTY)
    for first in range(1, 200):
        tree.add(given([first, 2, 3]))
    for length in range(4, 40):
        tree.add(given([1, 2, 3, *[4] * (length - 4), 5]))
    tree.settle(MODEL)
    visited, reached = [], PrefixNode.reached
    monkeypatch.setattr(PrefixNode, "reached", lambda *given: visited.append(1) or reached(*given))
    match = find(tree, [1, 2, 3, *[4] * 10, 5, 6])
    assert match.length == 14
    assert len(visited) <= len(match.parts) + 1 < 16 < len(tree)


# ---- the budget


@pytest.mark.parametrize("seed", range(6))
def test_the_budget_is_kept_by_evicting_leaves(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    evicted, evict = [], PrefixTree._evict

    def noted(tree: PrefixTree, node: PrefixNode) -> None:
        assert node.is_leaf
        evicted.append(node)
        evict(tree, node)

    monkeypatch.setattr(PrefixTree, "_evict", noted)
    draw = np.random.default_rng(seed)
    tree = PrefixTree(12 * NODE_OVERHEAD + 60 * TOKEN_BYTES)
    for _ in range(80):
        prompt = draw.integers(3, size=draw.integers(2, 14)).tolist()
        match = find(tree, prompt)
        one = given(prompt, draw.integers(3, size=3).tolist(), continued=match)
        tree.add(one)
        tree.settle(MODEL)
        assert_sound(tree)
        found = find(tree, [*one.ids.tolist(), 1])
        assert found.length == len(one.ids)  # the newest is there
        assert_rows(found, one)
    assert evicted
    assert not any(node.alive for node in evicted)


def test_nothing_is_kept_of_a_prompt_larger_than_the_budget() -> None:
    tree, small = PrefixTree(5 * NODE_OVERHEAD + 6 * TOKEN_BYTES), given([1, 2, 3])
    tree.add(small)
    tree.add(given(list(range(500))))
    tree.settle(MODEL)
    assert find(tree, [1, 2, 3, 4]).length == 3
    assert len(tree) == 1


def test_what_a_request_reads_stays_whole_when_it_is_evicted() -> None:
    tree, one = PrefixTree(4 * NODE_OVERHEAD + 8 * TOKEN_BYTES), given([1, 2, 3, 4, 5])
    tree.add(one)
    match = find(tree, [1, 2, 3, 4, 5, 6])
    for first in range(10, 20):
        tree.add(given([first, 2, 3, 4, 5]))
    tree.settle(MODEL)
    assert not match.node.alive
    assert find(tree, [1, 2, 3, 4, 5, 6]) is None
    assert_rows(match, one)
    tree.add(given([1, 2, 3, 4, 5, 6], continued=match))
    assert find(tree, [1, 2, 3, 4, 5, 6, 7]).length == 6


def test_what_is_wanted_often_and_costs_much_stays() -> None:
    room = 3 * (NODE_OVERHEAD + 4 * TOKEN_BYTES)
    tree = PrefixTree(room + NODE_OVERHEAD, costs=lambda cached, new: float(new))
    for first in (10, 20, 30):
        tree.add(given([first, 2, 3, 4]))
        tree.settle(MODEL)
    for _ in range(3):
        find(tree, [10, 2, 3, 4, 5])
    tree.add(given([40, 2, 3, 4]))
    assert [find(tree, [first, 2, 3, 4, 5]) is not None for first in (10, 20, 30, 40)] == [
        True,
        False,
        True,
        True,
    ]
    assert_sound(tree)


def test_a_lack_of_memory_costs_the_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = PrefixTree(PLENTY)
    tree.add(given([1, 2, 3, 4, 5]))
    tree.settle(MODEL)

    def refuse(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(module, "copy_rows", refuse)
        tree.add(given([1, 2, 9]))
        assert find(tree, [1, 2, 3, 4, 5, 6]).length == 5
    assert_sound(tree)


def test_threads_share_it() -> None:
    tree, wrong = PrefixTree(20 * NODE_OVERHEAD + 200 * TOKEN_BYTES), []

    def work(seed: int) -> None:
        draw = np.random.default_rng(seed)
        for _ in range(60):
            prompt = [1, *draw.integers(3, size=draw.integers(1, 10)).tolist()]
            match = find(tree, prompt)
            one = given(prompt, [1, 2], continued=match)
            if match is not None:
                found = zip(rows_in(match), one.rows, strict=True)
                wrong.extend(1 for a, b in found if not torch.equal(a, b[:, :, : match.length]))
            tree.add(one)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tree.settle(MODEL)
    assert not wrong
    assert_sound(tree)
