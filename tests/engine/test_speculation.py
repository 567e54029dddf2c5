"""Prompts computed ahead: the same answers, never in a request's way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from pausing import Pause, speculating_threads
from tiny import ask, some_chunks

from ragkv import Completion, RagKV, StoreConfig
from ragkv.config import MEMORY
from ragkv.engine.full import FullPrefill
from ragkv.engine.speculation import Speculation
from ragkv.engine.speculations import MOST_SPECULATIONS
from ragkv.errors import ClosedError, ConfigError
from ragkv.select import method_names

Make = Callable[..., RagKV]
CHUNKS = some_chunks(4)
PROMPT = ask(CHUNKS[:3])
OTHERS = {
    "changed": ask([*CHUNKS[:2], CHUNKS[3]]),
    "reordered": ask([CHUNKS[1], CHUNKS[0], CHUNKS[2]]),
    "shortened": ask(CHUNKS[:2]),
    "lengthened": ask(CHUNKS),
    "another question": ask(CHUNKS[:3], "\n\nWhy?"),
}
METHODS = [name for name in method_names() if "cacheclip" not in name]


@pytest.fixture
def engine(make_engine: Make) -> Iterator[RagKV]:
    kv = make_engine()
    kv.precompute(CHUNKS)
    yield kv
    kv.close()
    assert not speculating_threads()
    assert (kv.status().running, kv.status().waiting, kv._requests.nbytes) == (0, 0, 0)


def answer(kv: RagKV, prompt: Any = PROMPT, **settings: Any) -> Completion:
    return kv.generate(prompt, **{"max_new_tokens": 12, **settings})


def alone(make_engine: Make, prompt: Any = PROMPT, **settings: Any) -> Completion:
    kv = make_engine()
    reuse = {name: settings[name] for name in ("method",) if name in settings}
    kv.precompute(CHUNKS, **reuse)
    return answer(kv, prompt, **settings)


def computed(speculation: Speculation) -> Speculation:
    assert speculation.wait(30)
    assert speculation.state == "finished"
    return speculation


def is_free(kv: RagKV) -> bool:
    return not speculating_threads() and not kv._requests.nbytes and not kv.status().running


# ---- the same answer


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"recompute_ratio": 0.5},
        {"recompute_ratio": 1.0},
        {"recompute_ratio": "auto"},
        {"repair_ahead": True},
        *({"method": name} for name in METHODS),
    ],
    ids=str,
)
def test_an_answer_goes_on_from_its_prompt(make_engine: Make, settings: dict[str, Any]) -> None:
    kv = make_engine()
    kv.precompute(CHUNKS, **{name: settings[name] for name in settings if name == "method"})
    expected = alone(make_engine, **settings)
    pause = Pause(kv)
    pause.go.set()
    computed(kv.speculate(PROMPT, **settings))
    before = len(pause.seen)
    found = answer(kv, **settings)
    assert found.token_ids == expected.token_ids
    assert found.report.positions == expected.report.positions
    assert found.report.misses == expected.report.misses
    assert found.report.ahead_s > 0
    assert found.report.ttft_s == pytest.approx(sum(found.report.steps.values()))
    steps = found.report.completion_tokens - 1  # and no pass over the prompt
    assert len(pause.seen) - before <= 4 * steps
    assert (kv.status().speculations.used, kv.status().speculations.wasted_s) == (1, 0)
    assert kv.status().speculations.overlap_s == found.report.ahead_s
    assert is_free(kv)


@pytest.mark.parametrize(
    "drawing",
    [
        {"temperature": 1.0, "seed": 3},
        {"logprobs": 2},
        {"drafts": False},
        {"max_new_tokens": 400},
    ],
    ids=str,
)
def test_however_it_is_drawn(engine: RagKV, make_engine: Make, drawing: dict[str, Any]) -> None:
    engine.model.generation_config.eos_token_id = None
    expected = alone(make_engine, **drawing, ignore_eos=True)
    computed(engine.speculate(PROMPT))
    found = answer(engine, **drawing, ignore_eos=True)
    assert found.token_ids == expected.token_ids
    assert found.logprobs == expected.logprobs
    assert engine.status().speculations.used == 1


@pytest.mark.parametrize("store", [MEMORY, StoreConfig(MEMORY, history_bytes=0)], ids=str)
def test_with_and_without_a_tree(make_engine: Make, store: Any) -> None:
    kv, cold = make_engine(store=store), make_engine(store=store)
    for each in (kv, cold):
        each.precompute(CHUNKS)
    computed(kv.speculate(PROMPT))
    first, expected = answer(kv), answer(cold)
    assert first.token_ids == expected.token_ids
    later = [*PROMPT, {"role": "assistant", "content": first.text}, *ask([], "And then?")]
    second, follows = answer(kv, later), answer(cold, later)
    assert second.token_ids == follows.token_ids
    assert second.report.conversation_tokens == follows.report.conversation_tokens


def test_prompts_without_known_chunks(make_engine: Make) -> None:
    kv = make_engine()
    computed(kv.speculate("Words that nobody has precomputed."))
    found = answer(kv, "Words that nobody has precomputed.")
    assert found.token_ids == answer(make_engine(), "Words that nobody has precomputed.").token_ids
    assert kv.status().speculations.used == 1


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("when", ["running", "finished"])
def test_another_prompt_is_answered_as_ever(
    engine: RagKV, make_engine: Make, other: str, when: str
) -> None:
    expected = alone(make_engine, OTHERS[other])
    pause = Pause(engine)
    speculation = engine.speculate(PROMPT)
    if when == "finished":
        pause.go.set()
        computed(speculation)
    assert pause.reached.wait(30)
    changed = engine.speculate(OTHERS[other], instead_of=speculation)
    pause.go.set()
    assert changed is not speculation
    assert speculation.wait(30)
    assert speculation.state == "cancelled"
    computed(changed)
    found = answer(engine, OTHERS[other])
    assert found.token_ids == expected.token_ids
    assert found.report.positions == expected.report.positions
    report = engine.status().speculations
    assert (report.started, report.cancelled, report.used) == (2, 1, 1)
    assert report.wasted_s > 0
    assert is_free(engine)


@pytest.mark.parametrize("other", OTHERS)
def test_a_kept_prompt_changes_no_other_answer(
    engine: RagKV, make_engine: Make, other: str
) -> None:
    kept = computed(engine.speculate(PROMPT))
    found, expected = answer(engine, OTHERS[other]), alone(make_engine, OTHERS[other])
    assert found.token_ids == expected.token_ids
    assert found.report.positions == expected.report.positions
    assert found.report.ahead_s == 0
    assert kept.state == "finished"
    kept.cancel()
    assert is_free(engine)


@pytest.mark.parametrize("changes", [{"recompute_ratio": 0.5}, {"sink": ""}, {"method": "full"}])
def test_other_settings_are_another_prompt(
    engine: RagKV, make_engine: Make, changes: dict[str, Any]
) -> None:
    computed(engine.speculate(PROMPT))
    assert answer(engine, **changes).token_ids == alone(make_engine, **changes).token_ids
    assert engine.status().speculations.used == 0


def test_the_same_top_k_is_kept(engine: RagKV) -> None:
    first = engine.speculate(PROMPT)
    assert engine.speculate(PROMPT, instead_of=first) is first
    computed(first)
    assert engine.speculate(PROMPT, instead_of=first) is first
    answer(engine)
    assert engine.speculate(PROMPT, instead_of=first) is not first


def test_changed_weights(engine: RagKV) -> None:
    computed(engine.speculate(PROMPT))
    with torch.no_grad():
        engine.model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    assert answer(engine).report.ahead_s == 0


def test_each_namespace_has_its_own(engine: RagKV) -> None:
    mine = computed(engine.speculate(PROMPT))
    with RagKV(engine.loaded, store=MEMORY, namespace="other") as other:
        report = answer(other).report
        assert (report.ahead_s, report.reused_tokens) == (0, 0)
        assert other.status().speculations.started == 0
    assert mine.state == "finished"


def test_what_is_deleted_is_in_no_speculation(engine: RagKV) -> None:
    kept = computed(engine.speculate(PROMPT))
    engine.forget(CHUNKS[1])
    assert kept.state == "cancelled"
    assert is_free(engine)
    assert answer(engine).report.ahead_s == 0


# ---- requests first


def test_a_request_waits_for_the_one_that_runs(engine: RagKV, make_engine: Make) -> None:
    pause, found = Pause(engine), list[Completion]()
    speculation = engine.speculate(PROMPT)
    assert pause.reached.wait(30)
    asking = threading.Thread(target=lambda: found.append(answer(engine)))
    asking.start()
    while not speculation.is_wanted:
        threading.Event().wait(0.005)
    other = threading.Thread(target=answer, args=(engine, OTHERS["changed"]))
    other.start()
    while not engine.status().waiting:  # it does not give way to others any more
        threading.Event().wait(0.005)
    pause.go.set()
    asking.join(30)
    other.join(30)
    assert found[0].token_ids == alone(make_engine).token_ids
    assert found[0].report.ahead_s > 0
    assert (engine.status().speculations.interrupted, engine.status().speculations.used) == (0, 1)


def test_a_reader_who_leaves_while_waiting(engine: RagKV) -> None:
    pause = Pause(engine)
    speculation = engine.speculate(PROMPT)
    assert pause.reached.wait(30)
    stream = engine.stream(PROMPT)
    while not speculation.is_wanted:
        threading.Event().wait(0.005)
    stream.close(wait=False)
    while speculation.state != "cancelled":
        threading.Event().wait(0.005)
    pause.go.set()
    assert speculation.wait(30)


def test_another_request_goes_first(engine: RagKV, make_engine: Make) -> None:
    pause, found = Pause(engine), list[Completion]()
    speculation = engine.speculate(PROMPT)
    assert pause.reached.wait(30)
    asking = threading.Thread(target=lambda: found.append(answer(engine, OTHERS["changed"])))
    asking.start()
    while not engine.status().waiting:
        threading.Event().wait(0.005)
    before = len(pause.seen)
    pause.go.set()
    asking.join(30)
    computed(speculation)
    ahead = [layer for speculates, layer in pause.seen[before:] if speculates]
    assert pause.seen[before] in {(True, pause.layer), (False, 0)}  # one layer, at the most
    assert pause.seen[before + 1][0] is False
    assert ahead.count(0) >= 1  # it began anew
    assert found[0].token_ids == alone(make_engine, OTHERS["changed"]).token_ids
    assert engine.status().speculations.interrupted >= 1
    assert engine.status().speculations.wasted_s > 0
    assert answer(engine).report.ahead_s > 0


def test_a_request_goes_before_one_that_waits(engine: RagKV) -> None:
    pause = Pause(engine)
    pause.go.set()
    with engine.turn():
        speculation = engine.speculate(PROMPT)
        asking = threading.Thread(target=answer, args=(engine, OTHERS["changed"]))
        asking.start()
        while not engine.status().waiting + engine.status().running:
            threading.Event().wait(0.005)
        assert speculation.state == "waiting"
    asking.join(30)
    computed(speculation)
    assert pause.seen[0] == (False, 0)


def test_it_waits_until_answers_have_ended(engine: RagKV) -> None:
    engine.model.generation_config.eos_token_id = None
    with engine.stream(OTHERS["changed"], max_new_tokens=2000) as stream:
        next(stream)
        speculation = engine.speculate(PROMPT)
        for _ in range(20):
            next(stream)
        assert speculation.state == "waiting"
        assert engine.status().running == 1
    computed(speculation)


def test_one_that_waits_leaves_the_prompt_to_its_request(engine: RagKV) -> None:
    with engine.turn():
        speculation = engine.speculate(PROMPT)
        assert answer(engine).report.ahead_s == 0
        assert speculation.state == "cancelled"
    assert speculation.wait(30)


def test_who_wants_the_model_gets_it(engine: RagKV) -> None:
    pause = Pause(engine)
    speculation = engine.speculate(PROMPT)
    assert pause.reached.wait(30)
    held = threading.Event()

    def hold() -> None:
        with engine.turn():
            assert speculation.state == "waiting"
            held.set()

    holding = threading.Thread(target=hold)
    holding.start()
    while not engine._lock.is_wanted():
        threading.Event().wait(0.005)
    pause.go.set()
    assert held.wait(30)
    holding.join(30)
    computed(speculation)


# ---- nothing is left


def test_cancelled_while_waiting(engine: RagKV) -> None:
    with engine.turn():
        speculation = engine.speculate(PROMPT)
        speculation.cancel()
        assert speculation.wait(30)
    assert is_free(engine)
    assert engine.status().speculations.cancelled == 1


def test_cancelled_while_running(engine: RagKV) -> None:
    pause = Pause(engine)
    speculation = engine.speculate(PROMPT)
    assert pause.reached.wait(30)
    speculation.cancel()
    pause.go.set()
    assert speculation.wait(30)
    assert (True, pause.layer + 1) not in pause.seen[pause.seen.index((True, pause.layer)) :]
    assert is_free(engine)
    assert (engine.status().speculations.finished, engine.status().speculations.cancelled) == (0, 1)
    assert answer(engine).report.ahead_s == 0


def test_cancelled_when_finished(engine: RagKV) -> None:
    speculation = computed(engine.speculate(PROMPT))
    assert engine._requests.nbytes > 0
    assert engine.status().running == 0
    speculation.cancel()
    speculation.cancel()
    assert is_free(engine)
    assert engine.status().speculations.cancelled == 1
    assert answer(engine).report.ahead_s == 0


def test_an_error_changes_no_answer(
    engine: RagKV,
    make_engine: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(FullPrefill, "prepare", fail)
    speculation = engine.speculate(PROMPT)
    assert speculation.wait(30)
    assert speculation.state == "failed"
    assert "planted" in caplog.text
    assert answer(engine).token_ids == alone(make_engine).token_ids
    assert (engine.status().speculations.failed, engine.status().speculations.used) == (1, 0)


def test_an_error_in_a_layer_changes_no_answer(engine: RagKV, make_engine: Make) -> None:
    pause, found = Pause(engine), list[Completion]()
    speculation = engine.speculate(PROMPT)
    assert pause.reached.wait(30)
    asking = threading.Thread(target=lambda: found.append(answer(engine)))
    asking.start()
    while not speculation.is_wanted:
        threading.Event().wait(0.005)
    hook = engine.model.model.layers[3].register_forward_pre_hook(lambda *_: _only_there())
    pause.go.set()
    asking.join(30)
    hook.remove()
    assert speculation.state == "failed"
    assert found[0].token_ids == alone(make_engine).token_ids


def _only_there() -> None:
    if threading.current_thread() in speculating_threads():
        raise RuntimeError("planted")


def test_they_are_bounded_in_number(engine: RagKV) -> None:
    with engine.turn():
        made = [engine.speculate(ask(CHUNKS, f"\n\nQuestion {n}?")) for n in range(6)]
        assert [each.is_over for each in made] == [True, True] + [False] * MOST_SPECULATIONS
    for each in made[2:]:
        computed(each)
    assert answer(engine, ask(CHUNKS, "\n\nQuestion 5?")).report.ahead_s > 0


def test_kept_ones_make_room_for_a_request(make_engine: Make) -> None:
    kv = make_engine(kv_bytes=1)
    kept = computed(kv.speculate(PROMPT))
    assert answer(kv, OTHERS["changed"]).report.ahead_s == 0
    assert kept.state == "cancelled"
    assert is_free(kv)


def test_closing_ends_all(make_engine: Make) -> None:
    kv = make_engine()
    pause = Pause(kv)
    kept = kv.speculate(PROMPT)
    assert pause.reached.wait(30)
    closing = threading.Thread(target=kv.close)
    closing.start()
    while not kept.is_over:
        threading.Event().wait(0.005)
    pause.go.set()
    closing.join(30)
    assert kept.wait(30)
    assert is_free(kv)
    with pytest.raises(ClosedError):
        kv.speculate(PROMPT)


def test_wrong_settings_are_said_at_once(engine: RagKV) -> None:
    with pytest.raises(ConfigError):
        engine.speculate(PROMPT, recompute_ratio=2)
    with pytest.raises(ConfigError):
        engine.speculate([])
    assert engine.status().speculations.started == 0
