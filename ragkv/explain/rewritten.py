"""How a chunk's text stands in a prompt that does not have it verbatim."""

from __future__ import annotations

import html
import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from ragkv.prompt.rolling import Hashes, code_points, window_hashes

WINDOW = 32
"""Characters, blanks aside, that tell that a part of a chunk is in a prompt."""

_LEAST_SHARE, _LEAST_LETTERS = 0.2, 200
"""Of a chunk, either tells so: less may be a head that many chunks have."""

_SHORTEST = 8
"""Letters of a piece that may stand in a prompt by itself."""

PARTIAL = frozenset({"cut", "shortened"})
"""Reasons of a chunk of which the prompt has a part: another chunk may have the same part."""

_ESCAPED = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_HEAD_LINES = re.compile(
    r"(?:[^\n:]{1,40}: [^\n]*\n|[^\n:()]{1,60}:\n|<[^\n]{1,80}>\n)+\n*(?=.{16})", re.DOTALL
)
"""Metadata before a text, as frameworks write it: ``key: value``, a label, a tag."""

_CHARACTERS = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f"}
_VALUE = re.compile(r":\s*\\*\"$")
_STRAIGHT = str.maketrans(
    "\u2018\u2019\u201a\u201c\u201d\u201e\u2010\u2011\u2012\u2013\u2014\u2212", "'''\"\"\"------"
)
_SENTENCE_ENDS = ".!?"


def _written_out(text: str) -> str:
    """Undo a string's escapes, of Python, JSON or HTML, however deep."""
    before = ""
    while "\\" in text and text != before:
        before, text = text, _ESCAPED.sub(_character, text)
    if any("\ud800" <= char <= "\udfff" for char in ("" if text.isascii() else text)):
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return html.unescape(text)


def _character(match: re.Match[str]) -> str:
    code = match[1]
    return chr(int(code[1:], 16)) if len(code) > 1 else _CHARACTERS.get(code, code)


def _trimmed(text: str) -> str:
    return "\n".join(line.lstrip() for line in text.split("\n"))


def _joined(text: str) -> str:
    return "".join(text.split())


def _folded(text: str) -> str:
    return _joined(text).casefold()


def _plain(text: str) -> str:
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text).translate(_STRAIGHT)
    return _folded(text)


def bare(text: str) -> str:
    """Return a text's letters: no blanks, no escapes, one case and one Unicode form."""
    return _plain(_written_out(text))


_FORMS: tuple[tuple[str, Callable[[str], str]], ...] = (
    ("indentation", _trimmed),
    ("whitespace", _joined),
    ("case", _folded),
    ("characters", _plain),
    ("html", lambda text: _plain(html.unescape(text))),
)
"""Names of changes, and what makes a text and its changed form equal; the weakest first."""


