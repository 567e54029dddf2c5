"""The demo's texts: the Python language reference that every interpreter carries, and questions."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# About 45,000 tokens: two minutes of precomputing on two slow cores. The topics do not contain
# one another; the shorter ones come first, for `--topics`.
_TOPICS = """
comparisons assignment execmodel strings import calls raise slicings global lambda power binary
operator-summary identifiers objects integers typesmapping customization formatstrings compound
"""
TOPICS = _TOPICS.split()

QUESTIONS = (
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


def corpus_chunks(
    topics: Sequence[str], tokenizer: PreTrainedTokenizerBase, chunk_tokens: int
) -> list[str]:
    """Split the topics that this Python has by LangChain's recursive splitter, counting tokens."""
    from langchain_text_splitters import RecursiveCharacterTextSplitter

    splitter = RecursiveCharacterTextSplitter(
        chunk_size=chunk_tokens,
        chunk_overlap=0,
        length_function=lambda text: len(tokenizer.encode(text, add_special_tokens=False)),
    )
    texts = (pydoc_data.topics.topics.get(topic, "") for topic in topics)
    return list(dict.fromkeys(chunk for text in texts for chunk in splitter.split_text(text)))
