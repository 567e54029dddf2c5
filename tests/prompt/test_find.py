"""ChunkFinder against a slow reference that shares no code with it, and the cases by name."""

import threading
from functools import cache

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny import some_chunks

from ragkv.prompt import find, heads
from ragkv.prompt.find import MIN_CHARS, MIN_HEAD, ChunkFinder, Span, cover, is_registrable
from ragkv.prompt.rolling import code_points, head_hashes, window_hashes

A, B, C = some_chunks(3, words=50)
HEAD = "file_path: /data/docs/handbook/chapter-one.md\n\npage_label: 12\n\n"


def where(finder: ChunkFinder, prompt: str) -> list[tuple[str, str]]:
    """Return the text of each span and that of its chunk, having checked the spans."""
    spans = finder.find(prompt)
    check(prompt, spans, finder)
    return [(prompt[span.start : span.end], span.text) for span in spans]


def is_complete(span: Span) -> bool:
    return span.end - span.start == len(span.text)


def check(prompt: str, spans: list[Span], finder: ChunkFinder) -> None:
    end = 0
    for span in spans:
        assert end <= span.start < span.end <= len(prompt)
        assert prompt[span.start : span.end] == span.text[: span.end - span.start]
        assert span.text in finder
        assert is_complete(span) or span.end - span.start >= MIN_HEAD
        end = span.end


# --- the reference: every text at every place, character by character -----------------------


def common(prompt: str, start: int, text: str) -> int:
    count = 0
    while (
        count < len(text) and start + count < len(prompt) and prompt[start + count] == text[count]
    ):
        count += 1
    return count


def best(longest: dict[int, int], low: int, high: int, shortest: int | None) -> tuple[int, int]:
    """Return the most characters covered in [low, high), and minus the spans that takes."""

    @cache
    def from_(place: int) -> tuple[int, int]:
        if place >= high:
            return 0, 0
        options = [from_(place + 1)]
        if place in longest:
            end = min(place + longest[place], high)
            ends = [end] if shortest is None else range(place + shortest, end + 1)
            for stop in ends:
                rest = from_(stop)
                options.append((rest[0] + stop - place, rest[1] - 1))
        return max(options)

    for place in range(high, low, -1):  # shallow recursion
        from_(place)
    return from_(low)


def compare(texts: list[str], prompt: str) -> None:
    finder = ChunkFinder(texts)
    spans = finder.find(prompt)
    check(prompt, spans, finder)
    known = {text.strip() for text in texts if len(text.strip()) >= MIN_CHARS}
    whole: dict[int, int] = {}
    cut: dict[int, int] = {}
    for start in range(len(prompt)):
        for text in known:
            count = common(prompt, start, text)
            if count == len(text):
                whole[start] = max(count, whole.get(start, 0))
            if count >= MIN_HEAD:
                cut[start] = max(count, cut.get(start, 0))
    complete = [span for span in spans if is_complete(span)]
    for span in complete:
        assert span.end - span.start == whole[span.start]
    total = sum(span.end - span.start for span in complete)
    assert (total, -len(complete)) == best(whole, 0, len(prompt), None)
    borders = [0, *(edge for span in complete for edge in (span.start, span.end)), len(prompt)]
    for low, high in zip(borders[::2], borders[1::2], strict=True):
        inside = [s for s in spans if low <= s.start < high and not is_complete(s)]
        total = sum(span.end - span.start for span in inside)
        free = {start: count for start, count in cut.items() if high - start >= MIN_HEAD}
        assert (total, -len(inside)) == best(free, low, high, MIN_HEAD)


BLOCKS = ["a" * 20, "b" * 20, "ab" * 9, "b", "\n", "a" * 31 + "\N{ROCKET}", "e\u0301", "\ud800"]
PIECES = st.lists(st.sampled_from(BLOCKS), min_size=1, max_size=6).map("".join)


@st.composite
def registries(draw: st.DrawFn) -> tuple[list[str], str]:
    """Draw chunks of a few blocks, and a prompt of chunks, their heads and other blocks."""
    texts = draw(st.lists(PIECES, min_size=1, max_size=6))
    parts = st.one_of(
        PIECES,
        st.sampled_from(texts),
        st.tuples(st.sampled_from(texts), st.integers(1, 120)).map(lambda cut: cut[0][: cut[1]]),
    )
    return texts, "".join(draw(st.lists(parts, max_size=5)))


@settings(max_examples=300, deadline=None)
@given(registries())
@example((["a" * 100, "a" * 60 + "b" * 60], "a" * 150 + "b" * 70))
def test_agrees_with_the_reference(case):
    compare(*case)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_adding_and_discarding_agree_with_a_new_finder(data):
    texts, prompt = data.draw(registries())
    finder, live = ChunkFinder(), set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(find, "_SMALL", 1)  # several indexes, merges and rebuilds
        for text in data.draw(st.lists(st.sampled_from(texts), max_size=20)):
            if text in finder:
                finder.discard(text)
                live.discard(text.strip())
            elif is_registrable(text):
                finder.add([text])
                live.add(text.strip())
    assert len(finder) == len(live)
    found, expected = finder.find(prompt), ChunkFinder(live).find(prompt)
    check(prompt, found, finder)
    assert [(s.start, s.end) for s in found if is_complete(s)] == [
        (s.start, s.end) for s in expected if is_complete(s)
    ]
    assert sum(s.end - s.start for s in found) == sum(s.end - s.start for s in expected)


