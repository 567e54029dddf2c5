"""Prompts that begin with a former prompt and its answer continue its rows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tiny import FAMILIES, LONGROPE, SIZE, some_chunks, tiny_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig

from ragkv import Completion, RagKV, StoreConfig
from ragkv.engine.pipeline import Pipeline
from ragkv.model.calls import cache_argument
from ragkv.select import method_names

Make = Callable[..., RagKV]
Chat = list[dict[str, str]]
CHUNKS = some_chunks(3)
TOLERANCE = 5e-5
RATIOS = (0.2, "auto")


def ask(question: str = "What does the text say?", chunks: list[str] = CHUNKS) -> Chat:
    return [{"role": "user", "content": "\n\n".join([*chunks, question])}]


def and_then(chat: Chat, answer: Completion, question: str = "And then?") -> Chat:
    """Without blanks that would become one token with the end of the prompt."""
    return [
        *chat,
        {"role": "assistant", "content": answer.text.lstrip()},
        {"role": "user", "content": question},
    ]


def distance(engine: RagKV, ids: list[int], logits: torch.Tensor) -> float:
    with torch.no_grad():
        full = engine.model(torch.tensor([ids])).logits[0, -1].float()
    return float((logits - full).abs().max())


def rows(engine: RagKV, cache: Any, tokens: int) -> torch.Tensor:
    return torch.stack([cache.keys[:, :, :tokens], cache.values[:, :, :tokens]]).clone()


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Return the rows of every answer, as they were when it was finished."""
    found, keep = list[torch.Tensor](), Pipeline._keep

    def noted(pipeline: Pipeline, request: Any, plan: Any, cache: Any, drawn: Any) -> None:
        tokens = len(plan.ids) + len(drawn.token_ids) - 1
        found.append(rows(None, cache, tokens))  # type: ignore[arg-type]
        keep(pipeline, request, plan, cache, drawn)

    monkeypatch.setattr(Pipeline, "_keep", noted)
    return found


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return the positions that the recomputing passes computed, pass by pass."""
    found, recompute = list[list[int]](), Pipeline._recompute

    def noted(pipeline: Pipeline, request: Any, plan: Any) -> torch.Tensor:
        found.append(plan.rows.tolist())
        return recompute(pipeline, request, plan)

    monkeypatch.setattr(Pipeline, "_recompute", noted)
    return found


def assert_adds_up(answer: Any) -> None:
    report = answer.report
    counts = np.bincount(list(report.positions), minlength=6).tolist()
    assert counts == [
        report.sink_tokens,
        report.reused_tokens,
        report.recomputed_tokens,
        report.fresh_tokens,
        report.conversation_tokens,
        report.prefix_tokens,
    ]
    assert sum(counts) == report.prompt_tokens


# ---- exact rows


@pytest.mark.parametrize("known", [True, False], ids=["ratio 1", "full prefill"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_of_exact_turns_is_a_full_prefill(
    make_engine: Make, family: str, known: bool
) -> None:
    engine, chat = make_engine(family), ask()
    if known:
        engine.precompute(CHUNKS)
    for turn in range(4):
        out = engine.prefill(chat, recompute_ratio=1.0)
        assert distance(engine, out.token_ids, out.logits) < TOLERANCE
        assert (out.report.conversation_tokens > 300) == (turn > 0)
        assert_adds_up(out)
        answer = engine.generate(chat, recompute_ratio=1.0, max_new_tokens=8)
        assert answer.report.conversation_tokens == out.report.conversation_tokens
        chat = and_then(chat, answer, f"And then, {turn}?")
    assert out.report.recomputed_tokens == 0


@pytest.mark.parametrize("ratio", [0.0, 0.2, "auto"])
def test_exact_rows_serve_every_ratio(make_engine: Make, ratio: float | str) -> None:
    engine = make_engine()
    engine.precompute(CHUNKS)
    engine.generate(ask(), recompute_ratio=1.0, max_new_tokens=3)
    out = engine.prefill(ask("Another question?"), recompute_ratio=ratio)
    assert out.report.prefix_tokens > 340
    assert out.report.recomputed_tokens == 0
    assert out.report.misses == ()
    assert [use.source for use in out.report.chunks] == ["prefix"] * 3
    assert [use.text for use in out.report.chunks] == CHUNKS
    assert distance(engine, out.token_ids, out.logits) < TOLERANCE
    assert_adds_up(out)


def test_chunks_behind_an_exact_prefix_are_repaired(make_engine: Make) -> None:
    engine, chunks = make_engine(), some_chunks(5)
    engine.precompute(chunks)
    engine.generate(ask(chunks=chunks[:3]), recompute_ratio=1.0, max_new_tokens=3)
    out = engine.prefill(ask(chunks=chunks), recompute_ratio=0.3)
    report = out.report
    assert [use.source for use in report.chunks] == ["prefix"] * 3 + ["entry"] * 2
    assert report.recomputed_tokens == round(
        0.3 * (report.recomputed_tokens + report.reused_tokens)
    )
    assert_adds_up(out)
    full = engine.prefill(ask(chunks=chunks), recompute_ratio=1.0)
    assert full.report.prefix_tokens == report.prefix_tokens
    assert distance(engine, full.token_ids, full.logits) < TOLERANCE


def test_a_chunk_in_which_a_former_prompt_ends_is_one(make_engine: Make) -> None:
    engine, (first, second) = make_engine(), some_chunks(2)
    engine.precompute([first, second])
    engine.generate(f"{first}\n\n{second[:120]}", recompute_ratio=1.0, max_new_tokens=1)
    report = engine.prefill(f"{first}\n\n{second}\n\nSo?", recompute_ratio=0.0).report
    kept = report.conversation_tokens + report.prefix_tokens
    assert [(use.text, use.recomputed) for use in report.chunks] == [(first, 0), (second, 0)]
    assert report.chunks[1].source in ("conversation", "prefix")
    assert report.chunks[1].start < kept < report.chunks[1].end
    assert report.chunks[0].reused + report.chunks[1].reused <= kept + report.reused_tokens
    assert report.misses == ()


def test_the_first_chunks_entry_is_as_good_as_a_prefix_that_ends_there(make_engine: Make) -> None:
    engine = make_engine()
    engine.precompute(CHUNKS)
    cold = engine.prefill(ask("Another question?"))
    engine.generate(ask(), max_new_tokens=3)
    warm = engine.prefill(ask("Another question?"))
    assert warm.report.positions == cold.report.positions
    assert warm.report.chunks == cold.report.chunks
    assert warm.report.misses == ()
    torch.testing.assert_close(warm.logits, cold.logits)


def test_lossy_entries_leave_no_exact_rows(make_engine: Make, tmp_path: Any) -> None:
    engine = make_engine(store=StoreConfig(tmp_path, codec="int8"))
    engine.precompute(CHUNKS[:1])
    chat = ask(chunks=CHUNKS[:1])
    engine.generate(chat, recompute_ratio=0.0, max_new_tokens=3)
    out = engine.prefill(chat, recompute_ratio=1.0)
    assert out.report.conversation_tokens == out.report.prefix_tokens == 0
    assert distance(engine, out.token_ids, out.logits) < TOLERANCE


# ---- repaired rows


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_turn_continues_the_rows_of_the_last_one(
    make_engine: Make, caches: list[torch.Tensor], passes: list[list[int]], family: str, ratio: Any
) -> None:
    """Bit by bit; and the answer is that of one long cache, continued by hand."""
    engine, chat = make_engine(family), ask()
    engine.precompute(CHUNKS)
    by_hand = engine.prefill(chat, recompute_ratio=ratio)
    for turn in range(4):
        passes.clear()
        answer = engine.generate(chat, recompute_ratio=ratio, max_new_tokens=8)
        report = answer.report
        assert_adds_up(answer)
        if turn:
            begin = report.sink_tokens + report.conversation_tokens
            assert begin >= len(by_hand.token_ids)
            assert passes == [list(range(begin, report.prompt_tokens))]
            assert torch.equal(caches[-1][:, :, :, :begin], caches[-2][:, :, :, :begin])
            assert [use.source for use in report.chunks] == ["conversation"] * 3
            assert report.misses == ()
        ids = engine.prefill(chat, method="full").token_ids
        assert answer.token_ids == continued(engine, by_hand, ids, 8)
        chat = and_then(chat, answer, f"And then, {turn}?")


def continued(engine: RagKV, first: Any, ids: list[int], tokens: int) -> list[int]:
    """Feed a first turn's cache what follows it, and return the answer to the whole prompt."""
    cache = first.cache
    cache.crop(len(first.token_ids) - cache.get_seq_length())
    rest, logits = ids[len(first.token_ids) :], first.logits
    with torch.no_grad():
        if rest:
            out = engine.model(torch.tensor([rest]), **cache_argument(engine.model, cache))
            logits = out.logits[0, -1].float()
        found = [int(logits.argmax())]
        while len(found) < tokens and found[-1] != engine.model.config.eos_token_id:
            out = engine.model(torch.tensor([found[-1:]]), **cache_argument(engine.model, cache))
            found.append(int(out.logits[0, -1].argmax()))
    return found


