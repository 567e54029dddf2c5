"""Why named chunks are not in a prompt verbatim: what was done to them on the way."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

_DISTINCTIVE = 40
"""Least length of a line, or of a sentence, that identifies a chunk."""

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


def rewriting_of(texts: Sequence[str], prompt: str) -> str | None:
    """Return what was done to chunks, and what to do about it; None where they are not there.

    Parameters
    ----------
    texts
        The chunks that were named; none of them is in the prompt as it is.
    """
    if any(text in prompt for text in texts):
        return None
    for text in texts:
        for applies, message in _CAUSES:
            if text and applies(text, prompt):
                return message
    return None


def _is_escaped(text: str, prompt: str) -> bool:
    written = json.dumps(text)[1:-1], repr(text)[1:-1]
    return any(each != text and each in prompt for each in written)


def _is_respaced(text: str, prompt: str) -> bool:
    return len(text) >= _DISTINCTIVE and " ".join(text.split()) in " ".join(prompt.split())


def _has_other_head(text: str, prompt: str) -> bool:
    """Whether most of it is there, all but its first lines."""
    rest = text
    while len(rest) >= max(_DISTINCTIVE, len(text) // 2):
        if rest in prompt:
            return True
        rest = rest.partition("\n")[2].strip()
    return False


def _is_shortened(text: str, prompt: str) -> bool:
    sentences = [part for line in text.splitlines() for part in _SENTENCE_END.split(line.strip())]
    return any(len(part) >= _DISTINCTIVE and part in prompt for part in sentences)


_CAUSES: tuple[tuple[Callable[[str, str], bool], str], ...] = (
    (
        _is_escaped,
        (
            "chunks stand in it as a list or as JSON (LlamaIndex's simple_summarize, a tool that "
            "returns a list): join their texts with blank lines"
        ),
    ),
    (
        _is_respaced,
        (
            "their line breaks or blanks were changed: precompute the text that the prompt has, or "
            "leave the blanks alone"
        ),
    ),
    (
        _has_other_head,
        (
            "other lines stand before their text (metadata that changes, such as "
            "TimeWeightedPostprocessor's): exclude those keys (excluded_llm_metadata_keys, or the "
            "document_prompt), and precompute again"
        ),
    ),
    (
        _is_shortened,
        (
            "only parts of them are in it (SentenceEmbeddingOptimizer, a compressor): split "
            "the documents into smaller chunks instead of shortening them after retrieval"
        ),
    ),
)
