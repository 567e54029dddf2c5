"""The demo's questions, each about one topic of the corpus, and the prompt they are asked in."""

from __future__ import annotations

QUESTIONS: tuple[tuple[str, str], ...] = (
    ("comparisons", "Can comparisons be chained, and how often is each operand evaluated?"),
    ("comparisons", "How does the operator `in` work for classes that define __contains__?"),
    ("assignment", "What is assigned to a starred target in an assignment?"),
    ("execmodel", "When is UnboundLocalError raised?"),
    ("strings", "What does the prefix r do to a string literal?"),
    ("import", "Which names does `from module import *` bind if __all__ is defined?"),
    ("calls", "What happens if a call passes the same keyword argument twice?"),
    ("typesmapping", "What does dict.setdefault return?"),
    ("string-methods", "What is the difference between str.removeprefix and str.lstrip?"),
    ("formatstrings", "What does the option '=' force in a format specification?"),
    ("types", "Which special attributes does a user-defined function have?"),
    ("compound", "When is the else clause of a for loop executed?"),
    ("compound", "In which order are __enter__ and __exit__ called in a with statement?"),
    ("specialnames", "What is the difference between __new__ and __init__?"),
)

WARM_UP = "Is Python case sensitive?"
# Small models quote better than they summarise.
SYSTEM = "You answer questions about Python by quoting its documentation."
USER = (
    "Documentation:\n{context}\n\nQuestion: {question}\n"
    "Quote the sentence from the documentation that answers the question."
)


def chosen_questions(topics: tuple[str, ...], limit: int | None) -> list[str]:
    """Return the questions about the given topics, the first ``limit`` of them."""
    return [question for topic, question in QUESTIONS if topic in topics][:limit]
