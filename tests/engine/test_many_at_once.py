"""Many callers at once: each gets the answer that it gets alone."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from exact import agree
from langchain_core.messages import HumanMessage
from langchain_ragkv import ChatRagKV
from llama_index.llms.ragkv import RagKVLLM
from threads import each_in_a_thread
from tiny import FAMILIES, LONGROPE, SIZE, ask, random_model, some_chunks, tiny_tokenizer
from transformers import LlamaConfig

from ragkv import Completion, RagKV, StoreConfig
from ragkv.attend.forward import SubsetPass
from ragkv.attend.interface import runs_pass
from ragkv.config import MEMORY
from ragkv.decode import batch as module
from ragkv.decode.batch import batch_of
from ragkv.schedule.requests import RequestQueue

Make = Callable[..., RagKV]
CHUNKS = some_chunks(4)
PROMPTS = [ask(CHUNKS[at:] + CHUNKS[:at], f"\n\nQuestion {at}?") for at in range(4)]
ANSWER = 24


@contextmanager
def recorded_passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Give the number of answers in each decoding pass."""
    counts: list[int] = []
    compute = module.joint_forward

    def counting(loaded: Any, subsets: Sequence[SubsetPass]) -> list[torch.Tensor]:
        counts.append(len(subsets))
        return compute(loaded, subsets)

    with monkeypatch.context() as patch:
        patch.setattr(module, "joint_forward", counting)
        yield counts


@pytest.fixture
def make_engine(make_engine: Make) -> Make:
    """Return engines that keep no history: each answer is computed anew."""
    return partial(make_engine, store=StoreConfig(MEMORY, history_bytes=0))


def endless(kv: RagKV) -> RagKV:
    kv.loaded.model.generation_config.eos_token_id = None
    return kv


def with_chunks(make_engine: Make) -> RagKV:
    kv = endless(make_engine())
    kv.precompute(CHUNKS)
    return kv


def all_at_once(kv: RagKV, settings: Sequence[dict[str, Any]]) -> list[Completion]:
    """Ask the prompts, each in a thread; none begins to decode before all have arrived."""
    found: dict[int, Completion] = {}

    def work(at: int) -> None:
        found[at] = kv.generate(PROMPTS[at % len(PROMPTS)], **settings[at])

    all_begin_together(kv, work, len(settings))
    return [found[at] for at in range(len(settings))]


def all_begin_together(kv: RagKV, work: Callable[[int], None], count: int) -> None:
    with kv.turn():
        threads = [threading.Thread(target=work, args=(at,)) for at in range(count)]
        for thread in threads:
            thread.start()
        while kv.status().waiting + kv.status().running < count:
            threading.Event().wait(0.01)
    for thread in threads:
        thread.join(120)