# --- registering ----------------------------------------------------------------------------


def test_empty_registry_and_empty_prompt():
    assert ChunkFinder().find("some prompt") == []
    assert ChunkFinder([A]).find("") == []
    assert len(ChunkFinder()) == 0


def test_texts_are_stripped_and_short_ones_passed_over():
    finder = ChunkFinder([f"\n {A}\t\n", A, "x" * (MIN_CHARS - 1), "", "y" * MIN_CHARS])
    assert len(finder) == 2
    assert A in finder
    assert f"  {A}" in finder
    assert "x" * (MIN_CHARS - 1) not in finder
    assert where(finder, f"1) {A}\n2) " + "y" * MIN_CHARS) == [(A, A), ("y" * 16, "y" * 16)]
    assert not is_registrable(" " * 40 + "x")
    assert is_registrable("y" * MIN_CHARS)


def test_discarded_chunks_are_not_found():
    finder = ChunkFinder([A, B])
    finder.discard(f" {A} ")
    finder.discard("never registered, no error")
    assert A not in finder
    assert where(finder, A + B) == [(B, B)]
    assert where(finder, A[:100]) == []
    finder.add([A])
    assert where(finder, A + B) == [(A, A), (B, B)]


def test_discarding_the_longer_chunk_leaves_the_one_inside():
    finder = ChunkFinder([A, A[:100], A[:60]])
    finder.discard(A[:100])
    assert where(finder, A[:120]) == [(A[:60], A[:60])]  # whole before cut off, the rest is short


def test_discarded_texts_do_not_pile_up():
    finder = ChunkFinder()
    for number in range(3000):
        text = f"{number} {A}"
        finder.add([text])
        finder.discard(text)
    assert len(finder) == 0
    assert sum(map(len, finder._indexes)) < 1000


def test_discarding_a_large_registry_frees_it():
    texts = [f"{number:x}: {A}" for number in range(3000)]
    finder = ChunkFinder(texts)
    for text in texts:
        finder.discard(text)
    assert sum(map(len, finder._indexes)) < 1000
    assert finder.find(texts[5]) == []


def test_adding_again_changes_nothing():
    finder = ChunkFinder([A, B])
    indexes = finder._indexes
    finder.add([A, f"{B}\n", A])
    assert finder._indexes is indexes
    assert len(finder) == 2


def test_one_at_a_time_makes_few_indexes():
    finder = ChunkFinder(f"{number:x}: {A}" for number in range(5000))
    for number in range(5000, 6500):
        finder.add([f"{number:x}: {A}"])
    assert len(finder) == 6500
    assert len(finder._indexes) <= 5
    for number in (0, 4999, 5000, 6400, 6499):
        text = f"{number:x}: {A}"
        assert where(finder, f"Context:\n{text}\n") == [(text, text)]


# --- finding --------------------------------------------------------------------------------


DOCUMENT, MARK = A + B, "#" * 60
MARKED = [MARK, MARK + "a" * 60, MARK + "b" * 60, MARK + "c" * 60]
SHORT = A[: MIN_HEAD - 1]
LONGER, BY_CHANCE = A[:100] + B + C, A[:100] + B[:9] + C
OVERLAPPING = [(A + B + C)[start : start + 200].strip() for start in range(0, len(A + B + C), 150)]


@pytest.mark.parametrize(
    ("texts", "prompts"),
    [
        ([A, B], [f"{A}{A}\n{B}{A}?"]),
        ([A, A[:80], A[40:90], A[:20]], [f"x {A} y", f"x {A[:80]} y"]),
        ([A[:60], A[40:]], [A]),
        ([DOCUMENT[:200], DOCUMENT[150:270]], [DOCUMENT[:270]]),
        (MARKED, [text + end for text in MARKED for end in ("", "!", "~", "b" * 9)]),
        ([A, B], [f"Context: {A[:cut]}{end}" for cut in (MIN_HEAD, 100) for end in ("", f"\0{B}")]),
        ([A, B], [A[: MIN_HEAD + 1], A[:-1], SHORT, A[1:], SHORT + "\n" * 50]),
        ([LONGER, B], [LONGER[:-1], A[:100] + B[:-1]]),
        ([BY_CHANCE, B], [A[:100] + B]),
        (OVERLAPPING, ["\n\n".join(OVERLAPPING), A + B + C]),
        ([A[:90] + B[:50] + A[:90] + C], [f"-{A[:90]}{B[:50]}{A[:90]}{C}-", A[:90] * 2 + B[:50]]),
    ],
    ids=[
        "repeated",
        "nested",
        "overlap",
        "no room",
        "one head",
        "cut",
        "short",
        "cut before a whole one",
        "on by chance",
        "splitter",
        "own head again",
    ],
)
def test_cases_by_name_agree_with_the_reference(texts, prompts):
    for prompt in prompts:
        compare(texts, prompt)


