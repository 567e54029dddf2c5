"""Each reason why a chunk is not reused, as a caller of the core brings it about."""

import copy
import html
import json
import logging
import textwrap
import time
import unicodedata
from contextvars import copy_context
from functools import partial
from itertools import pairwise

import pytest
from tiny import ask, some_chunks, tiny_model, tiny_tokenizer
from tokenizers import normalizers

from ragkv import RagKV, ReuseConfig, StoreConfig
from ragkv.errors import StoreFullError
from ragkv.report.reasons import REASONS

PLAIN = some_chunks(6)
LINES = [
    f"{text}\n  It's an \u201cend\u201d,\n  of part {at}: don't go on."
    for at, text in enumerate(PLAIN)
]
"""Chunks of several lines, with quotes and indentation."""

HEADED = [f"source: {at}.md\nread at: 12:0{at}\n\n{text}" for at, text in enumerate(LINES)]
SENTENCES = [". ".join(textwrap.wrap(text, 60)) + "." for text in PLAIN]


@pytest.fixture
def make_engine(make_engine):
    """Make engines of few layers: what the model says is not looked at here."""
    return partial(make_engine, layers=2)


def reasons(report) -> list[str]:
    return [miss.reason for miss in report.misses]


def answer(kv, texts, prompt, **settings):
    return kv.generate(prompt, max_new_tokens=1, retrieved=texts, **settings).report


