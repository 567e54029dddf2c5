"""Runs that are asked for together are computed exactly while no request runs."""

import itertools
import threading
import time
from typing import Any

import healed_runs as runs
import pytest
import torch
from earlier_prompts import is_earlier_behind, paths
from healed_runs import A, B, C, D, Make
from pausing import Pause
from served import until
from store_entries import without_syncs  # noqa: F401
from tiny import FAMILIES, ask

from ragkv import RagKV, ReuseConfig, StoreConfig
from ragkv.config import MEMORY
from ragkv.engine.healing import Healing
from ragkv.prompt.chat import TokenIds
from ragkv.schedule.beside import IdleWork
from ragkv.select import Scene

make_engine = runs.make_engine
on_disk = runs.on_disk
pytestmark = runs.pytestmark

# ---- what is healed


@pytest.mark.parametrize("asked", ["twice", "prefetched"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_that_is_asked_for_again_is_exact(make_engine, monkeypatch, family, asked):
    engine = runs.ingested(make_engine(family))
    assert runs.distance(engine, engine.prefill(ask([A, B, C]))) > 10 * runs.TOLERANCE
    engine.wait()
    assert runs.healing(engine).tokens == 0
    if asked == "twice":
        engine.prefill(ask([A, B, C], "\n\nAnd then?"))
    else:
        engine.prefetch([A, B, C], for_next_answer=False)
    engine.wait()
    assert runs.healing(engine).tokens > 0
    monkeypatch.setattr(Scene, "observe", runs.fail)
    runs.assert_exact(engine, runs.once_more(engine, [A, B, C]))
    runs.assert_exact(engine, runs.once_more(engine, [A, B]))


def test_the_prefixes_of_a_run_are_computed_with_it(make_engine):
    """Not again where the tree's budget has removed their rows."""
    engine = runs.ingested(make_engine())
    engine.prefetch([A, B, C], for_next_answer=False)
    engine.wait()
    healing = runs.healing(engine)
    assert [run.requests for run in healing._runs.values()] == [0, 0, 0]
    computed = healing.tokens
    engine._reuse.history.clear()
    healing.work()
    assert healing.tokens == computed


def test_a_prefetched_run_is_that_of_the_prompts_before(make_engine):
    def prompt(chunks):
        return [{"role": "user", "content": "---\n" + "\n---\n".join(chunks) + "\n---\nWhy?"}]

    engine = runs.ingested(make_engine())
    engine.prefetch([A, B, C])
    engine.wait()
    runs.assert_exact(engine, engine.prefill(ask([A, B, C])))
    engine.prefill(prompt([C, D]))
    engine.prefetch([B, A, C])
    engine.wait()
    runs.assert_exact(engine, engine.prefill(prompt([B, A, C])))


@pytest.mark.parametrize("usual", [True, False])
def test_versions_have_the_tokenizer_s_own_tokens(make_engine, usual):
    """A client may send a chunk in other tokens: exact rows for itself, no version for others."""
    engine = runs.ingested(make_engine())
    ids = engine.tokenize(engine.render(ask([A, B])))
    at = engine.tokenize(engine.render(ask([A])).partition(A)[0] + A)
    if not usual:  # a token of the second chunk in letters
        assert engine.tokenizer.decode(ids[len(at) + 3]) == "ar"
        ids[len(at) + 3 : len(at) + 4] = engine.tokenizer.convert_tokens_to_ids(["a", "r"])
    for end in (5, 6, 7):
        engine.prefill(TokenIds([*ids, end]))
        engine.wait()
    report = engine.prefill(TokenIds([*ids, 8])).report
    assert report.tokens.history_exact > len(at)
    assert runs.contexts(engine) == ({(A, B)} if usual else set())


def test_hotter_runs_are_first(make_engine, monkeypatch):
    order, heal = list[list[str]](), Healing._heal

    def noted(each, run):
        order.append([chunk.text for chunk in run.chunks])
        heal(each, run)

    monkeypatch.setattr(Healing, "_heal", noted)
    engine = runs.ingested(make_engine())
    with engine._requests.turn(engine.loaded) as turn:
        turn.prefilled()  # it runs
        for chunks, times in (([B, A], 2), ([C, D], 2), ([D, A], 3), ([D, C], 1)):
            for number in range(times):
                engine.prefill(ask(chunks, f"\n\nQuestion {number}?"))
            while not order:
                time.sleep(0.005)  # it is the one that waits for an idle model
    engine.wait()
    pairs = [run for run in order if len(run) == 2]
    assert pairs == [[B, A], [D, A], [C, D]]


def test_each_finished_chunk_is_there_at_once(make_engine, monkeypatch):
    run, numbers = IdleWork.run, itertools.count(1)
    reached, go = threading.Event(), threading.Event()

    def stopped(*given):
        if next(numbers) == 3:
            reached.set()
            assert go.wait(30)
        return run(*given)

    monkeypatch.setattr(IdleWork, "run", stopped)
    engine = runs.ingested(make_engine())
    for question in ("What?", "Why?"):
        engine.prefill(ask([A, B, C], question))
    assert reached.wait(30)
    out = runs.once_more(engine, [A, B, D])
    go.set()
    last = out.report.chunks[1]
    assert runs.sources(out) == ["history", "history", "entry"]
    assert last.end <= out.report.tokens.sink + out.report.tokens.history_exact


@pytest.mark.parametrize("size", [0, 2 * 100, 4 * 150])
def test_a_run_of_more_than_half_the_budget_is_not_healed(make_engine, size):
    engine = make_engine(store=StoreConfig(MEMORY, history_bytes=size * 1024))
    runs.healed(runs.ingested(engine), [A, B])
    ids = len(runs.once_more(engine, [A, B]).token_ids)
    assert 150 < ids < 300
    assert (runs.healing(engine).tokens > 0) == (size >= 2 * ids)


@pytest.mark.parametrize(
    "given", [{"history": False}, {"method": "epic", "history": False}, {"method": "full"}], ids=str
)
def test_nothing_is_healed(make_engine, given):
    engine = runs.ingested(make_engine(reuse=ReuseConfig(**given)))
    engine.prefetch([A, B])
    runs.healed(engine, [A, B])
    first, second = (runs.once_more(engine, [A, B]) for _ in range(2))
    assert torch.equal(first.logits, second.logits)
    assert runs.versions(engine) == []
    assert runs.healing(engine).tokens == second.report.tokens.history_exact == 0


def test_a_call_without_history_takes_none(make_engine):
    engine = runs.ingested(make_engine())
    cold = runs.once_more(engine, [A, B], history=False)
    runs.healed(engine, [A, B])
    assert torch.equal(cold.logits, runs.once_more(engine, [A, B], history=False).logits)


# ---- while no request runs


@pytest.fixture
def pausing(make_engine: Make) -> Any:
    engine = runs.ingested(make_engine())
    yield engine, Pause(engine, runs.IDLE)
    engine.close()
    assert not [each for each in threading.enumerate() if each.name.startswith(runs.IDLE)]
    assert (engine.status().running, engine.status().waiting) == (0, 0)


def begin(engine: RagKV, pause: Pause) -> None:
    """Have a run of three chunks healed, up to a layer of the first one."""
    for question in ("What?", "Why?"):
        engine.prefill(ask([A, B, C], question))
    assert pause.reached.wait(30)


def test_a_request_ends_it_within_a_layer_and_the_chunk_begins_anew(pausing):
    engine, pause = pausing
    begin(engine, pause)
    out: list[Any] = []
    asking = threading.Thread(target=lambda: out.append(engine.prefill(ask([C, D]))))
    asking.start()
    while not engine.status().waiting:
        time.sleep(0.005)
    already = len(pause.seen)
    pause.go.set()
    asking.join(30)
    assert out[0].report.steps["wait"] < 20
    # the layer at which it stood was its last
    assert [each for each in pause.seen[already:] if each[0]][:1] == [(True, pause.layer)]
    assert not pause.seen[already + 1][0]
    engine.wait()
    assert runs.contexts(engine) == {(A, B), (A, B, C)}
    layers = [layer for heals, layer in pause.seen if heals]
    assert layers == [*range(pause.layer + 1), *list(range(runs.LAYERS)) * 3]
    runs.assert_exact(engine, runs.once_more(engine, [A, B, C]))


def test_nothing_is_healed_while_an_answer_is_drawn(make_engine):
    engine = runs.ingested(make_engine())
    drawing = engine.stream(ask([C, D]), max_new_tokens=40)
    next(drawing)
    with engine._requests.turn(engine.loaded) as turn:
        turn.prefilled()  # it runs
        for question in ("What?", "Why?"):
            engine.prefill(ask([A, B], question))
        "".join(drawing)
        time.sleep(0.2)
        assert runs.healing(engine).tokens == 0
    engine.wait()
    assert runs.contexts(engine) == {(A, B)}


def test_closing_ends_it(pausing):
    engine, pause = pausing
    begin(engine, pause)
    closing = threading.Thread(target=engine.close)
    closing.start()
    until(runs.healing(engine)._idle._closed.is_set)
    pause.go.set()
    closing.join(30)
    assert not closing.is_alive()
    assert [layer for heals, layer in pause.seen if heals] == [*range(pause.layer + 1)]
    assert runs.versions(engine) == []


@pytest.mark.parametrize("gone", [A, B])
def test_of_a_run_that_is_healed_nothing_is_left_once_a_chunk_is_deleted(on_disk, gone):
    engine = runs.ingested(on_disk())
    pause = Pause(engine, runs.IDLE)
    begin(engine, pause)
    engine.forget(gone)
    pause.go.set()
    engine.wait()
    assert not [path for path in paths(engine) if gone in path]
    assert runs.versions(engine) == runs.stored(engine) == []
    assert gone not in [
        chunk.text for run in runs.healing(engine)._runs.values() for chunk in run.chunks
    ]
    assert not is_earlier_behind(runs.once_more(engine, [A, B, C]), gone)
