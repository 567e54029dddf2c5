"""Prompts reuse rows that earlier prompts with the same tokens computed."""

import itertools
import zlib
from dataclasses import replace
from typing import Any

import earlier_prompts
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from earlier_prompts import (
    CHUNKS,
    DRIFTING,
    PLACING,
    TOLERANCE,
    Chat,
    and_then,
    ask,
    ask_apart,
    assert_adds_up,
    assert_full,
    by_place,
    full,
    sources,
    taken,
)
from hypothesis import HealthCheck, Phase, given, seed, settings
from tiny import FAMILIES, some_chunks

from ragkv import StoreConfig
from ragkv.history.node import ABSENT, EXACT
from ragkv.select import get_method
from ragkv.select.method import Sparse
from ragkv.splice.layout import Origin

make_engine = earlier_prompts.make_engine
left = earlier_prompts.left

# ---- exactness, whatever was asked before


WAYS: list[tuple[str, Any]] = [
    (name, ratio)
    for name in PLACING
    for ratio in (0.0, 0.2, "auto", 1.0)
    if ratio != "auto" or get_method(name).auto
]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(WAYS),
        st.lists(st.sampled_from(range(3)), min_size=1, max_size=3),
        st.sampled_from(["", "So?", "a chat"]),
    ),
    min_size=2,
    max_size=4,
)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_called_exact_is_a_full_prefills(make_engine, auxiliary, left, family):
    """After any prompts, by any method and ratio: rows and logits."""
    engine = make_engine(family)
    engine.loaded.model.generation_config.eos_token_id = None
    for method in PLACING:
        engine.precompute(CHUNKS, method=method, auxiliary_model=auxiliary)

    @seed(zlib.crc32(family.encode()))
    @settings(
        max_examples=3,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(steps=STEPS)
    def check(steps):
        engine._reuse.history.clear()
        chat, answer = Chat(), None
        for (method, ratio), chunks, question in steps:
            if question == "a chat" and answer is not None:
                chat = and_then(chat, answer, CHUNKS[chunks[0]] + "\n\nAnd now?")
            else:
                chat = ask(question, [CHUNKS[at] for at in chunks])
            how = {"method": method, "auxiliary_model": auxiliary}
            left.clear()
            answer = engine.generate(chat, max_new_tokens=3, recompute_ratio=ratio, **how)
            assert_adds_up(answer)
            (made,) = left
            exact = made.freshness == EXACT
            assert not exact[made.exact :].any()
            plain = torch.stack(full(engine, made.ids)[1:])[:, :, :, exact]
            torch.testing.assert_close(made.rows(exact), plain, atol=TOLERANCE, rtol=1e-3)
            out = engine.prefill(chat, recompute_ratio=1.0, **how)
            assert_full(engine, out)
            assert_adds_up(out)
            assert out.report.tokens.reused == out.report.tokens.history_repaired == 0

    check()


@pytest.mark.parametrize(("method", "ratio"), WAYS)
def test_exact_rows_serve_every_method_and_ratio(make_engine, auxiliary, method, ratio):
    engine, how = make_engine(), {"method": method, "auxiliary_model": auxiliary}
    for each in (method, "reuse"):
        engine.precompute(CHUNKS, method=each, auxiliary_model=auxiliary)
    engine.generate(ask(), method="reuse", recompute_ratio=1.0, max_new_tokens=3)
    out = engine.prefill(ask("Another question?"), recompute_ratio=ratio, **how)
    assert out.report.tokens.history_exact > 340
    assert out.report.tokens.recomputed == out.report.tokens.history_repaired == 0
    assert out.report.misses == ()
    assert [use.text for use in out.report.chunks] == CHUNKS
    assert sources(out) == ["history"] * 3
    assert_full(engine, out)


def test_chunks_behind_exact_rows_are_repaired(make_engine):
    engine, chunks = make_engine(), some_chunks(5)
    engine.precompute(chunks)
    engine.generate(ask(chunks=chunks[:3]), recompute_ratio=1.0, max_new_tokens=3)
    report = engine.prefill(ask(chunks=chunks), recompute_ratio=0.3).report
    assert sources(engine.prefill(ask(chunks=chunks))) == ["history"] * 3 + ["entry"] * 2
    cached = sum(use.reused + use.recomputed for use in report.chunks)
    assert 0 < report.tokens.recomputed <= round(0.3 * cached)
    assert report.tokens.exact == report.tokens.sink + report.tokens.history_exact


def test_a_chunk_in_which_a_earlier_prompt_ends_is_one(make_engine):
    engine, (first, second) = make_engine(), some_chunks(2)
    engine.precompute([first, second])
    engine.generate(f"{first}\n\n{second[:120]}", recompute_ratio=1.0, max_new_tokens=1)
    out = engine.prefill(f"{first}\n\n{second}\n\nSo?", recompute_ratio=0.0)
    known = out.report.tokens.sink + out.report.tokens.history_exact
    assert [use.text for use in out.report.chunks] == [first, second]
    assert sources(out) == ["history", "entry"]
    assert out.report.chunks[1].start < known < out.report.chunks[1].end
    assert out.report.misses == ()
    assert_adds_up(out)


@pytest.mark.parametrize("codec", ["int8", "raw"])
def test_lossy_entries_leave_no_exact_rows(make_engine, tmp_path, left, codec):
    engine = make_engine(store=StoreConfig(tmp_path, codec=codec))
    engine.precompute(CHUNKS[:1])
    chat = ask(chunks=CHUNKS[:1])
    answer = engine.generate(chat, recompute_ratio=0.0, max_new_tokens=3)
    assert left[0].exact == (answer.report.tokens.sink if codec == "int8" else len(left[0].ids))
    out = engine.prefill(chat, recompute_ratio=1.0)
    assert (taken(out) == 0) == (codec == "int8")
    assert_full(engine, out)


def test_rows_with_sparse_attention_are_not_exact(make_engine, left):
    """Else those right behind an exact prefix would be."""
    engine = make_engine()
    engine.precompute(CHUNKS)
    exact = []
    for sparse in (None, Sparse(after=0.0, near=1)):
        engine._reuse.history.clear()
        first = replace(get_method("query"), score=by_place, sparse=sparse)
        engine.generate(ask(), method=first, recompute_ratio=0.2, max_new_tokens=1)
        chosen = left[-1].plan.choice.positions
        exact.append(left[-1].exact - chosen[0])
    assert exact == [len(chosen), 0]


# ---- repaired rows


@pytest.mark.parametrize(
    "make",
    [
        ask_apart,
        ask,
    ],
)
def test_a_second_question_computes_what_it_newly_chooses(make_engine, left, make):
    engine = make_engine()
    engine.precompute(CHUNKS)
    known, before = set[int](), None
    for number in range(3):
        chat = make(f"Question {number}?")
        how: Any = {"method": DRIFTING, "recompute_ratio": 0.2}
        cold = engine.prefill(chat, history=False, **how).report
        answer = engine.generate(chat, max_new_tokens=1, **how)
        assert_adds_up(answer)
        chosen = {at for at, kind in enumerate(cold.positions) if kind == Origin.RECOMPUTED}
        positions = left[-1].plan.choice.positions.tolist()
        assert set(positions) == chosen - known
        assert answer.report.tokens.recomputed == len(positions) > 0
        if before is not None:
            same = before.freshness[: len(left[-1].ids)] != ABSENT
            same[left[-1].plan.rows] = False
            at = np.flatnonzero(same)
            assert len(at) > 70
            assert torch.equal(left[-1].rows(at), before.rows(at))
            assert answer.report.tokens.history_repaired >= len(known)
        known |= chosen
        before = left[-1]
    assert len(known) > 2 * len(chosen)


@pytest.mark.parametrize("family", ["llama", "llama-yarn", "gemma3", "phi3"])
def test_rows_drift_once_and_by_all_repaired_ones(make_engine, left, family):
    """A visit that chooses nothing new leaves what the one before left, in whatever order."""
    engine = make_engine(family)
    engine.precompute(CHUNKS)
    place = replace(DRIFTING, score=by_place)
    for ratio in (0.25, 0.25, 0.1, 0.0):
        engine.generate(ask_apart(), method=place, recompute_ratio=ratio, max_new_tokens=1)
    first, *others = left
    for other in others:
        assert len(other.plan.choice.positions) == 0
        stale = np.flatnonzero(first.plan.origin == Origin.CACHED)
        stale = stale[stale >= first.exact]
        assert len(stale) > 50
        torch.testing.assert_close(other.rows(stale), first.rows(stale), atol=TOLERANCE, rtol=1e-3)
    still = engine.prefill(ask_apart(), method="reuse", recompute_ratio=0, history=False).cache
    moved = first.rows(stale)[1] - still.values[:, :, stale]
    assert float(moved.abs().max()) > 1e-2


@pytest.mark.parametrize(
    ("made", "ratio", "served"),
    [
        (0.2, 0.2, True),
        (0.2, 0.1, True),
        (0.2, 0.0, True),
        (0.2, "auto", True),
        (0.2, 0.3, False),
        (0.9, 1.0, False),
        (0.02, "auto", False),
        ("auto", "auto", True),
        ("auto", 0.9, False),
        (0.0, 0.1, False),
    ],
)
def test_rows_serve_no_higher_ratio(make_engine, made, ratio, *, served):
    engine = make_engine()
    engine.precompute(CHUNKS)
    engine.generate(ask_apart(), recompute_ratio=made, max_new_tokens=3)
    out = engine.prefill(ask_apart(), recompute_ratio=ratio)
    assert (out.report.tokens.history_repaired > 0) == served
    if not served:
        cold = engine.prefill(ask_apart(), recompute_ratio=ratio, history=False)
        torch.testing.assert_close(out.logits, cold.logits, atol=TOLERANCE, rtol=1e-4)


def test_repaired_rows_stay_behind_where_the_chunks_are_exact_now(make_engine):
    engine = make_engine()
    engine.precompute(CHUNKS)
    chat = and_then(ask(), engine.generate(ask(), max_new_tokens=6))
    assert engine.prefill(chat).report.tokens.history_repaired > 0
    engine.generate(ask("Something else?"), recompute_ratio=1.0, max_new_tokens=1)
    out = engine.prefill(chat)
    assert out.report.tokens.history_repaired == 0
    assert_full(engine, out)


def test_rows_that_decoding_repaired_are_kept(make_engine, make_say, left):
    engine = make_engine()
    engine.precompute(CHUNKS)
    make_say(engine, CHUNKS[2][20:90])
    how: Any = {"recompute_ratio": 0.1, "max_new_tokens": 12}
    engine.generate(ask(), **how)
    copies = left[0].plan.repair.copies.taken
    assert len(copies) > 5
    assert (left[0].freshness[copies] == np.float32(0.1)).all()
    report = engine.generate(ask(), **how).report
    assert {report.positions[at] for at in copies} == {Origin.REPAIRED}
    assert torch.equal(left[1].rows(copies), left[0].rows(copies))


@pytest.mark.parametrize("ratio", [0.2, 1.0, "nothing ingested"])
def test_a_chat_goes_on_from_its_answers(make_engine, make_say, left, ratio):
    engine, chat = make_engine(), ask()
    make_say(engine, "It says that it is so.")
    if ratio != "nothing ingested":
        engine.precompute(CHUNKS)
    for turn in range(3):
        given = 0.2 if ratio == "nothing ingested" else ratio
        answer = engine.generate(chat, recompute_ratio=given, max_new_tokens=8)
        assert_adds_up(answer)
        if turn:
            before, now = left[-2:]
            same = np.flatnonzero(before.ids != now.ids[: len(before.ids)])
            end = int(same[0]) if len(same) else len(before.ids)
            assert end > before.plan.ids.size  # also rows of the answer
            known = np.flatnonzero(before.freshness[:end] != ABSENT)
            assert len(known) > (100 if ratio == 0.2 else 350)
            assert torch.equal(now.rows(known), before.rows(known))
            assert (now.plan.rows >= end).all() or ratio == 0.2
        chat = and_then(chat, answer, f"And then, {turn}?")
    if ratio != 0.2:
        assert left[-1].exact == len(left[-1].ids)


def test_a_chat_chooses_among_its_new_chunks_alone(make_engine):
    """Each turn's question chose among the chunks that it came with."""
    engine, (*known, late) = make_engine(), some_chunks(4)
    engine.precompute([*known, late])
    chat = ask(chunks=known)
    chat = and_then(chat, engine.generate(chat, max_new_tokens=6), f"{late}\n\nAnd this?")
    answer = engine.generate(chat, recompute_ratio=0.2, max_new_tokens=6)
    *known, new = answer.report.chunks
    assert [use.recomputed for use in known] == [0, 0, 0]
    assert new.recomputed == round(0.2 * (new.reused + new.recomputed))
    again = engine.generate(and_then(chat, answer, "Why?"), max_new_tokens=6)
    assert again.report.tokens.recomputed == 0


@pytest.mark.parametrize("method", PLACING)
def test_reuse_does_not_decay_under_a_flood_of_questions(make_engine, auxiliary, method):
    """After a hundred others, answers are as near to full attention's as the first ones."""
    settings: Any = {"method": method, "auxiliary_model": auxiliary}
    flooded, fresh = make_engine(layers=3), make_engine(layers=3)
    for each in (flooded, fresh):
        each.precompute(CHUNKS, **settings)
    orders = [list(each) for each in itertools.permutations(CHUNKS)]
    for number in range(100):
        prompt = ask(f"What of {number}, and of {number * number}?", orders[number % 6])
        flooded.generate(prompt, max_new_tokens=1, **settings)
    distances, used = [], 0
    for order in orders:
        prompt = ask("What else does the text say?", order)
        own = flooded.prefill(prompt, **settings)
        first = fresh.prefill(prompt, history=False, **settings)
        expected, *_ = full(fresh, own.token_ids)
        distances.append([float((out.logits - expected).abs().mean()) for out in (own, first)])
        used += taken(own)
    now, before = np.mean(distances, axis=0)
    assert used > 100
    assert now <= 1.05 * before
