"""Copy repair while the answer is generated: against plain loops, and in whole answers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import FAMILIES, UNEVEN, ask

from ragkv import Prefilled, RagKV, StoreConfig
from ragkv.attend.forward import SubsetPass, subset_forward
from ragkv.errors import ConfigError
from ragkv.prompt.history import TokenHistory
from ragkv.recompute.copy_repair import CopyRepair
from ragkv.select import CopyLookup, Method, get_method
from ragkv.splice.layout import Layout, Origin
from ragkv_bench.quality.fidelity import Reference, followed

PROMPT = ask(UNEVEN, "\n\nWhat does it say?")
RATIO, RARE = 0.2, 4


def looking(tokens: int, rare: int = RARE, rows: int = 1000, every: int = 1) -> Method:
    return replace(get_method("query"), lookup=CopyLookup(tokens, rare, rows, every))


def plain(
    prompt: list[int],
    answer: list[int],
    stale: set[int],
    scores: dict[int, float],
    lookup: CopyLookup,
    taken: int,
) -> list[int]:
    """Return the positions to compute, in the words of the docstrings."""
    said = prompt[-8:] + answer
    found = []
    for at in range(len(prompt) - 1):
        same = 0
        while same < min(8, at + 1, len(said)) and prompt[at - same] == said[-1 - same]:
            same += 1
        if same:
            near = range(at, min(at + lookup.tokens + 1, len(prompt)))
            found.append((-same, -max(scores.get(j, 0.0) for j in near), at, near))
    if len(found) > lookup.rare:
        found = [match for match in found if match[0] < -1]
    chosen: list[int] = []
    for *_, near in sorted(found, key=lambda match: match[:3]):
        chosen += [j for j in near if j in stale and j not in chosen]
    most = lookup.rows * (1 + len(answer) // lookup.every) - taken
    return sorted(chosen[: max(0, most)])


@pytest.mark.parametrize("seed", range(20))
def test_what_comes_next_is_found_by_the_longest_match(seed):
    """Small vocabularies, so that there are many matches, and long ones."""
    rng = np.random.default_rng(seed)
    size, exact = int(rng.integers(20, 120)), int(rng.integers(0, 12))
    ids = rng.integers(0, int(rng.integers(2, 9)), size).astype(np.int32)
    origin = np.where(rng.random(size) < 0.8, Origin.CACHED, Origin.FRESH).astype(np.uint8)
    layout = Layout(ids, np.zeros((size, 2), np.int32), 0, (), origin, exact)
    cached = layout.cached
    rows = np.union1d(layout.fresh, rng.choice(cached, len(cached) // 4, replace=False))
    scores = rng.random(len(cached)).astype(np.float32)
    spans = ((0, 5), (0, 20), (1, 12), (1, 5))
    lookup = CopyLookup(*(int(rng.integers(*span)) for span in spans))
    ahead = CopyRepair(layout, rows, scores, lookup)
    stale = {int(j) for j in cached if j >= exact} - set(rows.tolist())
    known = dict(zip(cached.tolist(), scores.tolist(), strict=True))
    answer: list[int] = []
    history = TokenHistory(ids)
    told = 0
    for token in rng.integers(0, 9, 12).tolist():
        answer.append(token)
        history.append([token])
        expected = plain(ids.tolist(), answer, stale, known, lookup, told)
        assert ahead.take(history).tolist() == expected
        stale -= set(expected)
        told += len(expected)
    assert ahead.repaired == told


def decoded(engine: RagKV, out: Prefilled, answer: list[int]) -> list[torch.Tensor]:
    """Feed the answer's tokens one by one; return the logits behind each."""
    against = Reference((*answer, 0), torch.zeros(0))
    return [*followed(engine, out, against).log_probs[1:].exp()]


def drawn_by_hand(engine: RagKV, lookup: CopyLookup, count: int) -> tuple[list[int], int]:
    """Draw greedily by subset passes over a prefill; return the tokens and what was repaired."""
    out = engine.prefill(PROMPT, recompute_ratio=RATIO, method=looking(0))
    origin = np.frombuffer(out.report.positions, np.uint8)
    exact = out.report.chunks[0].end  # the first chunk stands right behind the sink
    stale = {int(j) for j in np.flatnonzero(origin == Origin.CACHED) if j >= exact}
    scores = dict(enumerate(np.nan_to_num(out.report.trace.scores).tolist()))
    ids, answer, repaired = list(out.token_ids), [int(out.logits.argmax())], 0
    while len(answer) < count:
        rows = plain(ids, answer, stale, scores, lookup, repaired)
        stale -= set(rows)
        repaired += len(rows)
        said = np.array(ids + answer, dtype=np.int32)
        logits = subset_forward(
            engine.loaded, SubsetPass(said, np.array([*rows, len(said) - 1]), out.cache)
        )
        answer.append(int(logits.argmax()))
    return answer, repaired


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_passes_made_by_hand(make_engine, family, monkeypatch):
    """More tokens than the buffer has spare rows for: it grows in the midst of it."""
    monkeypatch.setattr("ragkv.splice.buffer._MOST_SPARE_ROWS", 20)
    engine = make_engine(family)
    engine.loaded.model.generation_config.eos_token_id = None
    engine.precompute(UNEVEN)
    count = 270 if family == "llama" else 24
    lookup = CopyLookup(3, RARE, 30, 20)
    expected, repaired = drawn_by_hand(engine, lookup, count)
    settings = {
        "recompute_ratio": RATIO,
        "method": looking(3, RARE, 30, 20),
        "drafts": False,
    }
    answer = engine.generate(PROMPT, max_new_tokens=count, **settings)
    assert answer.token_ids == expected
    assert answer.report.tokens.ahead == repaired > 0
    report = answer.report
    tokens = report.tokens.sink + report.tokens.reused + report.tokens.recomputed
    assert tokens + report.tokens.fresh == report.tokens.prompt
    assert not engine.loaded.model._forward_pre_hooks
    assert not engine.loaded.model._forward_hooks


