"""The demo's questions, each about one topic of the corpus, and the prompt they are asked in."""

from __future__ import annotations

QUESTIONS: tuple[tuple[str, str], ...] = (
    ("comparisons", "What do the operators `is` and `is not` test?"),
    ("comparisons", "What do the operators `in` and `not in` test?"),
    ("assignment", "What is an augmented assignment?"),
    ("execmodel", "When is UnboundLocalError raised?"),
    ("strings", "What does the prefix r do to a string literal?"),
    ("import", "What are the two steps of the import statement?"),
    ("raise", "What does a raise statement without an expression do?"),
    ("global", "What does the global statement mean?"),
    ("typesmapping", "What does dict.setdefault do?"),
    ("compound", "When is the else clause of a for loop executed?"),
    ("compound", "What does the finally clause of a try statement do?"),
    ("customization", "What is the difference between __new__ and __init__?"),
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
