"""Rows left by earlier prompts: which, how long, and for whom."""

import threading
from collections.abc import Callable, Iterator

import earlier_prompts
import hypothesis.strategies as st
import pytest
import torch
from earlier_prompts import (
    CHUNKS,
    and_then,
    ask,
    assert_adds_up,
    assert_full,
    is_earlier_behind,
    paths,
    taken,
)
from hypothesis import Phase, given, settings
from tiny import LONGROPE, SIZE, random_model, some_chunks, tiny_tokenizer
from transformers import LlamaConfig

from ragkv import RagKV, StoreConfig
from ragkv.engine.planner import Planner
from ragkv.history import history
from ragkv.prompt.find import MIN_HEAD

make_engine = earlier_prompts.make_engine
left = earlier_prompts.left

# ---- what is kept, and for whom


def test_without_history_a_prompt_takes_and_leaves_nothing(make_engine, left):
    engine = make_engine()
    engine.precompute(CHUNKS)
    cold = engine.generate(ask(), history=False, max_new_tokens=4)
    assert left == []
    engine.generate(ask(), recompute_ratio=1.0, max_new_tokens=4)
    again = engine.generate(ask(), history=False, max_new_tokens=4)
    assert (again.token_ids, again.report.positions) == (cold.token_ids, cold.report.positions)
    assert len(left) == 1
    for method in ("full", "prefix"):
        assert taken(engine.generate(ask(), method=method, max_new_tokens=4)) == 0
    assert len(left) == 1


def test_changed_weights_and_other_namespaces(make_engine):
    engine = make_engine()
    engine.generate(ask(), max_new_tokens=3)
    with RagKV(engine.loaded, store=":memory:", namespace="other") as other:
        assert taken(other.prefill(ask())) == 0
    assert taken(engine.prefill(ask())) > 300
    with torch.no_grad():
        engine.loaded.model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    out = engine.prefill(ask())
    assert taken(out) == 0
    assert_full(engine, out)


DELETIONS: dict[str, Callable[[RagKV], object]] = {
    "a chunk": lambda engine: engine.forget(CHUNKS[1]),
    "a document": lambda engine: engine.forget(document="manual"),
    "a chunk of its next version": lambda engine: (
        engine.precompute(CHUNKS[:2], document="manual").removed
    ),
    "no chunk": lambda engine: engine.forget("never stored"),
    "no document": lambda engine: engine.forget(document="never stored"),
}


@pytest.mark.parametrize("what", DELETIONS)
def test_what_is_deleted_is_in_no_earlier_prompt(make_engine, what):
    """Neither in one that runs meanwhile, nor in one that is not settled yet."""
    engine, other = make_engine(), ask("And this?", [*CHUNKS[:0:-1], "Else."])
    engine.precompute(CHUNKS, document="manual")
    for chat in (ask(), other):
        engine.generate(chat, max_new_tokens=3)
        assert taken(engine.prefill(chat)) > 100
    running = engine.stream(ask(), max_new_tokens=8)
    next(running)
    assert bool(DELETIONS[what](engine)) == (not what.startswith("no "))
    list(running)
    engine.wait()
    gone = [each for each in CHUNKS if not engine.contains(each)]
    for text in gone:
        assert not [path for path in paths(engine) if text[:MIN_HEAD] in path]
        assert not is_earlier_behind(engine.prefill(ask(), on_miss="skip"), text)
    if gone != CHUNKS:
        assert taken(engine.prefill(ask("Why?"), on_miss="skip")) > 100
    assert len(gone) == (0 if what.startswith("no ") else 3 if what == "a document" else 1)


@pytest.mark.parametrize("by_other", [False, True], ids=["here", "by another engine"])
@pytest.mark.parametrize(
    "made", ["{0}\n\nSo?", "{1}\n\nSo?", "x{0} So?", "See {0}", "({1})", "Read: {0}{0}"]
)
def test_a_deletion_cuts_the_paths_through_its_chunk_alone(
    make_engine, tmp_path, made, *, by_other
):
    """However its first words were cut into tokens; also where it was truncated."""
    one, gone, more = CHUNKS[0], f"interminable {CHUNKS[1]}", CHUNKS[2]
    engine, deleter = (make_engine(store=StoreConfig(tmp_path)) for _ in range(2))
    engine.precompute([one, gone, more])
    through = f"{one}\n\n{made.format(gone, gone[:MIN_HEAD])}"
    for prompt in (through, f"{one}\n\n{more}", through):
        engine.generate(prompt, recompute_ratio=1.0, max_new_tokens=2)
    before = engine.prefill(f"{one}\n\n{more}").report.tokens.history_exact
    (deleter if by_other else engine).forget(gone)
    kept = engine.prefill(f"{one}\n\n{more}")
    assert kept.report.tokens.history_exact == before > 200
    assert not [path for path in paths(engine) if gone[:MIN_HEAD] in path]
    out = engine.prefill(through, on_miss="skip")
    assert not is_earlier_behind(out, gone[:MIN_HEAD])
    assert out.report.tokens.history_exact > 100
    assert_full(engine, engine.prefill(through, recompute_ratio=1.0))


