"""Which request begins when."""

import gc
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from tiny import ask, some_chunks, tiny_tokenizer

from ragkv import RagKV
from ragkv.errors import ConfigError
from ragkv.model.lock import ModelLock
from ragkv.schedule.requests import Cancelled, RequestQueue

Make = Callable[..., RagKV]
CHUNKS = some_chunks(3)
PROMPT = ask(CHUNKS)


class Requests:
    """Requests in threads, whose prompts are computed and whose answers end when a test says so."""

    def __init__(self, loaded: Any, limits: dict[str, Any]) -> None:
        self.requests = RequestQueue(ModelLock())
        self.requests.configure(**limits)
        self.begun: list[str] = []
        self.changed = threading.Condition()
        self._loaded = loaded
        self._ends = dict[str, threading.Event]()
        self._prefilled = dict[str, threading.Event]()
        self._threads: list[threading.Thread] = []

    def ask(self, name: str, **settings: Any) -> None:
        self._ends[name], self._prefilled[name] = threading.Event(), threading.Event()
        before = self.requests.waiting + self.requests.running
        thread = threading.Thread(target=self._work, args=(name, settings), daemon=True)
        thread.start()
        self._threads.append(thread)
        while self.requests.waiting + self.requests.running == before and thread.is_alive():
            threading.Event().wait(0.005)

    def _work(self, name: str, settings: dict[str, Any]) -> None:
        with self.requests.turn(self._loaded, **settings) as turn:
            with self.changed:
                self.begun.append(name)
                self.changed.notify_all()
            self._prefilled[name].wait(20)
            turn.prefilled()
            self._ends[name].wait(20)

    def prefilled(self, name: str) -> None:
        self._prefilled[name].set()

    def end(self, name: str) -> None:
        self.prefilled(name)
        self._ends[name].set()

    def begins(self, *names: str) -> bool:
        """Whether these are all that have begun, in this order, within a moment."""
        with self.changed:
            return self.changed.wait_for(lambda: self.begun == list(names), 5)

    def join(self) -> None:
        for name in self._ends:
            self.end(name)
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive()
        assert self.requests.running == self.requests.waiting == 0


@pytest.fixture
def requests(make_engine: Make) -> Callable[..., Requests]:
    loaded = make_engine().loaded
    return lambda **limits: Requests(loaded, limits)


def test_one_prompt_is_computed_at_a_time(requests):
    made = requests()
    made.ask("a")
    made.ask("b")
    assert made.begins("a")
    assert (made.requests.running, made.requests.waiting) == (1, 1)
    made.prefilled("a")
    assert made.begins("a", "b")
    assert made.requests.running == 2
    made.join()


def test_so_many_run_at_once(requests):
    made = requests(max_running=2)
    for name in "abc":
        made.ask(name)
        made.prefilled(name)
    assert made.begins("a", "b")
    assert made.requests.waiting == 1
    made.end("a")
    assert made.begins("a", "b", "c")
    made.join()


def test_what_does_not_fit_waits_but_never_for_ever(requests, make_engine):
    architecture = make_engine().loaded.architecture
    row = architecture.values_per_token * 4
    made = requests(kv_bytes=100 * row)
    made.ask("small", tokens=60)
    made.ask("large", tokens=50)
    made.prefilled("small")
    assert made.begins("small")
    assert made.requests.waiting == 1
    made.end("small")
    assert made.begins("small", "large")
    made.ask("larger than the budget", tokens=1000)
    made.end("large")
    assert made.begins("small", "large", "larger than the budget")
    made.join()


def test_the_best_cached_goes_first_and_none_waits_for_ever(requests):
    made = requests()
    made.ask("first")
    made.ask("computed", cached_share=0.0)
    for at in range(4):
        made.ask(f"cached {at}", cached_share=float(at))
    # cached 3 and cached 2 overtook all that came before them
    order = ["first", "cached 3", "cached 2", "computed", "cached 0", "cached 1"]
    for at, name in enumerate(order):
        assert made.begins(*order[: at + 1])
        made.end(name)
    made.join()


