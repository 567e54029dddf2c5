"""Memory that runs out anywhere on a request's way costs that request alone."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from scarce_memory import (
    ScarceMemory,
    allocations,
    counted_buffers,
    fail_at_each,
    nothing_left,
    outcome,
    spread,
)
from served import until
from threads import each_in_a_thread
from tiny import ask, some_chunks

from ragkv import RagKV, ReuseConfig, StoreConfig
from ragkv.config import MEMORY
from ragkv.decode import batch
from ragkv.engine.background import Background
from ragkv.engine.planner import Planner
from ragkv.errors import OutOfMemoryError
from ragkv.history.node import NODE_OVERHEAD
from ragkv.history.tree import PrefixTree

__all__ = ["counted_buffers"]
Make = Callable[..., RagKV]
DEVICE = os.environ.get("RAGKV_SECOND_DEVICE", "cpu")
CHUNKS = some_chunks(2, words=24)
PROMPT = ask(CHUNKS, "\n\nWhat does it say?")
EACH, SOME, TOGETHER = (10**6, 7, 400) if DEVICE == "cpu" else (100, 5, 10)
LONG = 400 if DEVICE == "cpu" else 100  # tokens; steps on other devices are slower
POINTS = [pytest.param(EACH, marks=pytest.mark.slow, id="each"), pytest.param(SOME, id="some")]


@pytest.fixture(autouse=True)
def _in_the_calling_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do the background's work where memory is scarce."""

    def run(self: Background, work: Any, *args: Any) -> None:
        self._run(partial(work, *args))

    monkeypatch.setattr(Background, "_submit", run)
    monkeypatch.setattr(Background, "_heal", lambda self: self._run(self._healing.work))


def endless(kv: RagKV) -> RagKV:
    kv.loaded.model.generation_config.eos_token_id = None
    return kv