def test_new_chunks_in_a_later_turn_are_repaired_and_nothing_else(
    make_engine: Make, caches: list[torch.Tensor], passes: list[list[int]]
) -> None:
    engine, (*known, late) = make_engine(), some_chunks(4)
    engine.precompute([*known, late])
    chat = ask(chunks=known)
    chat = and_then(chat, engine.generate(chat, max_new_tokens=6), f"{late}\n\nAnd this?")
    answer = engine.generate(chat, max_new_tokens=6)
    begin = answer.report.sink_tokens + answer.report.conversation_tokens
    assert min(passes[-1]) == begin
    assert torch.equal(caches[-1][:, :, :, :begin], caches[-2][:, :, :, :begin])
    assert [use.source for use in answer.report.chunks] == ["conversation"] * 3 + ["entry"]
    assert 0 < answer.report.recomputed_tokens < 40
    third = engine.generate(and_then(chat, answer, "Why?"), max_new_tokens=6)
    assert third.report.recomputed_tokens == third.report.reused_tokens == 0
    begin = third.report.sink_tokens + third.report.conversation_tokens
    assert torch.equal(caches[-1][:, :, :, :begin], caches[-2][:, :, :, :begin])


@pytest.mark.parametrize(
    "more",
    [
        {"recompute_ratio": 0.3},
        {"recompute_ratio": 1.0},
        {"recompute_ratio": "auto"},
        *({"method": name} for name in method_names() if name not in ("query", "cacheclip")),
    ],
    ids=str,
)
def test_repaired_rows_serve_only_what_they_were_made_for(make_engine: Make, more: Any) -> None:
    if "cacheclip" in str(more):
        pytest.skip("needs an auxiliary model")
    cold, engine, chat = make_engine(), make_engine(), ask()
    for each in (cold, engine):
        each.precompute(CHUNKS)
        each.precompute(CHUNKS, **more)
    chat = and_then(chat, engine.generate(chat, max_new_tokens=6))
    out, expected = engine.prefill(chat, **more), cold.prefill(chat, **more)
    assert out.report.conversation_tokens == 0
    torch.testing.assert_close(out.logits, expected.logits, atol=TOLERANCE, rtol=1e-4)
    assert out.report.prefix_tokens == 0 or more.get("recompute_ratio") == 1.0


