"""The trace of a load: drawn as the plan says, the same for a seed, saved and loaded."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from ragkv.cli.session import messages
from ragkv.errors import ConfigError
from ragkv_bench.data.examples import Chunk, Example
from ragkv_bench.speed.load.workload import (
    MAX_TURNS,
    SourceDocument,
    Workload,
    WorkloadPlan,
    cut,
    documents_of,
    draw_workload,
    language_reference,
)

DOCUMENTS = [
    SourceDocument(f"d{n}", (f"{n} a", f"{n} b"), (f"what {n}?", f"why {n}?")) for n in range(20)
]
PLAN = WorkloadPlan(requests=400, documents=10, chunks_per_prompt=4)


def test_a_seed_gives_one_trace():
    first = draw_workload(PLAN, DOCUMENTS)
    assert first == draw_workload(PLAN, DOCUMENTS)
    assert first != draw_workload(replace(PLAN, seed=1), DOCUMENTS)
    assert PLAN.requests <= first.requests < PLAN.requests + MAX_TURNS


def test_documents_are_drawn_by_zipf():
    plan = replace(PLAN, requests=4000, turns=0.0, chunks_per_prompt=2)
    workload = draw_workload(plan, DOCUMENTS)
    count = Counter(dialogue.documents[0] for dialogue in workload.dialogues)
    ranked = [count[document.name] for document in workload.documents]
    assert ranked[0] / ranked[1] == pytest.approx(2, rel=0.2)
    assert ranked[0] / ranked[3] == pytest.approx(4, rel=0.25)
    alike = Counter(
        dialogue.documents[0]
        for dialogue in draw_workload(replace(plan, alpha=0.0), DOCUMENTS).dialogues
    )
    assert min(alike.values()) > 0.7 * max(alike.values())


def test_a_prompt_has_whole_documents_shuffled():
    orders = set()
    for dialogue in draw_workload(PLAN, DOCUMENTS).dialogues:
        assert len(dialogue.chunks) == len(set(dialogue.chunks)) == 4
        assert len(dialogue.documents) == 2
        assert {chunk.split()[0] for chunk in dialogue.chunks} == {
            name.removeprefix("d") for name in dialogue.documents
        }
        orders.add(tuple(sorted(range(4), key=lambda n, d=dialogue: d.chunks[n])))
    assert len(orders) > 10


def test_a_share_of_the_conversations_has_turns():
    dialogues = draw_workload(PLAN, DOCUMENTS).dialogues
    lengths = Counter(len(dialogue.questions) for dialogue in dialogues)
    assert set(lengths) == set(range(1, MAX_TURNS + 1))
    assert 1 - lengths[1] / len(dialogues) == pytest.approx(PLAN.turns, abs=0.1)
    assert all(len(set(each.questions)) == len(each.questions) for each in dialogues)
    assert {len(d.questions) for d in draw_workload(replace(PLAN, turns=0.0), DOCUMENTS).dialogues} == {1}  # fmt: skip


def test_a_turn_says_all_that_was_said():
    dialogue = next(
        each for each in draw_workload(PLAN, DOCUMENTS).dialogues if len(each.questions) > 2
    )
    first = dialogue.messages([])
    assert first == messages(dialogue.questions[0], dialogue.chunks)
    third = dialogue.messages(["yes", "no"])
    assert third[:1] == first
    assert [each["role"] for each in third] == ["user", "assistant", "user", "assistant", "user"]
    assert [each["content"] for each in third[1:]] == ["yes", dialogue.questions[1], "no", dialogue.questions[2]]  # fmt: skip


def test_saved_and_loaded(tmp_path):
    path = tmp_path / "trace.jsonl"
    odd = SourceDocument("odd", ("line\u2028separator \x85 and\nbreak", "é"), ("why?",))
    workload = draw_workload(replace(PLAN, documents=21), [*DOCUMENTS, odd])
    workload.save(path)
    assert Workload.load(path) == workload


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "is not by"),
        ('{"dialogue": {"chunks": []}}', "is not by"),
        ('{"other": {}}', "other"),
        ("", "has no conversation"),
    ],
)
def test_other_files_are_refused(tmp_path, text, message):
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        Workload.load(path)
    with pytest.raises(ConfigError, match="No such file"):
        Workload.load(tmp_path / "none")


def test_a_warm_up_is_whole_conversations():
    workload = draw_workload(PLAN, DOCUMENTS)
    first, rest = workload.split(7)
    assert 7 <= first.requests < 7 + MAX_TURNS
    assert first.dialogues + rest.dialogues == workload.dialogues
    assert workload.split(0)[1] == workload
    with pytest.raises(ConfigError, match="leaves none"):
        workload.split(workload.requests)


def test_what_is_refused():
    with pytest.raises(ConfigError, match="there are 20 documents, not 21"):
        draw_workload(replace(PLAN, documents=21), DOCUMENTS)
    with pytest.raises(ConfigError, match="fewer chunks"):
        draw_workload(replace(PLAN, documents=1), DOCUMENTS)
    for wrong in ({"requests": 0}, {"turns": 1.5}, {"alpha": -1.0}, {"chunks_per_prompt": 0}):
        with pytest.raises(ConfigError):
            WorkloadPlan(**wrong)


def test_documents_of_questions():
    text = "Word of a sentence. " * 40
    chunks = (Chunk("other", "Title"), Chunk(text, is_gold=True), Chunk("other", "Title"))
    (document,) = documents_of([Example("q1", " Who? ", ("A",), chunks, "singlehop_qa")], 50)
    assert document.name == "q1"
    assert document.questions == ("Who?",)
    assert document.chunks[0].startswith("Word")
    assert document.chunks[-1] == "Title\nother"
    assert all(len(chunk) <= 200 for chunk in document.chunks)


def test_the_language_reference_in_chunks():
    documents = language_reference(256, 3)
    assert len(documents) > 50
    assert all(len(document.chunks) == 3 for document in documents)
    assert len({document.name for document in documents}) == len(documents)


def test_cutting_loses_no_word():
    text = "one two. three\n\nfour five six " * 30 + "x" * 100
    for tokens in (1, 5, 40):
        pieces = cut(text, tokens)
        assert "".join("".join(pieces).split()) == "".join(text.split())
        assert max(map(len, pieces)) <= 4 * tokens
    with pytest.raises(ConfigError, match="at least 1"):
        cut(text, 0)
