"""Which earlier answers of a chat a prompt computes anew, and why."""

from __future__ import annotations

from ragkv.engine.plan import Plan
from ragkv.engine.request import Request
from ragkv.prompt.chat import Chat
from ragkv.prompt.find import is_registrable

_HEAD_CHANGED = (
    "the prompt begins with no former prompt (other documents before the conversation, or in "
    "another order?); keep its beginning and put new documents after the conversation"
)
_CHANGED_AT = (
    "former prompts and answers agree with this one only up to {text!r}; send earlier messages as "
    "they were (has an agent rewritten an answer?)"
)
_SHOWN_CHARS = 60


def history_warnings(request: Request, plan: Plan) -> tuple[str, ...]:
    """Return a warning where earlier answers in a chat are neither continued nor reused.

    Answers that are too short to be chunks are left aside.
    """
    located, prompt = plan.located, request.prompt
    if not isinstance(prompt, Chat) or not request.uses_history:
        return ()
    contents = [each["content"] for each in prompt if each["role"] == "assistant"]
    answers = [text.strip() for text in contents if isinstance(text, str)]
    answers = [text for text in answers if is_registrable(text) and text in located.text]
    former = located.former
    known = 0 if former is None or not len(former.positions) else int(former.positions[-1]) + 1
    end = located.tokens.characters(known)
    reused = {entry.text for entry, _, _ in located.entries}
    anew = [
        text
        for text in answers
        if located.text.find(text) + len(text) > end and not any(text in each for each in reused)
    ]
    if not anew:
        return ()
    verb = "was" if len(anew) == 1 else "were"
    shown = located.text[end : end + _SHOWN_CHARS]
    why = _CHANGED_AT.format(text=shown) if known else _HEAD_CHANGED
    return (f"{len(anew)} of {len(answers)} earlier answers {verb} computed anew: {why}",)