def test_thousands_of_chunks_with_one_head():
    texts = [f"{HEAD * 5}{number * 7919 % 5003} {A}" for number in range(5000)]
    finder = ChunkFinder(texts)
    expected = [texts[0], texts[4999], texts[1234]]
    assert where(finder, "\n\n".join(expected)) == [(text, text) for text in expected]
    assert where(finder, texts[77][:-20]) == [(texts[77][:-20], texts[77])]
    ((part, text),) = where(finder, HEAD * 5 + "another text altogether")
    assert part == HEAD * 5
    assert text in texts


@pytest.mark.parametrize(
    "odd",
    ["\N{GRINNING FACE}", "e\u0301\u0323", "\ud83d", "\udc00\ud800", "\x00", "\U0010ffff", "שלום"],
)
def test_unicode_offsets_are_those_of_str(odd):
    text = f"{odd}{A[:60]}{odd}{A[60:]}{odd}"
    finder = ChunkFinder([text, B])
    prompt = f"{odd * 3}\N{ROCKET}{text}\N{ROCKET}{B}"
    assert finder.find(prompt) == [
        Span(len(odd) * 3 + 1, len(odd) * 3 + 1 + len(text), text),
        Span(len(prompt) - len(B), len(prompt), B),
    ]
    assert where(finder, prompt[: len(odd) * 3 + 81]) == [(text[:80], text)]


# --- hashes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 2, 7, 16, 31, 48])
def test_window_hashes_are_the_polynomial(width):
    text = A[:60] + "\N{ROCKET}\ud800"
    base = 0x9E3779B97F4A7C15
    expected = [
        sum(ord(text[i + k]) * base ** (width - 1 - k) for k in range(width)) % 2**64
        for i in range(len(text) - width + 1)
    ]
    assert window_hashes(code_points(text), width).tolist() == expected
    windows = [text[i:] for i in range(len(expected))]
    assert head_hashes(windows, width).tolist() == expected
    assert len(window_hashes(code_points(text[: width - 1]), width)) == 0


def test_hashes_of_many_heads_come_in_order():
    texts = [f"{number:05} {A}" for number in range(20_000)]
    hashes = head_hashes(texts, 16)
    assert len(np.unique(hashes)) == len(texts)
    for number in (0, 8191, 8192, 19_999):
        assert hashes[number] == window_hashes(code_points(texts[number][:16]), 16)[0]


@settings(max_examples=100, deadline=None)
@given(registries())
def test_colliding_hashes_change_nothing(case):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            heads, "head_hashes", lambda texts, width: head_hashes(texts, width) % np.uint64(2)
        )
        patch.setattr(
            find, "window_hashes", lambda codes, width: window_hashes(codes, width) % np.uint64(2)
        )
        compare(*case)


def test_colliding_hashes_do_not_shorten_the_least_head(monkeypatch):
    monkeypatch.setattr(heads, "head_hashes", lambda texts, _: np.zeros(len(texts), np.uint64))
    monkeypatch.setattr(find, "window_hashes", lambda codes, _: np.zeros(len(codes), np.uint64))
    finder = ChunkFinder([A, B])
    assert where(finder, A[: MIN_HEAD - 1] + "\n" * 50) == []
    assert where(finder, f"{A[:MIN_HEAD]}\x00{B}") == [(A[:MIN_HEAD], A), (B, B)]


# --- choosing -------------------------------------------------------------------------------


def test_cover():
    assert cover([], []) == []
    assert cover([0, 5, 10], [10, 15, 20]) == [(0, 10), (2, 20)]
    assert cover([0, 5, 10], [6, 15, 12]) == [(1, 15)]
    assert cover([0, 1, 6], [6, 9, 8]) == [(1, 9)]  # fewest spans
    assert cover([0, 6], [8, 12], shortest=4) == [(0, 6), (1, 12)]
    assert cover([0, 2], [5, 12], shortest=4) == [(1, 12)]


# --- threads --------------------------------------------------------------------------------


def test_finding_while_others_add_and_discard():
    finder = ChunkFinder([A, B])
    prompt = f"{A}\n{C}\n{B}"
    done, wrong = threading.Event(), []

    def change(worker):
        for number in range(400):
            text = f"{worker}.{number} {C}"
            finder.add([text, C])
            finder.discard(text)
            finder.discard(C)

    def look():
        while not done.is_set():
            parts = [prompt[span.start : span.end] for span in finder.find(prompt)]
            if parts not in ([A, B], [A, C, B]):
                wrong.append(parts)

    readers = [threading.Thread(target=look, daemon=True) for _ in range(2)]
    writers = [threading.Thread(target=change, args=(worker,), daemon=True) for worker in range(2)]
    for thread in readers + writers:
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    for thread in readers:
        thread.join()
    assert wrong == []
    assert len(finder) == 2