def test_exact_rows_are_the_same_behind_every_sink(make_engine: Make) -> None:
    engine, chat, more = make_engine(), ask(), {"sink": "Other head."}
    engine.precompute(CHUNKS)
    engine.precompute(CHUNKS, **more)
    chat = and_then(chat, engine.generate(chat, max_new_tokens=6))
    report = engine.prefill(chat, **more).report
    assert report.conversation_tokens == 0
    assert 100 < report.prefix_tokens < 200


@pytest.mark.parametrize("method", [name for name in method_names() if name != "query"])
def test_what_is_measured_leaves_nothing(make_engine: Make, method: str) -> None:
    if "cacheclip" in method:
        pytest.skip("needs an auxiliary model")
    engine = make_engine()
    engine.precompute(CHUNKS, method=method)
    engine.generate(ask(), method=method, recompute_ratio=1.0, max_new_tokens=3)
    report = engine.prefill(ask(), recompute_ratio=1.0).report
    assert report.conversation_tokens == report.prefix_tokens == 0


@pytest.mark.parametrize("ratio", [0.2, 1.0])
def test_a_lower_ratio_is_served(make_engine: Make, ratio: float) -> None:
    engine, chat = make_engine(), ask()
    engine.precompute(CHUNKS)
    chat = and_then(chat, engine.generate(chat, recompute_ratio=ratio, max_new_tokens=6))
    report = engine.prefill(chat, recompute_ratio=0.1).report
    assert report.conversation_tokens > 340


