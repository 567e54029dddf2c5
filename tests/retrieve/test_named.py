"""Which prompt takes the chunks that a retriever named."""

import asyncio
import time
from contextvars import copy_context

import pytest

from ragkv.retrieve.named import MOST_LISTS, WAIT_S, NamedChunks, Retrieved


@pytest.fixture
def named():
    return NamedChunks()


def test_a_prompt_takes_all_lists_since_the_last_one(named):
    named.add(["a", "b", ""])
    named.add(["b", "c"])
    assert named.take() == Retrieved(new=("a", "b", "c"))
    assert named.take() == named.take() == Retrieved(earlier=("a", "b", "c"))
    named.add(["d"])
    assert named.take() == Retrieved(new=("d",))


def test_tasks_take_their_own(named):
    async def answered(text):
        named.add([text])
        await asyncio.sleep(0.01)
        return named.take()

    async def all_answered():
        return await asyncio.gather(*map(answered, "abc"))

    assert asyncio.run(all_answered()) == [Retrieved(new=(text,)) for text in "abc"]
    assert named.take() == Retrieved()


def test_a_follow_up_takes_nothing_of_others(named):
    named.add(["a"])
    copy_context().run(named.add, ["b"])
    assert named.take() == Retrieved(new=("a",))
    assert named.take() == Retrieved(earlier=("a",))


def test_the_subtasks_of_one_answer_share_its_chunks(named):
    named.add(["a"])
    prompts = [copy_context() for _ in range(2)]
    assert prompts[0].run(named.take) == Retrieved(new=("a",))
    assert prompts[1].run(named.take) == Retrieved(earlier=("a",))


def test_lists_of_other_contexts(named, monkeypatch):
    copy_context().run(named.add, ["a"])
    assert named.take() == Retrieved(new=("a",))
    for text in "bc":
        copy_context().run(named.add, [text])
    assert named.take() == Retrieved(earlier=("b", "c"))  # one of them is this prompt's, or none
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + WAIT_S + 1)
    copy_context().run(named.add, ["d"])
    assert named.take() == Retrieved(new=("d",))


def test_another_engines_lists_are_not_taken(named):
    named.add(["a"])
    other = NamedChunks()
    assert other.take() == Retrieved()
    other.add(["b"])
    assert (other.take(), named.take()) == (Retrieved(new=("b",)), Retrieved(new=("a",)))


def test_the_last_lists_are_remembered(named):
    for number in range(MOST_LISTS + 2):
        named.add([str(number)])
    assert named.take().new == tuple(map(str, range(2, MOST_LISTS + 2)))
