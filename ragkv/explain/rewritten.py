"""Recognition of chunks whose text a prompt contains in a changed form."""

from __future__ import annotations

import html
import json
import re
import unicodedata
from collections.abc import Callable
from functools import cache, cached_property

import numpy as np
import numpy.typing as npt

from ragkv.prompt.rolling import Hashes, code_points, window_hashes

PARTIAL = frozenset({"cut", "shortened"})
"""Reasons of a chunk that the prompt contains in part. Another chunk can contain the same part."""

_WINDOW = 32
"""Letters of a window: the unit in which parts of a chunk are recognised."""

_LEAST_SHARE, _LEAST_LETTERS = 0.2, 200
"""Least share of a chunk, or number of letters, that counts as a part: many chunks share a head."""

_SHORTEST = 8
"""Letters of a piece between two recognised parts."""

_ESCAPED = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f"}
_HEAD_LINES = re.compile(
    r"(?:[^\n:]{1,40}: [^\n]*\n|[^\n:()]{1,60}:\n|<[^\n]{1,80}>\n)+\n*(?=.{16})", re.DOTALL
)
"""Metadata before a text, as frameworks format it: ``key: value``, a label, a tag."""

_LAST_LINE = re.compile(r"\n[^\n]{1,80}\Z")
_JSON_VALUE = re.compile(r":\s*\\*\"$")
_STRAIGHT = str.maketrans(
    "\u2018\u2019\u201a\u201c\u201d\u201e\u2010\u2011\u2012\u2013\u2014\u2212", "'''\"\"\"------"
)
_SENTENCE_ENDS = ".!?"


def _unescaped(text: str) -> str:
    """Undo a string's Python, JSON and HTML escapes, also nested ones."""
    before = ""
    while "\\" in text and text != before:
        before, text = text, _ESCAPED.sub(_character, text)
    if _SURROGATE.search(text):
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return html.unescape(text)


def _character(match: re.Match[str]) -> str:
    code = match[1]
    return chr(int(code[1:], 16)) if len(code) > 1 else _CONTROLS.get(code, code)


def _unindented(text: str) -> str:
    return "\n".join(line.lstrip() for line in text.split("\n"))


def _joined(text: str) -> str:
    return "".join(text.split())


def _folded(text: str) -> str:
    return _joined(text).casefold()


def _plain(text: str) -> str:
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text).translate(_STRAIGHT)
    return _folded(text)


def _letters(text: str) -> str:
    """Return a text's letters: no blanks, no escapes, one case and one Unicode form."""
    return _plain(_unescaped(text))


_FORMS: dict[str, Callable[[str], str]] = {
    "indentation": _unindented,
    "whitespace": _joined,
    "case": _folded,
    "characters": _plain,
    "html": lambda text: _plain(html.unescape(text)),
}
"""Normal forms by the change that they undo, the smallest change first."""


class Rewritten:
    """Searches a prompt for chunks that it does not contain verbatim.

    Parameters
    ----------
    prompt
        The part of the prompt to search.
    whole
        The whole prompt; empty if ``prompt`` is that.
    """

    def __init__(self, prompt: str, whole: str = "") -> None:
        self._prompt = prompt
        self._whole = whole or prompt
        self._form = cache(lambda form: form(prompt))

    def reason_of(self, text: str) -> str | None:
        """Return how a chunk was changed, as a reason; None if the prompt has none of it."""
        letters = _letters(text)
        if self._contains(letters):
            for reason, form in _FORMS.items():
                if form(text) in self._form(form):
                    return reason
            return self._kind_of_string(text)
        match = _HEAD_LINES.match(text)
        head, body = (match[0], text[match.end() :]) if match else ("", text)
        known = self._reason_of_body(_letters(head), body) if head else None
        return known or self._reason_of_part(text, letters, len(_letters(head)))

    def _reason_of_body(self, head: str, text: str) -> str | None:
        """Return the reason of a chunk whose body is in the prompt without its own head."""
        for body in (_letters(text), _letters(_LAST_LINE.sub("", text))):
            if self._contains(body) and not self._contains(head + body):
                return "enlarged" if self._has_between(head, body) else "metadata"
        return None

    def _contains(self, letters: str) -> bool:
        return len(letters) >= _WINDOW // 2 and letters in self._form(_letters)

    def _has_between(self, head: str, body: str) -> bool:
        """Whether text other than a label is between the letters of a head and a body."""
        before, _, _ = _letters(self._whole).partition(body)
        _, found, between = before.rpartition(head)
        return bool(found and between) and not between.endswith(":")

    def _reason_of_part(self, text: str, letters: str, head: int) -> str | None:
        """Return how a chunk was changed of which the prompt contains a part.

        Parameters
        ----------
        head
            Number of letters in the lines before its body.
        """
        there = _are_in(_windows(letters), self._windows)
        if not there.any():
            return None
        covered = np.convolve(there, np.ones(_WINDOW)) > 0
        for start, end in _runs(~covered):
            if _SHORTEST <= end - start < _WINDOW:
                covered[start:end] = letters[start:end] in self._form(_letters)
        if covered.sum() < max(_WINDOW, min(_LEAST_SHARE * len(letters), _LEAST_LETTERS)):
            return None
        if _are_in(_windows(_plain(text)), self._windows_as_written).sum() < there.sum():
            return self._kind_of_string(text)
        if covered[head:].all():
            return "pieces"
        runs = _runs(covered)
        ends = [at for run in runs for at in run]
        at_sentences = all(
            at in (0, len(letters)) or letters[at - 1] in _SENTENCE_ENDS for at in ends
        )
        return "shortened" if len(runs) > 1 or at_sentences else "cut"

    @cached_property
    def _windows(self) -> Hashes:
        return np.unique(_windows(self._form(_letters)))

    @cached_property
    def _windows_as_written(self) -> Hashes:
        return np.unique(_windows(self._form(_plain)))

    def _kind_of_string(self, text: str) -> str:
        """Return ``list`` or ``json``: the format of the string that contains the chunk."""
        heads = [json.dumps(text)[1:_WINDOW], json.dumps(text, ensure_ascii=False)[1:_WINDOW]]
        at = max(map(self._prompt.find, heads))
        if at < 0:
            by_python = repr(text)[1:_WINDOW] in self._prompt or '\\"' not in self._prompt
            return "list" if by_python else "json"
        before = self._prompt[max(0, at - _WINDOW) : at]
        python_too = "'" in text and '"' not in text  # then Python's repr has double quotes too
        if before.endswith('"') and (not python_too or _JSON_VALUE.search(before)):
            return "json"
        return "list"


def _windows(letters: str) -> Hashes:
    return window_hashes(code_points(letters), _WINDOW)


def _are_in(hashes: Hashes, windows: Hashes) -> npt.NDArray[np.bool_]:
    """Return which hashes are among the sorted windows, ``[hashes]``."""
    if not len(windows):
        return np.zeros(len(hashes), dtype=np.bool_)
    at = np.minimum(np.searchsorted(windows, hashes), len(windows) - 1)
    return np.equal(windows[at], hashes)


def _runs(flags: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return the start and end of every run of true flags."""
    edges = np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8))
    return [(s, e) for s, e in np.flatnonzero(edges).reshape(-1, 2).tolist()]