@pytest.mark.parametrize(
    ("family", "method"),
    [*((family, "query") for family in FAMILIES), ("llama", "full"), ("gpt-oss", "full")],
)
def test_every_answer_is_the_one_it_gets_alone(make_engine, monkeypatch, family, method):
    kv = endless(make_engine(family))
    kv.precompute(CHUNKS, method=method)
    each: dict[str, Any] = {"method": method, "max_new_tokens": ANSWER, "logprobs": 5}
    settings = [
        each,
        {**each, "recompute_ratio": 0.5},
        {**each, "temperature": 0.8, "seed": 3, "drafts": False},
        {**each, "max_new_tokens": ANSWER // 2},
    ]
    alone = [kv.generate(PROMPTS[at], **settings[at]) for at in range(4)]
    with recorded_passes(monkeypatch) as passes:
        found = all_at_once(kv, settings)
    assert max(passes) == 4
    for at in range(4):
        assert agree(found[at], alone[at])
        assert found[at].report.positions == alone[at].report.positions


def test_the_rows_of_a_joint_pass_are_those_of_passes_alone(make_engine):
    """Bit by bit but for the products of several rows."""
    kv = make_engine()
    kv.precompute(CHUNKS)
    loaded, subsets = kv.loaded, []
    for prompt, count in zip(PROMPTS, (1, 3, 2, 1), strict=True):
        prefilled = kv.prefill(prompt)
        ids = np.append(prefilled.token_ids, np.arange(7, 7 + count)).astype(np.int32)
        rows = np.arange(len(ids) - count, len(ids))
        subsets.append(SubsetPass(ids, rows, prefilled.cache, keep=count))
    with kv.turn():
        joint = module.joint_forward(loaded, subsets)
        rows = [[part.clone() for part in one.cache.layer(2)] for one in subsets]
        for one, logits, written in zip(subsets, joint, rows, strict=True):
            (alone,) = module.joint_forward(loaded, [one])
            torch.testing.assert_close(logits, alone, atol=2e-5, rtol=1e-4)
            for part, now in zip(written, one.cache.layer(2), strict=True):
                end = len(one.ids)
                torch.testing.assert_close(part[:, :end], now[:, :end], atol=2e-5, rtol=1e-4)


# ---- steps between a prompt's layers


def test_steps_run_between_the_layers_of_a_prompt_and_change_nothing(make_engine, monkeypatch):
    monkeypatch.setattr(module, "MAX_WAIT_S", 0)
    kv = with_chunks(make_engine)
    settings = {"max_new_tokens": 80, "drafts": False}
    alone = kv.generate(PROMPTS[0], **settings).token_ids
    for method in ("query", "full"):
        expected = kv.prefill(PROMPTS[1], method=method).logits
        with kv.stream(PROMPTS[0], **settings) as stream:
            first = next(stream)
            with recorded_passes(monkeypatch) as passes:
                found = kv.prefill(PROMPTS[1], method=method).logits
            during = len(passes)
            text = first + "".join(stream)
        assert torch.equal(found, expected)
        assert during >= 3
        assert stream.completion.token_ids == alone
        assert stream.completion.text == text


def test_steps_run_while_chunks_are_encoded(make_engine, monkeypatch):
    monkeypatch.setattr(module, "MAX_WAIT_S", 0)
    kv = with_chunks(make_engine)
    settings = {"max_new_tokens": 80, "drafts": False}
    alone = kv.generate(PROMPTS[0], **settings).token_ids
    new, batch, within_step = some_chunks(12)[4:], batch_of(kv.loaded), list[bool]()
    let_pass = RequestQueue.let_pass

    def noted(queue):
        within_step.append(batch.computes_steps)
        return let_pass(queue)

    monkeypatch.setattr(RequestQueue, "let_pass", noted)
    with kv.stream(PROMPTS[0], **settings) as stream:
        next(stream)
        with recorded_passes(monkeypatch) as passes:
            kv.precompute(new)
        assert len(passes) >= 3
        assert within_step  # a request may have the model between two layers, but not
        assert not any(within_step)  # while a step is half computed
        list(stream)
    assert stream.completion.token_ids == alone
    assert all(kv.contains(text) for text in new)


def test_no_pass_has_rows_on_both_sides_of_the_position_limit(monkeypatch):
    model = random_model(LlamaConfig(**{**SIZE, "rope_parameters": LONGROPE}))
    tokens = tiny_tokenizer()(" ".join(some_chunks(6)))["input_ids"]
    prompts = [tiny_tokenizer().decode(tokens[:length]) for length in (150, 225, 300)]
    with RagKV(model, tiny_tokenizer(), store=StoreConfig(MEMORY, history_bytes=0)) as kv:
        endless(kv)
        alone = [kv.generate(prompt, max_new_tokens=60).token_ids for prompt in prompts]
        found: dict[int, list[int]] = {}

        def work(at):
            found[at] = kv.generate(prompts[at], max_new_tokens=60).token_ids

        with recorded_passes(monkeypatch) as passes:
            each_in_a_thread(work, range(3))
        assert [found[at] for at in range(3)] == alone
        assert max(passes) == 2


# ---- answers that fail or end


def test_a_failing_answer_leaves_the_others_alone(make_engine, monkeypatch):
    kv = with_chunks(make_engine)
    settings = {"max_new_tokens": ANSWER, "drafts": False}
    alone = [kv.generate(prompt, **settings).token_ids for prompt in PROMPTS]
    compute, found, errors = module.joint_forward, {}, []
    bad = len(kv.prefill(PROMPTS[1]).token_ids) + 5

    def failing(loaded, subsets):
        logits = compute(loaded, subsets)
        if any(len(one.ids) == bad and one.ids[bad - 1] == alone[1][4] for one in subsets):
            raise ZeroDivisionError
        return logits

    monkeypatch.setattr(module, "joint_forward", failing)

    def work(at):
        try:
            found[at] = kv.generate(PROMPTS[at], **settings).token_ids
        except ZeroDivisionError:
            errors.append(at)

    each_in_a_thread(work, range(4))
    assert 1 in errors
    for at, ids in found.items():
        assert ids == alone[at]
    assert len(found) + len(errors) == 4
    assert kv.status().running == kv.status().waiting == batch_of(kv.loaded).answers == 0


@pytest.mark.parametrize("most", [1, 2, 3])
@pytest.mark.parametrize("when", ["before", "after"])
def test_steps_that_do_not_fit_together_are_computed_in_parts(make_engine, monkeypatch, when, most):
    kv = with_chunks(make_engine)
    settings: dict[str, Any] = {"max_new_tokens": ANSWER, "logprobs": 5}
    alone = [kv.generate(prompt, **settings) for prompt in PROMPTS]
    compute, counts = module.joint_forward, list[int]()

    def scarce(loaded, subsets):
        counts.append(len(subsets))
        fits = len(subsets) <= most
        logits = compute(loaded, subsets) if fits or when == "after" else []
        if not fits:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return logits

    monkeypatch.setattr(module, "joint_forward", scarce)
    found = all_at_once(kv, [settings] * 4)
    assert max(counts) == 4
    assert all(map(agree, found, alone))


@pytest.mark.parametrize("answers", [1, 3])
def test_a_step_that_does_not_fit_beside_a_prompt_waits_for_its_end(
    make_engine, monkeypatch, answers
):
    monkeypatch.setattr(module, "MAX_WAIT_S", 0)
    kv = with_chunks(make_engine)
    settings: dict[str, Any] = {"max_new_tokens": 60, "drafts": False, "logprobs": 5}
    alone = [kv.generate(PROMPTS[at], **settings) for at in range(answers)]
    expected = kv.prefill(PROMPTS[3]).logits
    compute, refused = module.joint_forward, list[int]()

    def scarce(loaded, subsets):
        if runs_pass():
            refused.append(len(subsets))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return compute(loaded, subsets)

    monkeypatch.setattr(module, "joint_forward", scarce)
    streams = [kv.stream(PROMPTS[at], **settings) for at in range(answers)]
    for stream in streams:
        next(stream)
    assert torch.equal(kv.prefill(PROMPTS[3]).logits, expected)
    for stream, before in zip(streams, alone, strict=True):
        list(stream)
        assert agree(stream.completion, before)
    assert 1 in refused


def test_an_interrupted_leader_leaves_the_others_alone(make_engine, monkeypatch):
    kv = with_chunks(make_engine)
    settings = {"max_new_tokens": ANSWER, "drafts": False}
    alone = [kv.generate(prompt, **settings).token_ids for prompt in PROMPTS]
    compute, found, interrupted = module.joint_forward, {}, []

    def interrupt(loaded, subsets):
        logits = compute(loaded, subsets)
        if len(subsets) == 4 and not interrupted:
            interrupted.append(threading.get_ident())
            raise KeyboardInterrupt
        return logits

    monkeypatch.setattr(module, "joint_forward", interrupt)

    def work(at):
        try:
            found[at] = kv.generate(PROMPTS[at], **settings).token_ids
        except KeyboardInterrupt:
            assert threading.get_ident() in interrupted

    all_begin_together(kv, work, 4)
    assert len(interrupted) == 1
    assert len(found) == 3
    for at, ids in found.items():
        assert ids == alone[at]
    assert kv.generate(PROMPTS[0], **settings).token_ids == alone[0]


def test_a_closed_stream_leaves_the_others_alone(make_engine):
    kv = with_chunks(make_engine)
    settings = {"max_new_tokens": 40}
    alone = [kv.generate(prompt, **settings).token_ids for prompt in PROMPTS]
    streams = [kv.stream(prompt, **settings) for prompt in PROMPTS]
    next(streams[1])
    streams[1].close()
    streams[2].close(wait=False)
    for at in (0, 3):
        list(streams[at])
        assert streams[at].completion.token_ids == alone[at]
    kv.wait()
    with kv.turn():
        assert kv.generate(PROMPTS[2], **settings).token_ids == alone[2]


def test_who_holds_the_model_is_not_waited_for(make_engine):
    kv = with_chunks(make_engine)
    stream = kv.stream(PROMPTS[0], max_new_tokens=60)
    next(stream)
    with kv.turn():
        answer = kv.generate(PROMPTS[1], max_new_tokens=5)
    rest = list(stream)
    assert len(answer.token_ids) == 5
    assert rest


# ---- both frameworks


def test_frameworks_batch_without_a_new_argument(make_engine, monkeypatch):
    kv = with_chunks(make_engine)
    chat, llm = ChatRagKV(kv=kv, max_tokens=ANSWER), RagKVLLM(kv=kv, max_new_tokens=ANSWER)
    messages = [[HumanMessage(prompt[0]["content"])] for prompt in PROMPTS]
    texts = [prompt[0]["content"] for prompt in PROMPTS]
    alone = [chat.invoke(each).content for each in messages]
    plain = [llm.complete(text).text for text in texts]

    async def gathered():
        return [each.text for each in await asyncio.gather(*map(llm.acomplete, texts))]

    ways = {
        "batch": lambda: [each.content for each in chat.batch(messages)],
        "abatch": lambda: [each.content for each in asyncio.run(chat.abatch(messages))],
        "gather": lambda: asyncio.run(gathered()),
    }
    for name, way in ways.items():
        with recorded_passes(monkeypatch) as passes:
            assert way() == (plain if name == "gather" else alone)
        assert max(passes) > 1