def test_the_same_prompt_again(make_engine: Make, passes: list[list[int]]) -> None:
    engine = make_engine()
    engine.precompute(CHUNKS)
    first = engine.generate(ask(), max_new_tokens=8)
    again = engine.generate(ask(), max_new_tokens=8)
    assert again.token_ids == first.token_ids
    assert passes[-1] == [first.report.prompt_tokens - 1]
    assert again.report.fresh_tokens == 1


def test_copies_repaired_during_decoding_stay(make_engine: Make, caches: list[Any]) -> None:
    engine, chat = make_engine(), ask()
    engine.precompute(CHUNKS)
    settings = {"repair_ahead": True, "max_new_tokens": 8}
    chat = and_then(chat, engine.generate(chat, **settings))
    report = engine.generate(chat, **settings).report
    begin = report.sink_tokens + report.conversation_tokens
    assert report.conversation_tokens > 340
    assert torch.equal(caches[-1][:, :, :, :begin], caches[-2][:, :, :, :begin])


# ---- what is kept, and for whom


def test_changed_weights_and_other_namespaces(make_engine: Make) -> None:
    engine, chat = make_engine(), ask()
    chat = and_then(chat, engine.generate(chat, max_new_tokens=3))
    other = RagKV(engine.loaded, store=":memory:", namespace="other")
    with other:
        assert other.prefill(chat).report.conversation_tokens == 0
    assert engine.prefill(chat).report.conversation_tokens > 300
    with torch.no_grad():
        engine.model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    out = engine.prefill(chat)
    assert out.report.conversation_tokens == 0
    assert distance(engine, out.token_ids, out.logits) < TOLERANCE


def forget_chunk(engine: RagKV) -> object:
    return engine.forget(CHUNKS[1])


def forget_document(engine: RagKV) -> object:
    return engine.forget(document="manual")


def ingest_again(engine: RagKV) -> object:
    return engine.precompute(CHUNKS[:2], document="manual").removed


@pytest.mark.parametrize("delete", [forget_chunk, forget_document, ingest_again])
def test_what_is_deleted_is_in_no_former_prompt(
    make_engine: Make, delete: Callable[[RagKV], object]
) -> None:
    engine, chat = make_engine(), ask()
    engine.precompute(CHUNKS, document="manual")
    asked = and_then(chat, engine.generate(chat, max_new_tokens=3))
    assert engine.prefill(asked).report.conversation_tokens > 300
    running = engine.stream(chat, max_new_tokens=8)
    next(running)
    assert delete(engine)
    list(running)
    engine.wait()
    report = engine.prefill(asked).report
    assert (report.conversation_tokens, report.prefix_tokens) == (0, 0)


def test_nothing_deleted_leaves_the_former_prompts(make_engine: Make) -> None:
    engine, chat = make_engine(), ask()
    asked = and_then(chat, engine.generate(chat, max_new_tokens=3))
    assert not engine.forget("never stored")
    assert not engine.forget(document="never stored")
    assert engine.prefill(asked).report.conversation_tokens > 300


