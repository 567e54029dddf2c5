"""A prompt's warnings: its misses, which are also logged, and recomputed earlier answers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Sequence

from ragkv.explain.misses import head_of
from ragkv.prompt.chat import Chat
from ragkv.prompt.find import is_registrable
from ragkv.report.account import Miss
from ragkv.report.reasons import level_of
from ragkv.report.summary import sentences

_log = logging.getLogger(__name__)


class MissLog:
    """Logs misses: as a warning when a reason first occurs, then as information."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logged: set[str] = set()

    def add(self, named: Sequence[str], misses: Sequence[Miss]) -> tuple[str, ...]:
        """Log a prompt's misses in one line; return the warnings.

        Parameters
        ----------
        named
            The chunks named for the prompt.
        """
        if not misses:
            return ()
        heads = {head_of(text) for text in named}
        all_named = len(named) > 1 and {miss.chunk for miss in misses} <= heads
        of = f"Of the {len(named):,} retrieved chunks, " if all_named else ""
        verb = "was" if len(misses) == 1 else "were"
        all_of = f"{of}{len(misses)} {verb} not reused or only in part. " if of else ""
        with self._lock:
            new = {miss.reason for miss in misses} - self._logged
            self._logged |= new
        loud = any(level_of(reason) != "info" for reason in new)
        level = logging.WARNING if loud else logging.INFO
        _log.log(level, "%s%s", all_of, " ".join(sentences(misses)))
        return tuple(sentences((miss for miss in misses if level_of(miss.reason) == "warning"), of))


_HEAD_CHANGED = (
    "the prompt does not begin like an earlier one (different documents before the conversation, "
    "or in a different order?); keep its beginning and put new documents after the conversation"
)
_CHANGED_AT = (
    "earlier prompts and answers equal this one only up to {text!r}; send earlier messages "
    "unchanged (has an agent rewritten an answer?)"
)
_SHOWN_CHARS = 60


def answer_warnings(
    chat: Chat, text: str, known_chars: int, reused: Collection[str]
) -> tuple[str, ...]:
    """Return a warning if earlier answers are neither in the history nor reused as chunks.

    Answers too short for a chunk are ignored.

    Parameters
    ----------
    text
        The rendered chat.
    known_chars
        Number of its first characters with rows in the history.
    reused
        The texts of the reused chunks.
    """
    contents = [each["content"] for each in chat if each["role"] == "assistant"]
    answers = [content.strip() for content in contents if isinstance(content, str)]
    answers = [answer for answer in answers if is_registrable(answer) and answer in text]
    anew = [
        answer
        for answer in answers
        if text.find(answer) + len(answer) > known_chars
        and not any(answer in chunk for chunk in reused)
    ]
    if not anew:
        return ()
    verb = "was" if len(anew) == 1 else "were"
    shown = text[known_chars : known_chars + _SHOWN_CHARS]
    why = _CHANGED_AT.format(text=shown) if known_chars else _HEAD_CHANGED
    return (f"{len(anew)} of {len(answers)} earlier answers {verb} recomputed: {why}",)
