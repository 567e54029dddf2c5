"""What the page is drawn from: the trace, a prompt's parts, ranks, words."""

import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
from explain_prompts import CHUNKS, PROMPT

from ragkv import Prefilled
from ragkv.errors import ConfigError
from ragkv.report.page.page import page as draw
from ragkv.report.page.parts import parts, standing
from ragkv.report.trace import Trace
from ragkv.report.words import percent, safe, seconds


@pytest.fixture(scope="module")
def answered(engine) -> Prefilled:
    return engine.prefill(PROMPT, method="query")


# ---- the trace


def test_pieces_are_the_text(answered):
    trace = answered.report.trace
    assert "".join(trace.pieces()) == trace.text
    assert len(trace.pieces()) == answered.report.tokens.prompt
    assert all(chunk in trace.text for chunk in CHUNKS)


@pytest.mark.parametrize(
    ("text", "offsets", "pieces"),
    [
        ("ab c", [(0, 0), (0, 2), (3, 4)], ["", "ab", " c"]),  # BOS; a blank that no token covers
        ("a\U0001f600b", [(0, 1), (1, 2), (1, 2), (2, 3)], ["a", "\U0001f600", "", "b"]),
        ("ab  ", [(0, 1), (1, 2), (0, 0)], ["a", "b", "  "]),  # EOS without characters
        ("", [], []),
    ],
)
def test_pieces_of_odd_offsets(text, offsets, pieces):
    array = np.asarray(offsets, dtype=np.int32).reshape(-1, 2)
    scores = np.full(len(offsets), np.nan, dtype=np.float32)
    assert Trace(text, array, scores).pieces() == pieces


def test_scores_stand_where_tokens_are_cached(answered, engine):
    report = answered.report
    cached = np.isin(np.frombuffer(report.positions, np.uint8), (1, 2))
    np.testing.assert_array_equal(~np.isnan(report.trace.scores), cached)
    for settings in ({"method": "full"}, {"recompute_ratio": 1.0}, {"recompute_ratio": 0.0}):
        trace = engine.prefill(PROMPT, **settings).report.trace
        assert not trace.scored
        assert "".join(trace.pieces()) == trace.text


def test_the_trace_is_no_part_of_the_figures(answered):
    report = answered.report
    bare = replace(report, trace=None)
    assert bare == report
    assert bare.to_dict() == report.to_dict()
    assert "trace" not in json.loads(json.dumps(report.to_dict()))
    assert "trace" not in repr(report)
    again = pickle.loads(pickle.dumps(report))
    assert again == report
    assert draw(again) == draw(report)


def test_a_report_without_a_trace_says_what_to_do(answered):
    with pytest.raises(ConfigError, match="give the engine's report"):
        draw(replace(answered.report, trace=None))


# ---- parts and ranks


def test_parts_cover_the_prompt_and_add_up(answered):
    report = answered.report
    found = parts(report, report.trace)
    assert [part.start for part in found] == [0, *(part.end for part in found[:-1])]
    assert found[-1].end == report.tokens.prompt
    sums = np.sum([part.counts for part in found], axis=0).tolist()
    tokens = report.tokens
    assert sums == [tokens.sink, tokens.reused, tokens.recomputed, tokens.fresh, 0, 0, 0]
    chunks = [part for part in found if part.text]
    assert [part.text for part in chunks] == CHUNKS
    assert sum(part.score for part in chunks) == pytest.approx(1)
    assert sorted(part.rank for part in chunks) == [1, 2, 3]
    for part in chunks:
        assert part.recomputed == part.counts[2] / (part.counts[1] + part.counts[2])
        others = [each.score for each in chunks if each.rank < part.rank]
        assert all(score > part.score for score in others)


def test_parts_of_a_prompt_without_chunks(engine):
    report = engine.prefill("Nothing is known of this.", method="full").report
    (part,) = parts(report, report.trace)
    assert (part.title, part.counts) == ("Prompt", (0, 0, 0, report.tokens.prompt, 0, 0, 0))


def test_ranks_and_levels_against_a_slow_count():
    rng = np.random.default_rng(0)
    scores = rng.integers(0, 60, 200).astype(np.float32)
    scores[rng.permutation(200)[:70]] = np.nan
    found = standing(Trace("", np.zeros((200, 2), np.int32), scores))
    known = [float(score) for score in scores if score == score]  # noqa: PLR0124
    assert found.scored == len(known) == 130
    for score, rank, level in zip(scores.tolist(), found.rank, found.level, strict=True):
        if score != score:  # noqa: PLR0124
            assert (rank, level) == (0, 0)
            continue
        others = sum(other >= score for other in known) - 1
        assert rank == 1 + sum(other > score for other in known)
        assert level == sum(others < top * 130 for top in (0.4, 0.2, 0.1, 0.05, 0.02))


def test_equal_scores_stand_out_nowhere():
    found = standing(Trace("", np.zeros((9, 2), np.int32), np.ones(9, np.float32)))
    assert found.rank.tolist() == [1] * 9
    assert not found.level.any()


# ---- words


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (97.77, "97.8 s"),
        (1.444, "1.44 s"),
        (0.0994, "99 ms"),
        (0.1, "0.10 s"),
        (0.0003, "0.3 ms"),
        (0, "0 ms"),
    ],
)
def test_seconds(value, text):
    assert seconds(value).replace("\u00a0", " ") == text


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0, "0%"),
        (1, "100%"),
        (0.5739, "57%"),
        (0.0573, "5.7%"),
        (0.00573, "0.57%"),
        (1e-6, "<0.01%"),
    ],
)
def test_percent(share, text):
    assert percent(share) == text
    assert (percent(0.004, 0), percent(0.052, 0)) == ("<1%", "5%")


def test_what_a_browser_would_change_is_escaped():
    assert safe("<a href=\"x\">'&'\r\n\0") == (
        "&lt;a href=&quot;x&quot;&gt;&#x27;&amp;&#x27;&#13;\n\u2400"
    )
