"""Answers that vLLM decodes are the engine's own: their tokens, texts, ends and reports."""

from __future__ import annotations

from dataclasses import replace

import pytest
from served import CHUNKS, until
from tiny import ask, tiny_model

from ragkv import ReuseConfig
from ragkv.engine import planner
from ragkv.errors import ConfigError
from ragkv.prompt.chat import TokenIds
from ragkv.select.rules.query import METHOD

PROMPT = ask([CHUNKS[2], CHUNKS[0], CHUNKS[1]])
WITHOUT_COPIES = replace(METHOD, lookup=None)
"""What an answer copies is repaired in ragkv's own steps alone."""


@pytest.mark.parametrize("ratio", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_tokens_are_the_engine_s(make_engine, connect, vllm, family, ratio):
    kv = make_engine(family)
    vllm.model = tiny_model(family)
    kv.precompute(CHUNKS)
    asked = {"recompute_ratio": ratio, "method": WITHOUT_COPIES, "max_new_tokens": 12}
    alone = kv.generate(PROMPT, drafts=False, **asked)
    full = kv.generate(PROMPT, method="full", drafts=False, max_new_tokens=12)
    connect(kv)
    answer = kv.generate(PROMPT, **asked)
    assert (answer.token_ids, answer.text) == (alone.token_ids, alone.text)
    assert answer.finish_reason == alone.finish_reason
    assert 100 < answer.report.tokens.handed_over < answer.report.tokens.prompt
    assert not answer.report.not_loaded
    assert answer.report.tokens.cached == alone.report.tokens.cached
    assert ratio != 1 or answer.token_ids == full.token_ids
    assert [path.name for path in vllm.folder.iterdir()] == ["secret"]


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(lambda kv: [*kv.tokenize("i"), *kv.tokenize("f")], id="joined by the text"),
        pytest.param(lambda kv: kv.tokenize("\U0001f600")[:-1], id="part of a character"),
        pytest.param(lambda kv: [kv.tokenizer.bos_token_id] * 2, id="special tokens"),
    ],
)
def test_token_ids_are_sent_on(kv, connect, vllm, end):
    ids = [*kv.tokenize(kv.render(PROMPT)), *end(kv)]
    alone = kv.generate(TokenIds(ids), drafts=False, max_new_tokens=8, recompute_ratio=1)
    connect(kv)
    answer = kv.generate(TokenIds(ids), max_new_tokens=8, recompute_ratio=1)
    assert vllm.streamed[-1]["prompt"] == ids
    assert answer.token_ids == alone.token_ids
    assert answer.report.tokens.handed_over > 100


@pytest.mark.parametrize("method", ["cachecraft", "cacheblend", "epic", "reuse", "prefix"])
def test_every_method(kv, connect, method):
    alone = kv.generate(PROMPT, method=method, drafts=False, max_new_tokens=8)
    connect(kv)
    answer = kv.generate(PROMPT, method=method, max_new_tokens=8)
    assert answer.token_ids == alone.token_ids
    assert answer.report.tokens.handed_over > 0


def test_the_question_is_vllm_s_to_compute(kv, connect, monkeypatch):
    computed, forward = [], planner.repair_forward

    def watched(loaded, subset):
        computed.append(subset.rows)
        return forward(loaded, subset)

    monkeypatch.setattr(planner, "repair_forward", watched)
    connect(kv)
    report = kv.generate(PROMPT, recompute_ratio=1, max_new_tokens=2).report
    assert computed[0][-1] == report.tokens.handed_over - 1
    question = len(kv.tokenize("\n\nWhat now?"))
    assert report.tokens.prompt - report.tokens.handed_over >= question


def test_what_is_mostly_unknown_goes_untouched(kv, connect, vllm):
    connect(kv)
    for prompt in (ask(["What nobody knows."]), ask([*["What nobody knows. " * 40] * 3, *CHUNKS])):
        report = kv.generate(prompt, max_new_tokens=2, on_miss="skip").report
        assert report.tokens.handed_over == 0
        assert not report.not_loaded
        assert "kv_transfer_params" not in vllm.streamed[-1]


def test_blocks_are_shared_within_a_namespace_alone(make_engine, connect, vllm):
    one, other = (make_engine(layers=2, namespace=name) for name in ("one", "other"))
    connect(one, other)
    for kv in (one, one, other):
        kv.generate("What nobody knows.", max_new_tokens=1)
        kv.precompute(CHUNKS)
    first, second, others = (body["cache_salt"] for body in vllm.streamed)
    assert first == second != others
    for kv in (one, one, other):
        kv.generate(PROMPT, max_new_tokens=1)
    assert len({body["cache_salt"] for body in vllm.streamed}) == 5


