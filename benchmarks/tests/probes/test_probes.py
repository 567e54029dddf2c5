"""Probes: what is hidden and asked, and which answers are right."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from statistics import median
from types import SimpleNamespace

import pytest
from tiny import tiny_tokenizer

from ragkv.engine.quality import is_copied
from ragkv.errors import ConfigError
from ragkv_bench.data.examples import Chunk, DataSet, Example
from ragkv_bench.data.needles import _prompt_tokens, default_haystack
from ragkv_bench.data.tasks import TASKS, chunk_text, prompt
from ragkv_bench.probes.abstention import MISSING, says_missing
from ragkv_bench.probes.aggregation import counts
from ragkv_bench.probes.copies import RECORDS
from ragkv_bench.probes.length import LENGTHS, within
from ragkv_bench.probes.sets import PROBES, probe_sets
from ragkv_bench.quality.scores import score

HAYSTACK = default_haystack()[:40_000]


def _sets(*names, lengths=(2600,), count=4, positions=4096, **how):
    info = SimpleNamespace(positions=positions, name="tiny")
    kv = SimpleNamespace(tokenizer=tiny_tokenizer(), info=info)
    return probe_sets(kv, names, HAYSTACK, lengths, count=count, **how)


def _kinds(name, count):
    (made,) = _sets(name, count=count)
    return made.kinds


def _text(example):
    return " ".join(chunk.text for chunk in example.chunks)


@pytest.mark.parametrize("name", PROBES)
def test_a_seed_repeats_its_examples(name):
    def made(seed):
        return _sets(name, count=len(PROBES[name]), seed=seed)

    assert made(1) == made(1)
    assert made(1) != made(2)
    first = {each.chunks for one in made(1) for each in one.data.examples}
    assert len(first) == len(PROBES[name])


@pytest.mark.parametrize("name", PROBES)
def test_the_expected_answer_is_right_and_a_corrupted_one_wrong(name):
    for example in _sets(name, count=3 * len(PROBES[name]))[0].data.examples:
        said = f"Here:\n {', '.join(example.answers)}."
        assert score(example, said) == 1
        first = example.answers[0]
        last = "x" if first[-1] != "x" else "y"
        wrong = (
            "It is 1999."
            if example.task == "abstention"
            else said.replace(first, first[:-1] + last)
        )
        if example.task == "count":
            wrong = f"Here: 1{first}"
        assert score(example, wrong) < 1
        assert score(example, "") == 0


@pytest.mark.parametrize("name", PROBES)
def test_chunks_and_prompts_have_the_wanted_length(name):
    tokenizer = tiny_tokenizer()
    for example in _sets(name, count=len(PROBES[name]))[0].data.examples:
        lengths = [len(tokenizer(chunk_text(chunk))["input_ids"]) for chunk in example.chunks]
        assert 150 <= median(lengths) <= 300
        room = 2600 - TASKS[example.task].max_new_tokens
        assert room - 300 < _prompt_tokens(example, tokenizer) <= room
        assert f"\n\n{example.question}" in prompt(example)[0]["content"]


def test_a_record_stands_in_one_chunk_among_others_of_its_shape():
    for kind, examples in _kinds("copies", 8).items():
        for example in examples:
            (expected,) = example.answers
            gold = [chunk for chunk in example.chunks if expected in chunk.text]
            assert [chunk.is_gold for chunk in gold] == [True], kind
            assert sum(chunk.is_gold for chunk in example.chunks) == 1
            assert _text(example).count(" of project ") == RECORDS
            assert 20 <= len(expected) <= 120
    assert is_copied("It is:\n 12  Elm\nLane", "12 Elm Lane")
    assert not is_copied("12 elm Lane", "12 Elm Lane")


def test_what_is_asked_for_is_missing():
    for example in _kinds("abstention", 4)["missing"]:
        asked = example.question.split("project ")[1].split()[0]
        assert asked not in _text(example)
        assert _text(example).count("The manager of project") == 3
        assert MISSING in example.question
        assert not any(chunk.is_gold for chunk in example.chunks)


@pytest.mark.parametrize(
    ("answer", "missing"),
    [
        ("Not in the documents.", True),
        ("The documents don\u2019t mention it.", True),
        ("The document does not specify the year", True),
        ("There is no information about him", True),
        ("In 1983.", False),
        ("", False),
        ("He noted that it is known.", False),
    ],
)
def test_answers_that_say_that_something_is_missing(answer, missing):
    assert says_missing(answer) == missing


def test_gold_chunks_of_a_file_are_removed():
    chunks = (Chunk("Ada did.", is_gold=True), Chunk("Bob did not."))
    whole = Example("a", "Who?", ("Ada",), chunks, "singlehop_qa")
    alone, none = (
        replace(whole, id="b", chunks=chunks[:1]),
        replace(whole, id="c", chunks=chunks[1:]),
    )
    data = DataSet("mine", (whole, alone, none))
    (made,) = _sets("abstention", data=data)
    (example,) = made.data.examples
    assert (made.tokens, list(made.kinds), example.id) == (None, ["mine"], "a")
    assert (example.chunks, example.task) == (chunks[1:], "abstention")
    assert example.question.startswith("Who? If this is not in the documents")
    with pytest.raises(ConfigError, match="no example of mine has a gold chunk beside others"):
        _sets("abstention", data=DataSet("mine", (alone, none)))


def test_what_is_counted_is_there_so_often():
    kinds = _kinds("aggregation", 8)
    for kind in ("common", "frequent"):
        for example in kinds[kind]:
            words = Counter(_text(example).split())
            assert {word for word, _ in words.most_common(len(example.answers))} == set(
                example.answers
            )
            rest = [count for word, count in words.items() if word not in example.answers]
            assert max(rest) <= 3
    for kind in ("list", "count"):
        for example in kinds[kind]:
            team = example.question.split("team ")[1].split()[0]
            found = _text(example).count(f"One of the badges of team {team} is: ")
            assert found == (len(example.answers) if kind == "list" else int(example.answers[0]))
            assert len([chunk for chunk in example.chunks if chunk.is_gold]) > 1


def test_numbers_are_read_in_digits_and_words():
    assert counts("There are four members of 17.", "4")
    assert counts("4", "4")
    assert not counts("14", "4")
    assert not counts("someone", "1")
    assert not counts("many", "4")


def test_lengths_are_those_that_the_model_has():
    assert within(None, (), "m") == LENGTHS
    assert within(8192, (), "m") == LENGTHS[:2]
    assert within(8192, (8192, 4096), "m") == (8192, 4096)
    for lengths in ((4096, 16384), ()):
        with pytest.raises(ConfigError, match=r"tiny has 2048 positions, not 4096"):
            within(2048, lengths, "tiny")
    found = _sets("length", "copies", lengths=(), count=1)
    assert [(each.probe, each.tokens) for each in found] == [("length", 4096), ("copies", 2048)]


REFUSED = [
    (("copies", "spelling"), {}, "takes copies, abstention, aggregation, length, not spelling"),
    ((), {}, "not nothing"),
    (("copies",), {"data": DataSet("mine", ())}, "changes nothing without the probe abstention"),
    (("copies",), {"lengths": (8192,)}, "tiny has 4096 positions, not 8192"),
    (("copies",), {"lengths": (100,)}, "copy needles need at least [0-9]+ tokens, not 100"),
]


@pytest.mark.parametrize(("names", "how", "words"), REFUSED)
def test_what_cannot_be_made_is_refused(names, how, words):
    with pytest.raises(ConfigError, match=words):
        _sets(*names, **how)