@pytest.mark.parametrize("budget", [0, 1000])
def test_a_budget_too_small_for_a_prompt(make_engine: Make, budget: int) -> None:
    engine = make_engine(store=StoreConfig(":memory:", history_bytes=budget))
    chat = and_then(ask(), engine.generate(ask(), max_new_tokens=3))
    assert engine.generate(chat, max_new_tokens=3).report.conversation_tokens == 0


def test_a_cancelled_answer_leaves_what_was_computed(make_engine: Make) -> None:
    engine = make_engine()
    engine.precompute(CHUNKS)
    engine.model.generation_config.eos_token_id = None
    with engine.stream(ask(), recompute_ratio=1.0, max_new_tokens=400) as pieces:
        begun = next(pieces) + next(pieces)
    chat = [*ask(), {"role": "assistant", "content": begun}, {"role": "user", "content": "Go on"}]
    out = engine.prefill(chat, recompute_ratio=1.0)
    assert out.report.conversation_tokens > 340
    assert distance(engine, out.token_ids, out.logits) < TOLERANCE


def test_rows_are_evicted_while_a_request_runs(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, chat = make_engine(), ask()
    engine.precompute(CHUNKS)
    chat = and_then(chat, engine.generate(chat, max_new_tokens=6))
    expected = engine.prefill(chat)
    tree, plan = engine._reuse.conversations._tree, Pipeline._plan

    def cleared(*given: Any) -> Any:
        tree.clear()
        return plan(*given)

    monkeypatch.setattr(Pipeline, "_plan", cleared)
    answer = engine.generate(chat, max_new_tokens=6)
    assert answer.report.positions == expected.report.positions
    assert answer.token_ids[0] == int(expected.logits.argmax())
    monkeypatch.undo()
    assert engine.prefill(chat).report.conversation_tokens > 340


@pytest.fixture
def long_model() -> Iterator[RagKV]:
    torch.manual_seed(0)
    config = LlamaConfig(**{**SIZE, "rope_parameters": LONGROPE})
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.15)
    with RagKV(model, tiny_tokenizer(), store=":memory:") as engine:
        engine.model.generation_config.eos_token_id = None
        yield engine


def test_nothing_is_continued_across_the_position_limit(long_model: RagKV) -> None:
    """At 256 positions the rotary table changes, for all rows of a prompt."""
    ids = tiny_tokenizer()(" ".join(some_chunks(6)))["input_ids"]
    seen = []
    for tokens in (150, 200, 250, 300, 320, 240):
        out = long_model.prefill(tiny_tokenizer().decode(ids[:tokens]))
        assert distance(long_model, out.token_ids, out.logits) < TOLERANCE
        seen.append(out.report.conversation_tokens)
        long_model.generate(tiny_tokenizer().decode(ids[:tokens]), max_new_tokens=20)
    assert [count > 100 for count in seen] == [False, True, True, False, True, True]


def test_several_conversations_at_once(make_engine: Make) -> None:
    engine, found = make_engine(), dict[int, list[list[int]]]()
    engine.precompute(CHUNKS)
    engine.model.generation_config.eos_token_id = None

    def talk(number: int, into: dict[int, list[list[int]]]) -> None:
        chat = ask(f"Question {number}?")
        for turn in range(3):
            answer = engine.generate(chat, max_new_tokens=8)
            assert (answer.report.conversation_tokens > 300) == (turn > 0)
            into.setdefault(number, []).append(answer.token_ids)
            chat = and_then(chat, answer, f"And {turn}?")

    threads = [threading.Thread(target=talk, args=(number, found)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {number: len(turns) for number, turns in found.items()} == dict.fromkeys(range(4), 3)
    engine._reuse.conversations.clear()
    alone = dict[int, list[list[int]]]()
    for number in range(4):
        talk(number, alone)
    assert found == alone