class Rewritten:
    """A prompt in which chunks are looked for that do not stand there verbatim.

    Parameters
    ----------
    prompt
        Its text, or the parts of it that are no chunks.
    whole
        All of its text; None is ``prompt``.
    """

    def __init__(self, prompt: str, whole: str | None = None) -> None:
        self.prompt = prompt
        self._whole = prompt if whole is None else whole
        self._form = cache(lambda form: form(prompt))

    @cached_property
    def _windows(self) -> Hashes:
        """Hashes of all of its windows of :data:`WINDOW` letters, sorted."""
        return _windows(self._form(bare))

    @cached_property
    def _windows_as_written(self) -> Hashes:
        return _windows(self._form(_plain))

    def reason_of(self, text: str) -> str | None:
        """Return what was done to a chunk, one of the report's reasons; None where it is not there.

        Parameters
        ----------
        text
            A chunk that does not stand in the prompt as it is.
        """
        letters = bare(text)
        if len(letters) >= WINDOW // 2 and letters in self._form(bare):
            for name, form in _FORMS:
                if form(text) in self._form(form):
                    return name
            return self._kind_of_string(text)
        return self._reason_of_part(text, letters)

    def _reason_of_part(self, text: str, letters: str) -> str | None:
        head = _HEAD_LINES.match(text)
        body = bare(text[head.end() :]) if head else ""
        if head and len(body) >= WINDOW // 2 and body in self._form(bare):
            return "enlarged" if self._has_between(bare(head[0]), body) else "metadata"
        hashes = window_hashes(code_points(letters), WINDOW)
        there = _are_in(hashes, self._windows)
        runs = self._with_short_ones(letters, list(_runs(there)))
        least = max(WINDOW, min(_LEAST_SHARE * len(letters), _LEAST_LETTERS))
        if sum(end - start for start, end in runs) < least:
            return None
        as_written = window_hashes(code_points(_plain(text)), WINDOW)
        if _are_in(as_written, self._windows_as_written).sum() < there.sum():
            return self._kind_of_string(text)
        return self._kind_of_part(text, letters, runs)

    def _kind_of_part(self, text: str, letters: str, runs: Sequence[tuple[int, int]]) -> str:
        """Say what was done to a chunk of which some runs of letters are there."""
        start, end = runs[-1]
        if (start, end) == (0, len(letters)):
            return "pieces"  # all of its windows are there, and it is not
        head, body = _HEAD_LINES.match(text), _behind_lines(text, start, end)
        if body is not None and head and text.index(body) <= head.end():
            return "metadata" if bare(body) in self._form(bare) else "pieces"
        if len(runs) > 1 or (_may_end(letters, start) and _may_end(letters, end)):
            return "shortened"
        return "cut"

    def _has_between(self, head: str, body: str) -> bool:
        """Whether other text than a label stands between the letters of a head and a body."""
        before, _, _ = self._letters_of_whole.partition(body)
        _, found, between = before.rpartition(head)
        return bool(found and between) and not between.endswith(":")

    @cached_property
    def _letters_of_whole(self) -> str:
        return bare(self._whole)

    def _with_short_ones(self, letters: str, runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Add stretches between runs that are there, and too short for a window."""
        out: list[tuple[int, int]] = []
        for start, end in [*runs, (len(letters), len(letters))]:
            before = out[-1][1] if out else 0
            gap = letters[before:start]
            is_there = _SHORTEST <= len(gap) < WINDOW and gap in self._form(bare)
            joins = before == start or is_there
            if joins and out:
                out[-1] = out[-1][0], end
            elif start < end:
                out.append((before if joins else start, end))
        return out

    def _kind_of_string(self, text: str) -> str:
        """Say whether Python or JSON wrote the string that the chunk stands in."""
        by_json = json.dumps(text), json.dumps(text, ensure_ascii=False)
        for end in (-1, WINDOW):  # of the string, or of its head
            python = repr(text)[1:end] in self.prompt
            at = max(self.prompt.find(each[1:end]) for each in by_json)
            if python and at >= 0:  # then what is before it may tell
                before = self.prompt[max(0, at - WINDOW) : at]
                by_python = "'" in text and '"' not in text and not _VALUE.search(before)
                return "json" if before.endswith('"') and not by_python else "list"
            if python or at >= 0:
                return "list" if python else "json"
        return "json" if '\\"' in self.prompt else "list"


def _windows(letters: str) -> Hashes:
    return np.unique(window_hashes(code_points(letters), WINDOW))


def _are_in(hashes: Hashes, windows: Hashes) -> npt.NDArray[np.bool_]:
    """``[hashes]``: which of them are among the sorted windows."""
    if not len(windows):
        return np.zeros(len(hashes), dtype=np.bool_)
    at = np.minimum(np.searchsorted(windows, hashes), len(windows) - 1)
    return np.equal(windows[at], hashes)


def _runs(there: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Yield the start and end of every run of letters that are there.

    A text that was cut into pieces is one run: its pieces' letters touch.
    """
    flags = np.concatenate([[False], there, [False]]).astype(np.int8)
    run: tuple[int, int] | None = None
    for first, after in np.flatnonzero(np.diff(flags)).reshape(-1, 2).tolist():
        end = after - 1 + WINDOW
        if run is not None and first <= run[1]:
            run = run[0], end
            continue
        if run is not None:
            yield run
        run = first, end
    if run is not None:
        yield run


def _behind_lines(text: str, start: int, end: int) -> str | None:
    """Return the whole lines between two letters, if they are most of a text and not its first."""
    lines = text.splitlines(keepends=True)
    letters = [0, *accumulate(len(bare(line)) for line in lines)]
    first = next((at for at, before in enumerate(letters) if before >= start), len(lines))
    last = max(at for at, before in enumerate(letters) if before <= end)
    body = "".join(lines[first:last])
    return body if first and len(body) > len(text) / 2 else None


def _may_end(letters: str, at: int) -> bool:
    """Whether a sentence, or the text, ends or begins there."""
    return at in (0, len(letters)) or letters[at - 1] in _SENTENCE_ENDS