def halves(text: str) -> tuple[str, str]:
    middle = text.index(" ", len(text) // 2)
    return text[:middle], text[middle + 1 :]


REWRITTEN = {
    "list": [
        lambda t: str([t]),
        lambda t: f"[Document(id='1', metadata={{'source': 'a'}}, page_content={t!r})]",
        lambda t: str([t, "Another one,\nof two lines"]),
        lambda t: str([t])[:-12],
    ],
    "json": [
        lambda t: json.dumps({"text": t}),
        lambda t: json.dumps([{"page": 1, "text": t}], ensure_ascii=False, indent=2),
        lambda t: json.dumps({"result": json.dumps({"text": t})}),
    ],
    "html": [
        html.escape,
        lambda t: html.escape(t).replace("&#x27;", "&#39;"),
        lambda t: f"<pre>{html.escape(t)}</pre>",
    ],
    "indentation": [
        lambda t: textwrap.indent(t, "    "),
        lambda t: "\n".join(map(str.strip, t.split("\n"))),
        lambda t: textwrap.indent(t, "\t"),
    ],
    "whitespace": [
        lambda t: " ".join(t.split()),
        lambda t: t.replace("\n", "\n\n"),
        lambda t: t.replace(" ", "  "),
        lambda t: textwrap.fill(t, 40),
        lambda t: t.replace("\n", "\r\n"),
    ],
    "case": [str.lower, str.upper, lambda t: " ".join(t.split()).title()],
    "characters": [
        lambda t: t.replace("\u201c", '"').replace("\u201d", '"'),
        lambda t: t.replace("'", "\u2019"),
        lambda t: unicodedata.normalize("NFKC", t.replace("\u201c", "''")).replace("''", '"'),
    ],
    "cut": [
        lambda t: t[: len(t) // 2],
        lambda t: t[len(t) // 3 :] if "\n" not in t[: len(t) // 2] else t[30:],
        lambda t: t[20:-70] + "...",
    ],
    "pieces": [
        lambda t: "Source 1:\n{}\nSource 2:\n{}".format(*halves(t)),
        lambda t: "\n---\n".join(halves(t)),
        lambda t: "{1}\n\n{0}".format(*halves(t)),
    ],
}


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize(
    ("reason", "change"),
    [
        pytest.param(reason, change, id=f"{reason}{at}")
        for reason, changes in REWRITTEN.items()
        for at, change in enumerate(changes)
    ],
)
def test_a_chunk_that_is_rewritten_while_others_are_reused(make_engine, reason, change, stored):
    kv = make_engine()
    kv.precompute(LINES[:3] if stored else LINES[:2])
    prompt = ask([LINES[0], change(LINES[2]), LINES[1]])
    report = answer(kv, LINES[:3], prompt)
    assert [use.text for use in report.chunks if use.text != LINES[2]] == [LINES[0], LINES[1]]
    (miss,) = report.misses
    assert (miss.reason, miss.chunk) == (reason, LINES[2][:80])
    assert miss.mend == REASONS[reason].mend
    level = REASONS[reason].level
    assert [f"({reason})" in said for said in report.warnings] == [True] * (level == "warning")


@pytest.mark.parametrize(
    ("reason", "chunk", "written"),
    [
        ("metadata", HEADED[0], LINES[0]),
        ("metadata", HEADED[0], HEADED[0].replace("12:00", "12:30")),
        ("metadata", HEADED[0], f"Source 1:\n{LINES[0]}\n"),
        ("metadata", f"page: 3\n{PLAIN[0]}\nfoot: 3", PLAIN[0]),
        ("metadata", f"<source id='1'>\n{PLAIN[0]}\n</source>", PLAIN[0]),
        ("metadata", f"From 3.md of the manual:\n\n{LINES[0]}", LINES[0]),
        ("enlarged", HEADED[0], f"{HEADED[0][:29]}{PLAIN[2]} {LINES[0]} {PLAIN[3]}"),
        ("enlarged", HEADED[0], f"{HEADED[0][:29]}{PLAIN[2]}\n\n{LINES[0]}"),
        ("enlarged", f"From a manual:\n{PLAIN[0]}", f"From a manual:\n{PLAIN[2]} {PLAIN[0]}"),
        ("shortened", f"{PLAIN[2][:40]}.\n\n{LINES[0]}", f"{LINES[0]} {PLAIN[3]}"),
        ("cut", f"def path():\n{LINES[0]}", LINES[0]),
        ("pieces", HEADED[0], "Source 1:\n{}\nSource 2:\n{}".format(*halves(LINES[0]))),
        ("shortened", SENTENCES[0], ". ".join(SENTENCES[0].split(". ")[1:3]) + "."),
        ("shortened", SENTENCES[0], ". ".join(SENTENCES[0].split(". ")[:2]) + "."),
        ("shortened", SENTENCES[0], " ".join(s + "." for s in SENTENCES[0].split(". ")[::2])),
        ("left_out", LINES[0], ""),
        ("left_out", LINES[0], "Something else, but of the same length. " * 5),
        ("left_out", LINES[0], LINES[0][:20]),
    ],
)
def test_a_chunk_of_which_a_part_is_there(make_engine, reason, chunk, written):
    kv = make_engine()
    kv.precompute([chunk, LINES[1]])
    report = answer(kv, [chunk, LINES[1]], ask([written, LINES[1]]))
    assert reasons(report) == [reason]
    assert LINES[1] in [use.text for use in report.chunks]


@pytest.mark.parametrize("on_miss", ["store", "skip"])
def test_chunks_that_are_not_stored(make_engine, on_miss):
    kv = make_engine(reuse=ReuseConfig(on_miss=on_miss))
    kv.precompute(PLAIN[:2])
    kv.forget(PLAIN[1])
    texts = [*PLAIN[:3], "Too short."]
    report = answer(kv, texts, ask(texts))
    stored = on_miss == "store"
    found = [(miss.reason, miss.stored_next) for miss in report.misses]
    assert found == [("deleted", stored), ("absent", stored), ("too_short", False)]
    assert ("is encoded after this answer" in report.misses[1].mend) == stored
    kv.wait()
    assert reasons(answer(kv, PLAIN[:3], ask([PLAIN[2], *PLAIN[:2]]))) == (
        [] if stored else ["deleted", "absent"]
    )


@pytest.mark.parametrize(
    ("settings", "detail"),
    [
        ({"sink": "Another head."}, "another sink"),
        ({"sink": ""}, "another sink"),
        ({"codec": "int8"}, "another codec"),
        ({"dtype": "bfloat16"}, "another dtype"),
        ({"seed": 1}, "other weights"),
        ({"normalizer": normalizers.NFC()}, "another tokenizer"),
    ],
)
def test_chunks_of_another_fingerprint(make_engine, tmp_path, settings, detail):
    tokenizer = copy.deepcopy(tiny_tokenizer())
    if "normalizer" in settings:
        tokenizer.backend_tokenizer.normalizer = settings["normalizer"]
    with RagKV(
        tiny_model(seed=settings.get("seed", 0), layers=2),
        tokenizer,
        store=StoreConfig(tmp_path, codec=settings.get("codec", "raw")),
        dtype=settings.get("dtype"),
    ) as other:
        other.precompute(PLAIN[:2], sink=settings.get("sink", "auto"))
    report = answer(make_engine(store=tmp_path), PLAIN[:2], ask(PLAIN[:2]))
    assert [(miss.reason, miss.detail) for miss in report.misses] == [("fingerprint", detail)] * 2
    assert detail in report.warnings[0]
    assert report.tokens.reused == 0
    assert all(miss.stored_next for miss in report.misses)


def test_evicted_chunks(make_engine, tmp_path):
    engines = (
        make_engine(store=StoreConfig(":memory:", memory_bytes=150_000)),
        make_engine(store=StoreConfig(tmp_path, disk_bytes=250_000)),
    )
    for kv in engines:
        for text in PLAIN:
            kv.precompute([text])
        gone = [text for text in PLAIN if not kv.contains(text)]
        assert 0 < len(gone) < len(PLAIN)
        report = answer(kv, PLAIN, ask(PLAIN), on_miss="skip")
        assert set(reasons(report)) == {"evicted"}
        assert len(report.misses) == len(gone)


def test_chunks_for_which_there_was_no_room(make_engine, tmp_path):
    kv = make_engine(store=StoreConfig(tmp_path, disk_bytes=10_000))
    with pytest.raises(StoreFullError):
        kv.precompute(PLAIN)
    report = answer(kv, PLAIN, ask(PLAIN))
    assert set(reasons(report)) == {"budget"}
    assert not any(miss.stored_next for miss in report.misses)


def test_expired_chunks(make_engine, tmp_path, monkeypatch):
    for kv in (make_engine(), make_engine(store=tmp_path)):
        kv.precompute(PLAIN[:1], expires_in=60)
        kv.precompute(PLAIN[1:2])
        now = time.time()
        monkeypatch.setattr(time, "time", lambda now=now: now + 100)
        assert reasons(answer(kv, PLAIN[:2], ask(PLAIN[:2]))) == ["expired"]
        monkeypatch.undo()


def test_chunks_too_long_for_the_model(make_engine):
    kv = make_engine()
    long = " ".join(some_chunks(1, words=2500))
    kv.precompute([long, PLAIN[0]])
    report = answer(kv, [long, PLAIN[0]], ask([PLAIN[0], long[:4000]]))
    assert reasons(report) == ["too_long"]


def test_corrupt_chunks(make_engine, tmp_path):
    with RagKV(tiny_model(layers=2), tiny_tokenizer(), store=tmp_path) as kv:
        kv.precompute(PLAIN[:3])
    torn, flipped, _ = sorted(tmp_path.rglob("*.safetensors"))
    torn.write_bytes(torn.read_bytes()[:9000])
    blob = bytearray(flipped.read_bytes())
    blob[-9000] ^= 1
    flipped.write_bytes(blob)
    kv = make_engine(store=StoreConfig(tmp_path, memory_bytes=0))
    for texts in (PLAIN[:3], PLAIN[2::-1]):
        report = answer(kv, texts, ask(texts), on_miss="skip")
        assert sorted(reasons(report)) == ["checksum", "unreadable"]
    report = answer(kv, PLAIN[:3], ask([PLAIN[1], PLAIN[0], PLAIN[2]]))
    assert all(miss.stored_next for miss in report.misses)


def test_what_was_chosen_is_accounted_for_without_a_warning(make_engine, caplog):
    kv = make_engine(store=StoreConfig(":memory:", history_bytes=0))
    kv.precompute(PLAIN[:3])
    for settings, expected in (
        ({"recompute_ratio": 1.0}, ["ratio"] * 3),
        ({"method": "full"}, ["method"] * 3),
        ({"method": "prefix"}, ["method"] * 2),
        ({}, []),
    ):
        report = answer(kv, PLAIN[:3], ask(PLAIN[:3]), **settings)
        assert reasons(report) == expected
        assert not report.warnings
    assert not caplog.records


def test_a_model_without_reuse(make_engine, monkeypatch):
    kv = make_engine()
    monkeypatch.setattr(kv, "_reuse", None)
    kv.prefetch(PLAIN[:1])
    assert reasons(answer(kv, PLAIN[1:2], ask(PLAIN[:2]))) == ["unsupported"] * 2


def test_a_chunk_that_another_one_overlaps(make_engine):
    kv = make_engine()
    first, second = f"{PLAIN[0]} {PLAIN[1]}", f"{PLAIN[1]} {PLAIN[2][:60]}"
    kv.precompute([first, second])
    report = answer(kv, [first, second], ask([f"{PLAIN[0]} {second}"]))
    assert reasons(report) == ["overlap"]
    inner = PLAIN[0][10:90]
    kv.precompute([inner])
    assert reasons(answer(kv, [first, inner], ask([first]))) == []


@pytest.mark.parametrize(
    ("named", "stored"),
    [
        (HEADED[0], [LINES[0]]),
        (LINES[0].replace("\n", "\r\n"), [LINES[0]]),
        (" ".join(LINES[0].split()), [HEADED[0]]),
        (f"{PLAIN[0]}\n\n{PLAIN[1]}", PLAIN[:2]),
        (HEADED[0], [f"{HEADED[0][:29]}{PLAIN[1]} {LINES[0]}"]),
    ],
)
@pytest.mark.parametrize("many", [0, 300])
def test_a_chunk_that_is_reused_in_its_other_form_is_no_miss(make_engine, named, stored, many):
    kv = make_engine()
    kv.precompute([named, *stored])
    others = [f"{at}: a text that no prompt has, and that is long enough." for at in range(many)]
    prompt = ask(["Some words first.", *(f"{text}\n---" for text in stored)])
    found = answer(kv, [named, *others], prompt, on_miss="skip")
    assert reasons(found) == ["left_out"] * many
    assert [use.text for use in found.chunks] == stored
    assert reasons(answer(kv, [named], prompt, recompute_ratio=1.0)) == ["ratio"]


@pytest.mark.parametrize("share", [0.5, 0.7, 0.95])
@pytest.mark.parametrize("others", [[], [LINES[1]]])
def test_a_chunk_that_is_half_used_is_a_miss_without_a_name(make_engine, share, others):
    kv = make_engine()
    kv.precompute(LINES[:3])
    half = LINES[0][: int(share * len(LINES[0])) + 1]
    report = answer(kv, others, ask([half, LINES[1]]))
    assert [(miss.chunk, miss.reason) for miss in report.misses] == [(LINES[0][:80], "cut")]
    assert LINES[0] in [use.text for use in report.chunks]


def test_little_of_a_chunk_or_the_rest_elsewhere_is_no_miss(make_engine):
    kv = make_engine()
    kv.precompute([*LINES[:2], f"{PLAIN[3]} {PLAIN[4]}", f"{PLAIN[4]} {PLAIN[5]}"])
    for prompt in (
        ask([LINES[0][:60], LINES[1]]),  # a head that other chunks may have
        ask([LINES[0], LINES[1], LINES[0][:-20]]),  # there whole, too
        ask([f"{PLAIN[3]} {PLAIN[4]} {PLAIN[5]}"]),  # whose end another chunk has
    ):
        report = answer(kv, [], prompt)
        assert report.chunks
        assert set(reasons(report)) <= {"overlap"}


@pytest.mark.parametrize("line_ends", ["\n", "\n\n", " "])
@pytest.mark.parametrize("later", [1, 2])
def test_another_splitters_chunk_that_starts_later_is_no_miss(make_engine, line_ends, later):
    kv = make_engine()
    lines = textwrap.wrap(" ".join(PLAIN), 60)
    chunks = [line_ends.join(lines[at : at + 6]) for at in (0, 6)]
    kv.precompute(chunks)
    for others in ([lines[later:8]], [lines[later:3], lines[3:6]], [lines[later:6]]):
        prompt = ask([f"\n---\n{line_ends.join(each)}" for each in others])
        assert reasons(answer(kv, [], prompt)) == []
        assert reasons(answer(kv, chunks[:1], prompt)) == ["cut"]


# ---- which prompt a list belongs to


def test_names_given_before_the_prompt(make_engine):
    kv = make_engine()
    kv.precompute(LINES[:2])
    kv.prefetch(LINES[:3])
    prompt = ask([LINES[0], str([LINES[1]])])
    assert reasons(kv.generate(prompt, max_new_tokens=1).report) == ["list", "left_out"]
    assert reasons(kv.prefill(ask(["Another question."])).report) == []


def test_every_call_of_a_synthesizer_has_its_chunks(make_engine):
    kv = make_engine()
    kv.prefetch(LINES[:4])
    first = kv.generate(ask([str(LINES[:2])]), max_new_tokens=1).report
    assert sorted(reasons(first)) == ["left_out", "left_out", "list", "list"]
    second = kv.generate(ask([str(LINES[2:4])]), max_new_tokens=1).report
    assert reasons(second) == ["list"] * 2


def test_callers_at_once_get_their_own_chunks_alone(make_engine):
    kv = make_engine()
    chunks = [[f"{first}\nMore.", second] for first, second in list(pairwise(some_chunks(12)))[::2]]
    shared = "A chunk that several callers retrieve, since it is about everything."
    callers = [(copy_context(), mine) for mine in chunks]
    for context, mine in callers:
        context.run(kv.prefetch, [*mine, shared])
    assert reasons(kv.generate("Hello.", max_new_tokens=1).report) == []
    for context, mine in reversed(callers):
        prompt = ask([str(mine[:1]), shared])
        report = context.run(kv.generate, prompt, max_new_tokens=1, on_miss="skip").report
        found = {miss.chunk: miss.reason for miss in report.misses}
        assert found == {mine[0][:80]: "list", mine[1][:80]: "left_out", shared: "absent"}


def test_a_stored_chunk_that_nobody_named_is_no_miss(make_engine):
    kv = make_engine()
    kv.precompute(LINES)
    for change in (str.upper, lambda text: text.replace(" ", "  ")):
        report = kv.generate(ask([LINES[0], change(LINES[1])]), max_new_tokens=1).report
        assert reasons(report) == []


# ---- how it is said


def test_one_line_of_the_log_has_all_of_an_answer(make_engine, caplog):
    kv = make_engine()
    kv.precompute(LINES[:2])
    prompt = ask([LINES[0], str([LINES[1]]), LINES[2]])
    with caplog.at_level(logging.INFO, "ragkv"):
        answer(kv, LINES[:4], prompt)
        kv.wait()
        answer(kv, LINES[:4], prompt)
    lines = [record for record in caplog.records if "not reused" in record.message]
    assert [record.levelname for record in lines] == ["WARNING", "INFO"]
    for reason in ("list", "absent", "left_out"):
        assert f"({reason})" in lines[0].message
        assert REASONS[reason].mend in lines[0].message
    assert "\n" not in lines[0].message


def test_a_summary_has_ten_lines_at_most(make_engine):
    kv = make_engine()
    kv.precompute(LINES[:2])
    changed = [changes[0](text) for changes, text in zip(REWRITTEN.values(), LINES, strict=False)]
    report = answer(kv, [*LINES, *HEADED[:2], "short"], ask([*changed, "short"]))
    assert len(report.misses) > 5
    lines = str(report).splitlines()
    assert len(lines) <= 10
    assert f"{report.tokens.prompt:,} tokens" in lines[0]
    assert f"{report.ttft_s:.3f} s" in lines[3]
    assert "more notes" in lines[-1]
    plain = str(kv.generate(ask(LINES[:2]), max_new_tokens=1).report)
    assert len(plain.splitlines()) == 4
    assert "20% requested" in plain


@pytest.mark.parametrize("given", [True, False])
def test_a_foreign_head_is_told_with_its_mend(make_engine, given):
    kv = make_engine()
    settings = {"sink": kv.sink_from("Read this first.\n\n{context}")} if given else {}
    kv.precompute(PLAIN[:1], **settings)
    (said,) = kv.generate(f"Read that.\n\n{PLAIN[0]}", max_new_tokens=1, **settings).report.warnings
    assert "sink= (or sink_from=) is given this prompt template's head" in said
    assert "the sink has" in said
    assert "and the prompt" in said


@pytest.mark.parametrize("chunks", [[], PLAIN[3:4]])
def test_a_foreign_head_matters_to_chunks_alone(make_engine, chunks, caplog):
    kv = make_engine(reuse=ReuseConfig())
    kv.precompute(chunks)
    prompt = f"Read that.\n\n{PLAIN[0]}"
    for end in (" What?", " What? Why?", " What? Why not?"):
        report = kv.generate(prompt + end, max_new_tokens=1).report
        assert not report.warnings
    assert report.tokens.history_exact
    assert not caplog.records


@pytest.mark.parametrize("way", ["call", "before"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_how_many_were_named_is_said_where_some_were(make_engine, caplog, count, way):
    kv = make_engine()
    if way == "before":
        kv.prefetch(PLAIN[:count])
    report = answer(kv, PLAIN[:count] if way == "call" else [], ask(PLAIN[:count]), on_miss="skip")
    begins = "1 chunk was not" if count == 1 else f"Of the {count} retrieved chunks, {count} were"
    assert report.warnings[0].startswith(begins)
    caplog.clear()
    kv.precompute(PLAIN[:1])
    later = answer(kv, [], ask([str([LINES[0]]), PLAIN[0].upper()]))
    assert "retrieved" not in " ".join((*later.warnings, caplog.text))