def test_what_was_drawn_brings_the_answer_nearer_to_full_attention(make_engine):
    """With every stale token behind a match computed again, little is left that differs."""
    engine = make_engine()
    engine.precompute(UNEVEN)
    full = engine.prefill(PROMPT, method="full")
    answer = full.token_ids[60:68]
    expected = decoded(engine, full, answer)
    near, far = (
        decoded(engine, engine.prefill(PROMPT, recompute_ratio=0.05, method=method), answer)
        for method in (looking(1000, 1000), replace(get_method("query"), lookup=None))
    )
    left = [
        torch.stack([(a - b).abs().mean() for a, b in zip(rows, expected, strict=True)]).mean()
        for rows in (near, far)
    ]
    assert left[0] < 0.5 * left[1]


@pytest.mark.parametrize("seed", range(12))
def test_drafts_change_nothing_that_is_repaired(seed):
    """Whatever is drafted, and however much of it is refused: the same rows for every token."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 12, 80).astype(np.int32)
    origin = np.where(np.arange(80) < 70, Origin.CACHED, Origin.FRESH).astype(np.uint8)
    layout = Layout(ids, np.zeros((80, 2), np.int32), 0, (), origin, 0)
    scores = rng.random(70).astype(np.float32)
    lookup = CopyLookup(2, 8, 4, 8)
    answer = rng.integers(0, 12, 40).tolist()

    def run(drafted):
        """Return for each token the rows that were repaired before or with it, and the steps."""
        copies, history = CopyRepair(layout, layout.fresh, scores, lookup), TokenHistory(ids)
        seen, steps = list[list[int]](), 0
        while len(seen) < len(answer):
            history.append([answer[len(seen)]])
            copies.take(history)
            draft = copies.without_repair(history, drafted(len(seen) + 1))
            steps += 1
            seen.append(copies.taken.tolist())
            for token, drawn in zip(draft, answer[len(seen) :], strict=False):
                if token != drawn:
                    break
                history.append([token])
                seen.append(copies.taken.tolist())
        return seen, steps

    def wrong(at):
        return [*answer[at : at + 2], (answer[min(at + 2, 39)] + 1) % 12, 3]

    alone, steps = run(lambda _: [])
    assert steps == 40
    for drafted in (lambda at: answer[at : at + 6], wrong):
        found, fewer = run(drafted)
        assert found == alone
        assert fewer < 40


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_answers_are_the_same_with_drafts(make_engine, family):
    engine = make_engine(family, store=StoreConfig(":memory:", history_bytes=0))
    engine.loaded.model.generation_config.eos_token_id = None
    engine.precompute(UNEVEN)
    settings = {"recompute_ratio": RATIO, "max_new_tokens": 200}
    one, several = (engine.generate(PROMPT, drafts=each, **settings) for each in (False, True))
    assert several.token_ids == one.token_ids
    assert several.report.tokens.ahead == one.report.tokens.ahead > 0
    assert several.report.decode.tokens_per_step > 1


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_plain_reuse_and_full_prefill_stay_what_they_are(make_engine, ratio):
    engine = make_engine()
    engine.precompute(UNEVEN)
    assert engine.prefill(PROMPT, recompute_ratio=ratio).copies is None
    answer = engine.generate(PROMPT, recompute_ratio=ratio, max_new_tokens=20)
    assert answer.report.tokens.ahead == 0


def test_streams_and_stops_are_as_without(make_engine):
    engine = make_engine(store=StoreConfig(":memory:", history_bytes=0))
    engine.precompute(UNEVEN)
    settings = {"recompute_ratio": RATIO, "max_new_tokens": 30}
    answer = engine.generate(PROMPT, **settings)
    stream = engine.stream(PROMPT, **settings)
    assert "".join(stream) == answer.text
    assert stream.completion.token_ids == answer.token_ids
    assert stream.completion.report.tokens.ahead == answer.report.tokens.ahead > 0


@pytest.mark.parametrize("wrong", [{"tokens": -1}, {"rare": -1}, {"rows": 0}, {"every": 0}])
def test_a_lookup_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        replace(CopyLookup(3, 4, 16, 32), **wrong)
