"""A chat's report says which earlier answers were recomputed, and why."""

import pytest
from tiny import some_chunks

from ragkv import ReuseConfig

CHUNKS = some_chunks(2)
SAID = ["A target list is what an assignment binds.", "Items of the iterable, from left to right."]


def chat(head: str) -> list[dict[str, str]]:
    roles = ("user", "assistant") * 2
    said = ["What is a target?", SAID[0], "And then?", SAID[1]]
    turns = [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]
    return [{"role": "system", "content": head}, *turns, {"role": "user", "content": "Why?"}]


def warnings_of(engine, prompt, **settings) -> str:
    return " ".join(engine.generate(prompt, max_new_tokens=2, **settings).report.warnings)


def test_answers_behind_another_head(make_engine):
    engine = make_engine(reuse=ReuseConfig())
    engine.precompute(CHUNKS)
    found = warnings_of(engine, chat(CHUNKS[0]))
    assert "2 of 2 earlier answers were recomputed" in found
    assert "put new documents after the conversation" in found


@pytest.mark.parametrize(
    "change", [str.upper, lambda t: f"Thought: so.\n{t}", lambda t: t[:30] + t[20:]]
)
def test_an_answer_that_was_rewritten(make_engine, change):
    engine = make_engine(reuse=ReuseConfig())
    engine.precompute(CHUNKS)
    engine.generate(prompt := chat(CHUNKS[0]), max_new_tokens=2)
    prompt[1:] = [*prompt[1:4], {**prompt[4], "content": change(SAID[1])}, prompt[5]]
    report = engine.generate(prompt, max_new_tokens=2).report
    *_, said = report.warnings
    assert report.tokens.history_exact + report.tokens.history_repaired
    assert said.startswith("1 of 2 earlier answers was recomputed")
    assert "does not begin like an earlier one" not in said
    assert change(SAID[1])[-10:] in said
    assert "unchanged" in said


def test_a_conversation_that_goes_on_warns_of_nothing(make_engine):
    engine = make_engine(reuse=ReuseConfig())
    engine.precompute(CHUNKS)
    prompt = chat(CHUNKS[0])[:4]
    answer = engine.generate(prompt, max_new_tokens=2).text
    prompt = [*prompt, {"role": "assistant", "content": answer.lstrip()}, chat("")[-1]]
    assert "earlier answers" not in warnings_of(engine, prompt)


def test_answers_that_are_chunks_warn_of_nothing(make_engine):
    engine = make_engine(reuse=ReuseConfig())
    engine.precompute([*CHUNKS, *SAID])
    assert "earlier answers" not in warnings_of(engine, chat(CHUNKS[1]))
    engine.forget(SAID[0])
    assert "1 of 2 earlier answers" in warnings_of(engine, chat(CHUNKS[0]))


def test_other_prompts_warn_of_nothing(make_engine):
    engine = make_engine(reuse=ReuseConfig())
    for prompt, method in (
        ("A text.", "query"),
        (chat("Read."), "full"),
        (chat("Read."), "prefix"),
    ):
        assert "earlier answers" not in warnings_of(engine, prompt, method=method)