def test_asking_and_deleting_in_any_order(make_engine):
    engine = make_engine()

    @settings(max_examples=6, deadline=None, phases=[Phase.generate], database=None)
    @given(st.lists(st.tuples(st.sampled_from("aad"), st.permutations(range(3))), min_size=4))
    def check(steps):
        engine.precompute(CHUNKS)
        for what, (first, second, _) in steps[:8]:
            if what == "a":
                chat = ask(f"Which of {first}?", [CHUNKS[first], CHUNKS[second]])
                engine.generate(chat, max_new_tokens=2)
                assert_full(engine, engine.prefill(chat, recompute_ratio=1.0))
            else:
                engine.forget(CHUNKS[first])
                assert not [path for path in paths(engine) if CHUNKS[first][:MIN_HEAD] in path]
                engine.precompute(CHUNKS)

    check()


def test_who_began_before_too_many_deletions_leaves_nothing(make_engine, monkeypatch):
    monkeypatch.setattr(history, "MOST_DROPPED", 2)
    engine = make_engine()
    for number in range(4):
        running = engine.stream(ask(), max_new_tokens=8)
        next(running)
        for text in [f"nothing that is stored {each}" for each in range(number)]:
            engine.forget(text)
        list(running)
        assert (taken(engine.prefill(ask(), on_miss="skip")) > 0) == (number < 3)
        engine._reuse.history.clear()


@pytest.mark.parametrize("budget", [0, 1000])
def test_a_budget_too_small_for_a_prompt(make_engine, budget):
    engine = make_engine(store=StoreConfig(":memory:", history_bytes=budget))
    for _ in range(2):
        assert taken(engine.generate(ask(), max_new_tokens=3)) == 0


def test_a_cancelled_answer_leaves_what_was_computed(make_engine):
    engine = make_engine()
    engine.precompute(CHUNKS)
    engine.loaded.model.generation_config.eos_token_id = None
    with engine.stream(ask(), recompute_ratio=1.0, max_new_tokens=400) as pieces:
        begun = next(pieces) + next(pieces)
    chat = [*ask(), {"role": "assistant", "content": begun}, {"role": "user", "content": "Go on"}]
    out = engine.prefill(chat, recompute_ratio=1.0)
    assert taken(out) > 340
    assert_full(engine, out)


def test_rows_are_evicted_while_a_request_runs(make_engine, monkeypatch):
    engine = make_engine()
    engine.precompute(CHUNKS)
    chat = and_then(ask(), engine.generate(ask(), max_new_tokens=6))
    expected = engine.prefill(chat)
    tree, plan = engine._reuse.history._tree, Planner.plan

    def cleared(*given):
        tree.clear()
        return plan(*given)

    monkeypatch.setattr(Planner, "plan", cleared)
    answer = engine.generate(chat, max_new_tokens=6)
    assert answer.report.positions == expected.report.positions
    assert answer.token_ids[0] == int(expected.logits.argmax())
    monkeypatch.undo()
    assert taken(engine.prefill(chat)) == taken(answer) + answer.report.tokens.recomputed + (
        answer.report.tokens.fresh - 1
    )


@pytest.fixture
def long_model() -> Iterator[RagKV]:
    model = random_model(LlamaConfig(**{**SIZE, "rope_parameters": LONGROPE}))
    with RagKV(model, tiny_tokenizer(), store=":memory:") as engine:
        engine.loaded.model.generation_config.eos_token_id = None
        yield engine


def test_nothing_is_taken_across_the_position_limit(long_model):
    """At 256 positions the rotary table changes, for all rows of a prompt."""
    ids = tiny_tokenizer()(" ".join(some_chunks(6)))["input_ids"]
    seen = []
    for tokens in (150, 200, 250, 300, 320, 240):
        out = long_model.prefill(tiny_tokenizer().decode(ids[:tokens]))
        assert_full(long_model, out)
        seen.append(taken(out))
        long_model.generate(tiny_tokenizer().decode(ids[:tokens]), max_new_tokens=20)
    assert [count > 100 for count in seen] == [False, True, True, False, True, True]


def test_many_chats_at_once_get_what_each_gets_alone(make_engine):
    """At a ratio of 1; below it the order of the questions counts."""
    engine, found = make_engine(), list[tuple[int, list[int], list[int]]]()
    engine.precompute(CHUNKS)
    engine.loaded.model.generation_config.eos_token_id = None

    def talk(number):
        chat = ask(f"Question {number}?")
        for turn in range(3):
            ratio = 1.0 if number < 3 else 0.2
            answer = engine.generate(chat, recompute_ratio=ratio, max_new_tokens=8)
            assert_adds_up(answer)
            if ratio == 1:
                found.append((taken(answer), chat, answer.token_ids))
            chat = and_then(chat, answer, f"And {turn}?")

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 9
    assert sum(count > 300 for count, _, _ in found) >= 6
    for _, chat, token_ids in found:
        assert engine.generate(chat, method="full", max_new_tokens=8).token_ids == token_ids