@pytest.mark.parametrize("lasts", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("points", POINTS)
@pytest.mark.parametrize(
    "settings",
    [
        {"recompute_ratio": 0.3},
        {"method": "full"},
        {"method": "cachecraft", "recompute_ratio": 0.3, "temperature": 0.7, "seed": 3},
    ],
    ids=["query", "full", "cachecraft"],
)
def test_a_prompt_and_its_answer(make_engine, counted_buffers, settings, points, *, lasts):
    kv = endless(make_engine(device=DEVICE, layers=2))
    kv.precompute(CHUNKS)

    def way():
        return kv.generate(PROMPT, max_new_tokens=6, logprobs=2, **settings).token_ids

    ended, failed = fail_at_each(kv, way, counted_buffers, points=points, lasts=lasts)
    assert failed
    assert ended or lasts


@pytest.mark.parametrize("lasts", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("points", POINTS)
def test_encoding(make_engine, counted_buffers, points, *, lasts):
    kv = make_engine(device=DEVICE, layers=2)

    def forget():
        kv._reuse.corpus.sinks._kept.clear()
        for chunk in CHUNKS:
            kv.forget(chunk)

    def way():
        report = kv.precompute(CHUNKS)
        return report.new, [kv.contains(chunk) for chunk in CHUNKS]

    _, failed = fail_at_each(kv, way, counted_buffers, points=points, lasts=lasts, before=forget)
    assert failed


@pytest.mark.parametrize("lasts", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("points", POINTS)
def test_keeping_rows_and_continuing_them(make_engine, counted_buffers, points, *, lasts):
    """Two turns of a conversation, the second behind the rows of the first."""
    kv = endless(make_engine(device=DEVICE, layers=2, reuse=ReuseConfig(recompute_ratio=1)))
    kv.precompute(CHUNKS)
    tree = kv._reuse.history._tree

    def way():
        first = kv.generate(PROMPT, max_new_tokens=4)
        more = [*PROMPT, {"role": "assistant", "content": first.text}, *ask([], "Why?")]
        return [first.token_ids, kv.generate(more, max_new_tokens=4).token_ids]

    def clear():
        assert tree.nbytes == sum(
            each.nbytes for root in tree._roots.values() for each in below(root)
        )
        kv._reuse.history.clear()

    ended, _ = fail_at_each(kv, way, counted_buffers, points=points, lasts=lasts, before=clear)
    assert ended or lasts


def rows_in(tree: PrefixTree) -> int:
    """Return the bytes of a tree's tokens and rows, however many nodes they are in."""
    return tree.nbytes - NODE_OVERHEAD * len(tree)


def below(node: Any) -> list[Any]:
    children = list(node.children.values())
    return [*children, *(each for child in children for each in below(child))]


@pytest.mark.parametrize("points", POINTS)
def test_healing(make_engine, counted_buffers, points):
    kv = endless(make_engine(device=DEVICE, layers=2, reuse=ReuseConfig()))
    kv.precompute(CHUNKS)
    reuse = kv._reuse

    def heal():
        kv.prefetch(CHUNKS)

    def clear():
        reuse.history.clear()
        reuse.healing.drop()
        reuse.versions.kept.drop_unknown(lambda _: False)

    clear()
    heal()
    kept = rows_in(reuse.history._tree)
    expected = kv.generate(PROMPT, max_new_tokens=4).token_ids
    clear()
    count = allocations(heal)
    assert count > 20
    for number in spread(count, points):
        where = f"allocation {number} of {count}"
        clear()
        with nothing_left(kv, counted_buffers, where), ScarceMemory(number).in_this_thread():
            outcome(heal)
        heal()
        assert rows_in(reuse.history._tree) == kept, where
        assert kv.generate(PROMPT, max_new_tokens=4).token_ids == expected, where


@pytest.mark.parametrize("lasts", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("points", POINTS)
def test_several_at_once(make_engine, counted_buffers, monkeypatch, points, *, lasts):
    """Joint steps, and steps between the layers of others' prompts."""
    monkeypatch.setattr(batch, "MAX_WAIT_S", 0)
    kv = endless(make_engine(device=DEVICE, layers=2, store=StoreConfig(MEMORY, history_bytes=0)))
    kv.precompute(CHUNKS)
    settings = [{"method": "full"}, {"recompute_ratio": 0.3}, {"recompute_ratio": 1}]
    prompts = [ask(CHUNKS[at % 2 :], f"\n\nQuestion {at}?") for at in range(3)]

    def answer(at):
        return kv.generate(prompts[at], max_new_tokens=8, **settings[at]).token_ids

    def ask_all(scarce):
        found: dict[int, Any] = {}

        def work(at):
            with scarce.in_this_thread():
                found[at] = outcome(lambda: answer(at))

        each_in_a_thread(work, range(3))
        return [found[at] for at in range(3)]

    alone = [answer(at) for at in range(3)]
    counting = ScarceMemory()
    assert ask_all(counting) == alone
    for number in spread(counting.count, min(points, TOGETHER)):
        where = f"allocation {number} of {counting.count}"
        with nothing_left(kv, counted_buffers, where):
            found = ask_all(ScarceMemory(number, lasts=lasts))
        errors = [each for each in found if isinstance(each, OutOfMemoryError)]
        assert len(errors) <= (3 if lasts else 1), where
        for at in range(3):
            assert found[at] in (alone[at], *errors), where
        assert ask_all(ScarceMemory()) == alone, where


@pytest.fixture
def crowded(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> tuple[RagKV, list[int]]:
    """Return an engine without memory for a second answer, and the number running each time."""
    kv, plan, failed = endless(make_engine(device=DEVICE, layers=2)), Planner.plan, list[int]()
    kv.precompute(CHUNKS)

    def scarce(self: Planner, *given: Any) -> Any:
        if (running := kv.status().running) > 1:
            failed.append(running)
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return plan(self, *given)

    monkeypatch.setattr(Planner, "plan", scarce)
    return kv, failed


def test_a_prompt_waits_for_the_answers_that_have_the_memory(crowded):
    kv, failed = crowded
    alone = kv.generate(PROMPT, max_new_tokens=6, history=False).token_ids
    with kv.stream(PROMPT, max_new_tokens=LONG, method="full") as other:
        next(other)
        assert kv.generate(PROMPT, max_new_tokens=6, history=False).token_ids == alone
        assert failed == [2, 2]
        assert kv.status().running == 0
        list(other)
    assert len(other.completion.token_ids) == LONG


def test_a_cancelled_prompt_does_not_wait_for_them(crowded):
    kv, failed = crowded
    with kv.stream(PROMPT, max_new_tokens=2000, method="full") as other:
        next(other)
        with kv.stream(PROMPT, max_new_tokens=6) as waiting:
            until(lambda: len(failed) == 2)
            waiting.close()
        assert kv.status().running == 1
        assert next(other)


def test_a_prompt_whose_thread_they_wait_for_fails(crowded):
    kv, failed = crowded
    with kv.stream(PROMPT, max_new_tokens=LONG, method="full") as other:
        next(other)
        with kv.turn(), pytest.raises(OutOfMemoryError, match="and 1 other requests run"):
            kv.generate(PROMPT, max_new_tokens=6)
        assert failed == [2, 2]
        list(other)


def test_an_answer_that_is_begun_again_hears_its_tokens_alone(make_engine, tmp_path):
    """A corrupt entry that is met in the prompt's pass begins it again, as want of memory does."""
    store = StoreConfig(tmp_path, memory_bytes=0)
    make_engine(store=store).precompute(CHUNKS)
    path = max(tmp_path.rglob("*.safetensors"))
    raw = bytearray(path.read_bytes())
    raw[-len(raw) // 4] ^= 1
    path.write_bytes(raw)
    kv = endless(make_engine(store=store))
    kv._reuse.corpus.loads_always = True
    settings = {"method": "epic", "max_new_tokens": 4, "logprobs": 2, "on_miss": "skip"}
    with kv.stream(PROMPT, **settings) as stream:
        text = "".join(stream)
    found = stream.completion
    assert [miss.reason for miss in found.report.misses] == ["checksum"]
    assert stream.tokens == (found.report.tokens.prompt, 4)
    assert [each.token_id for each in found.logprobs] == found.token_ids
    assert text == found.text
