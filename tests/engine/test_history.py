"""A chat's report says which earlier answers were computed anew, and why."""

from __future__ import annotations

import pytest
from tiny import some_chunks

CHUNKS = some_chunks(2)
SAID = ["A target list is what an assignment binds.", "Items of the iterable, from left to right."]


def chat(head: str) -> list[dict[str, str]]:
    roles = ("user", "assistant") * 2
    said = ["What is a target?", SAID[0], "And then?", SAID[1]]
    turns = [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]
    return [{"role": "system", "content": head}, *turns, {"role": "user", "content": "Why?"}]


def warnings_of(engine, prompt, **settings) -> str:
    return " ".join(engine.generate(prompt, max_new_tokens=2, **settings).report.warnings)


@pytest.mark.parametrize("remember", [False, True])
def test_answers_behind_another_head(make_engine, remember):
    engine = make_engine()
    engine.precompute(CHUNKS)
    found = warnings_of(engine, chat(CHUNKS[0]), remember_turns=remember)
    assert "2 of 2 earlier answers were computed anew" in found
    assert ("remember_turns=True" in found) != remember


def test_a_conversation_that_goes_on_warns_of_nothing(make_engine):
    engine = make_engine()
    engine.precompute(CHUNKS)
    prompt = chat(CHUNKS[0])[:4]
    answer = engine.generate(prompt, max_new_tokens=2).text
    prompt = [*prompt, {"role": "assistant", "content": answer.lstrip()}, chat("")[-1]]
    assert "earlier answers" not in warnings_of(engine, prompt)


def test_answers_that_are_chunks_warn_of_nothing(make_engine):
    engine = make_engine()
    engine.precompute([*CHUNKS, *SAID])
    assert "earlier answers" not in warnings_of(engine, chat(CHUNKS[1]))
    engine.forget(SAID[0])
    assert "1 of 2 earlier answers" in warnings_of(engine, chat(CHUNKS[0]))


def test_other_prompts_warn_of_nothing(make_engine):
    engine = make_engine()
    for prompt, method in (("A text.", "query"), (chat("Read."), "full"), (chat("Read."), "epic")):
        assert "earlier answers" not in warnings_of(engine, prompt, method=method)


@pytest.mark.parametrize("remember", [False, True])
def test_turns_that_are_not_stored_are_not_said_to_be_remembered(make_engine, remember):
    engine = make_engine()
    engine.precompute(CHUNKS)
    settings = {"remember_turns": remember, "on_miss": "skip"}
    found = warnings_of(engine, chat(CHUNKS[0]), **settings)
    assert "turns are not remembered" in found
    assert "remember_turns=True" not in found