def test_what_was_handed_over_is_known_to_later_prompts(make_engine, connect):
    kv = make_engine(layers=2, reuse=ReuseConfig())
    kv.precompute(CHUNKS)
    connect(kv)
    first = kv.generate(PROMPT, max_new_tokens=6).report
    kv.wait()
    turn = [*PROMPT, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Why?"}]
    report = kv.generate(turn, max_new_tokens=6).report
    assert report.tokens.handed_over == first.tokens.handed_over
    history = report.tokens.history_exact + report.tokens.history_repaired
    assert history >= first.tokens.recomputed + 90, "and the first chunk"
    assert report.tokens.recomputed < first.tokens.recomputed


def test_log_probabilities(kv, connect):
    asked = {"logprobs": 3, "max_new_tokens": 5, "recompute_ratio": 1}
    alone = kv.generate(PROMPT, **asked)
    connect(kv)
    answer = kv.generate(PROMPT, **asked)
    for mine, own in zip(answer.logprobs, alone.logprobs, strict=True):
        assert mine.token_id == own.token_id
        assert [at for at, _ in mine.top] == [at for at, _ in own.top]
        assert mine.logprob == pytest.approx(own.logprob, abs=1e-3)


def test_stops(kv, connect, vllm):
    connect(kv)
    whole = kv.generate(PROMPT, max_new_tokens=40)
    stop, third = whole.text[6:9], whole.token_ids[2]
    by_text = kv.generate(PROMPT, max_new_tokens=40, stop=stop)
    by_token = kv.generate(PROMPT, max_new_tokens=40, stop_token_ids=[third])
    assert by_text.text == whole.text[: whole.text.index(stop)]
    assert by_token.token_ids == whole.token_ids[:3]
    assert by_text.finish_reason == by_token.finish_reason == "stop"
    kv.generate(PROMPT, max_new_tokens=2, ignore_eos=True)
    ends = [(body["stop_token_ids"], body["ignore_eos"]) for body in vllm.streamed]
    assert ends == [([1], False), ([1], False), ([1, third], False), ([], True)]


def test_what_is_given_goes_to_vllm(kv, connect, vllm):
    connect(kv)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    given = {"repetition_penalty": 1.2, "min_p": 0.1, "min_new_tokens": 2, "max_length": 4000}
    asked = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "seed": 3}
    kv.generate(PROMPT, max_new_tokens=4, json_schema=schema, generation=given, **asked)
    kv.generate(PROMPT, max_new_tokens=2, top_p=0.5, top_k=3, generation={"min_p": 0.2})
    body, greedy = vllm.streamed
    named = {"max_tokens": 4, "repetition_penalty": 1.2, "min_p": 0.1, "min_tokens": 2}
    assert asked | named == {name: body[name] for name in asked | named}
    followed = body["structured_outputs"]["json"]
    assert followed == schema | {"additionalProperties": False}, "as ragkv's own answers"
    assert (greedy["temperature"], greedy["top_p"], greedy["top_k"]) == (0, 1, 0)
    assert not greedy.keys() & {"min_p", "seed", "repetition_penalty", "structured_outputs"}


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"generation": {"no_repeat_ngram_size": 1}}, "no_repeat_ngram_size"),
        ({"generation": {"bad_words_ids": [[3]]}}, "bad_words_ids"),
        ({"generation": {"typical_p": 0.5}, "temperature": 1.0}, "typical_p"),
        ({"sparse": "auto"}, "sparse"),
    ],
)
def test_what_vllm_cannot_do_is_refused_by_name(kv, connect, vllm, asked, named):
    connect(kv)
    with pytest.raises(ConfigError, match=f"vLLM.* {named}"):
        kv.generate(PROMPT, **asked)
    assert not vllm.asked


def test_an_answer_stays_within_vllm_s_positions(kv, connect, vllm):
    vllm.positions = kv.generate(PROMPT, max_new_tokens=1).report.tokens.prompt + 3
    connect(kv)
    assert len(kv.generate(PROMPT, max_new_tokens=9, ignore_eos=True).token_ids) == 3


def test_the_next_prompt_is_repaired_while_vllm_decodes(kv, connect, vllm):
    connect(kv)
    whole = kv.generate(PROMPT, max_new_tokens=8)
    vllm.going.clear()
    streams = [kv.stream(PROMPT, max_new_tokens=8) for _ in range(3)]
    until(lambda: len(vllm.reasons) == 5)  # one of them ragkv's own look at the model
    vllm.going.set()
    assert ["".join(stream) for stream in streams] == [whole.text] * 3
    assert streams[0].tokens == (whole.report.tokens.prompt, 8)


def test_prefill_stays_here(kv, connect, vllm):
    connect(kv)
    assert len(kv.prefill(PROMPT).token_ids) > 100
    assert not vllm.asked
