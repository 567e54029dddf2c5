"""How a chunk's text stands in a prompt that does not have it verbatim."""

from __future__ import annotations

import html
import json
import re
import unicodedata
from collections.abc import Callable, Iterator
from functools import cache, cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from ragkv.prompt.rolling import Hashes, code_points, head_hashes, window_hashes

WINDOW = 32
"""Characters, blanks aside, that tell that a part of a chunk is in a prompt."""

_LEAST_SHARE = 0.2
"""Least share of a chunk that tells so: less may be a head that many chunks have."""

_ESCAPED = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
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
    """

    def __init__(self, prompt: str) -> None:
        self.prompt = prompt
        self._form = cache(lambda form: form(prompt))

    @cached_property
    def windows(self) -> Hashes:
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

    def may_have(self, text: str) -> bool:
        """Whether a chunk's first, middle or last letters are there."""
        letters = bare(text)
        if len(letters) < WINDOW:
            return bool(letters) and letters in self._form(bare)
        return bool(_are_in(head_hashes(places_of(letters), WINDOW), self.windows).any())

    def _reason_of_part(self, text: str, letters: str) -> str | None:
        hashes = window_hashes(code_points(letters), WINDOW)
        there = _are_in(hashes, self.windows)
        runs = list(_runs(there))
        if sum(end - start for start, end in runs) < max(WINDOW, _LEAST_SHARE * len(letters)):
            return None
        as_written = window_hashes(code_points(_plain(text)), WINDOW)
        if _are_in(as_written, self._windows_as_written).sum() < there.sum():
            return self._kind_of_string(text)
        start, end = runs[-1]
        if (start, end) == (0, len(letters)):
            return "pieces"  # all of its windows are there, and it is not
        body = _behind_lines(text, start, end)
        if body is not None:
            return "metadata" if bare(body) in self._form(bare) else "pieces"
        if len(runs) > 1 or (_may_end(letters, start) and _may_end(letters, end)):
            return "shortened"
        return "cut"

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


def places_of(letters: str) -> list[str]:
    """Return the first, the middle and the last window of letters, at least :data:`WINDOW`."""
    last = len(letters) - WINDOW
    return [letters[at : at + WINDOW] for at in (0, last // 2, last)]


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
