"""Versions are computed while no request waits or runs, and give way to the next one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from pausing import Pause
from tiny import ask, some_chunks
from unshared import QUERY

from ragkv import RagKV, ReuseConfig, StoreConfig
from ragkv.engine.versions import MOST_WANTED

Make = Callable[..., RagKV]
CHUNKS = some_chunks(4)
A, B, C, D = CHUNKS
ON = ReuseConfig(method=QUERY)
LAYERS = 4
IDLE = "ragkv-idle"


@pytest.fixture
def engine(make_engine: Make) -> Iterator[RagKV]:
    kv = make_engine(reuse=ON)
    kv.precompute(CHUNKS)
    yield kv
    kv.close()
    assert not [each for each in threading.enumerate() if each.name.startswith(IDLE)]
    assert (kv.status().running, kv.status().waiting) == (0, 0)


def texts_kept(kv: RagKV) -> set[tuple[str, ...]]:
    kept = kv._reuse.versions.kept._all()
    return {(*each.version.prefix, each.version.text) for each in kept}


def pausing(kv: RagKV) -> Pause:
    return Pause(kv, IDLE)


def test_a_request_ends_a_capture_within_a_layer_and_it_begins_anew(engine: RagKV) -> None:
    pause = pausing(engine)
    engine.prefill(ask([A, B]))
    assert pause.reached.wait(30)
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
    assert texts_kept(engine) == {(A, B), (C, D)}
    captured = [layer for captures, layer in pause.seen if captures]
    assert captured == [*range(pause.layer + 1), *range(LAYERS), *range(LAYERS)]


def test_while_an_answer_is_drawn_nothing_is_captured(engine: RagKV) -> None:
    drawing = engine.stream(ask([C, D]), max_new_tokens=40)
    next(drawing)
    with engine._requests.turn(engine.loaded) as turn:
        turn.prefilled()  # it runs
        engine.prefill(ask([A, B]))
        "".join(drawing)
        time.sleep(0.2)
        assert texts_kept(engine) == set()
    engine.wait()
    assert texts_kept(engine) == {(A, B), (C, D)}


def test_answers_are_those_without_captures_beside_them(engine: RagKV, make_engine: Make) -> None:
    plain = make_engine(store=StoreConfig(":memory:", history_bytes=0))
    plain.precompute(CHUNKS)
    for chunks in ([A, B], [C, D], [B, A], [D, C]):
        wanted = plain.prefill(ask(chunks), recompute_ratio=1.0).logits
        assert torch.equal(engine.prefill(ask(chunks), recompute_ratio=1.0).logits, wanted)


def test_closing_computes_no_more_of_them(engine: RagKV) -> None:
    pause = pausing(engine)
    engine.prefill(ask([A, B]))
    assert pause.reached.wait(30)
    closing = threading.Thread(target=engine.close)
    closing.start()
    time.sleep(0.1)
    pause.go.set()
    closing.join(30)
    assert not closing.is_alive()
    assert [layer for captures, layer in pause.seen if captures] == [*range(pause.layer + 1)]


def test_of_many_prompts_the_last_ones_are_remembered(
    engine: RagKV, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragkv.engine.versions.MOST_WANTED", 2)
    assert MOST_WANTED > 2
    with engine._requests.turn(engine.loaded) as turn:
        turn.prefilled()
        engine.prefill(ask([A, B]))
        while engine._reuse.versions._wanted:
            time.sleep(0.005)  # it is the one that waits for an idle model
        for chunks in ([C, D], [B, C], [D, A]):
            engine.prefill(ask(chunks))
        assert engine._reuse.background._idle._work_queue.qsize() == 0  # nothing piles up
    engine.wait()
    assert texts_kept(engine) == {(A, B), (B, C), (D, A)}