@pytest.mark.parametrize("where", ["for its turn", "for the model"])
def test_a_cancelled_request_leaves_the_queue(requests, where):
    made, found = requests(), []
    if where == "for its turn":
        made.ask("first")
    else:
        held, done = threading.Event(), threading.Event()

        def hold():
            with made.requests.lock:
                held.set()
                done.wait(20)

        threading.Thread(target=hold, daemon=True).start()
        assert held.wait(5)
    cancelled = threading.Event()

    def waits():
        try:
            with made.requests.turn(made._loaded, cancelled=cancelled.is_set):
                found.append("began")
        except Cancelled:
            found.append("cancelled")

    thread = threading.Thread(target=waits, daemon=True)
    thread.start()
    while made.requests.waiting + made.requests.running == 0:
        threading.Event().wait(0.005)
    cancelled.set()
    thread.join(10)
    assert found == ["cancelled"]
    if where == "for the model":
        done.set()
    else:
        made.prefilled("first")
    made.ask("next")
    assert made.begins(*(["first"] if where == "for its turn" else []), "next")
    made.join()


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_running": 0},
        {"max_running": 1.5},
        {"kv_bytes": 0},
    ],
)
def test_wrong_limits_are_refused(make_engine, wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        make_engine(**wrong)


def test_engines_over_one_model_share_the_queue(make_engine):
    kv = make_engine(max_running=3)
    with RagKV(kv.loaded, store=":memory:", namespace="other") as other:
        assert other._requests is kv._requests
        assert kv._requests.max_running == 3
        with RagKV(kv.loaded, store=":memory:", max_running=1):
            assert kv._requests.max_running == 1


def test_idle_work_begins_a_moment_after_the_last_request(make_engine):
    loaded, queue, begun = make_engine().loaded, RequestQueue(ModelLock()), list[float]()

    def work():
        with queue.turn(loaded, give_way=lambda: None, cancelled=lambda: False):
            begun.append(time.perf_counter())

    idle = threading.Thread(target=work)
    with queue.turn(loaded):
        idle.start()
        before_end = time.perf_counter()
    idle.join(20)
    assert begun[0] - before_end >= 0.1


def test_memory_is_free_of_a_prompt_that_ended_before_its_rows_were_placed(
    make_engine, monkeypatch
):
    kv = make_engine()
    kv.precompute(CHUNKS)
    kv.loaded.workspace.release()
    gc.collect()
    gc.disable()
    try:
        with monkeypatch.context() as patch:
            patch.setattr("ragkv.engine.planner.choose", lambda *_: 1 / 0)
            with suppress(ZeroDivisionError):
                kv.generate(PROMPT)
        assert [piece.is_lent for piece in kv.loaded.workspace._pieces] == [False]
    finally:
        gc.enable()


# ---- what answers say of their end, and of their tokens


def test_why_an_answer_ended(make_engine):
    kv = make_engine()
    kv.loaded.model.generation_config.eos_token_id = None
    plain = kv.generate(PROMPT, max_new_tokens=20)
    assert plain.finish_reason == "length"
    token = next(
        t for at, t in enumerate(plain.token_ids) if at > 3 and t not in plain.token_ids[:at]
    )
    ended = kv.generate(PROMPT, max_new_tokens=20, stop_token_ids=[token])
    assert ended.finish_reason == "stop"
    assert ended.token_ids[-1] == token
    stop = tiny_tokenizer().decode([token])
    if stop.strip():
        assert kv.generate(PROMPT, max_new_tokens=20, stop=stop).finish_reason == "stop"
    kv.loaded.model.generation_config.eos_token_id = token
    assert kv.generate(PROMPT, max_new_tokens=20).token_ids == ended.token_ids
    past = kv.generate(PROMPT, max_new_tokens=20, ignore_eos=True)
    assert (past.token_ids, past.finish_reason) == (plain.token_ids, "length")


@pytest.mark.parametrize("settings", [{}, {"method": "full"}])
def test_log_probabilities_are_the_models_own(make_engine, settings):
    kv = make_engine()
    kv.loaded.model.generation_config.eos_token_id = None
    kv.precompute(CHUNKS)
    given = {"recompute_ratio": 1.0, "max_new_tokens": 12, **settings}
    answer = kv.generate(PROMPT, logprobs=3, temperature=0.7, seed=1, **given)
    assert kv.generate(PROMPT, **given).logprobs == ()
    prompt = kv.prefill(PROMPT).token_ids
    with torch.no_grad():
        logits = kv.loaded.model(torch.tensor([[*prompt, *answer.token_ids]])).logits[0]
    expected = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    assert [one.token_id for one in answer.logprobs] == answer.token_ids
    for row, one in zip(expected, answer.logprobs, strict=True):
        assert one.logprob == pytest.approx(float(row[one.token_id]), abs=1e-4)
        best = row.topk(3)
        assert [token for token, _ in one.top] == best.indices.tolist()
        assert [p for _, p in one.top] == pytest.approx(best.values.tolist(), abs=1e-4)
    with kv.stream(PROMPT, logprobs=0, **given) as stream:
        next(stream)
        assert stream.logprobs
        list(stream)
    assert stream.logprobs == stream.completion.logprobs
    assert stream.logprobs[0].top == ()
