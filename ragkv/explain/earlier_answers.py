"""The warning for earlier answers of a chat that are recomputed."""

from __future__ import annotations

from collections.abc import Collection

from ragkv.prompt.chat import Chat
from ragkv.prompt.find import is_registrable

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
