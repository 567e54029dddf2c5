"""The documents of a load: real text, cut into chunks without a tokenizer."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Sequence
from dataclasses import dataclass

from ragkv.errors import ConfigError
from ragkv_bench.data.examples import Example
from ragkv_bench.data.tasks import chunk_texts

CHARACTERS_PER_TOKEN = 4
"""Of English prose; endpoints say how many tokens a prompt really had."""
_PAUSES = ("\n\n", "\n", ". ", " ")
_TOPIC_QUESTIONS = (
    "Which rule is explained first, and why is it there?",
    "What happens when it fails, and which exception is raised?",
    "Give a short example of it.",
    "Which other part of the language does it depend on?",
)


@dataclass(frozen=True, slots=True)
class SourceDocument:
    """A document: its name, its chunks in their order, and what is asked about it."""

    name: str
    chunks: tuple[str, ...]
    questions: tuple[str, ...]


def documents_of(examples: Sequence[Example], chunk_tokens: int) -> list[SourceDocument]:
    """Return a document for every example: its chunks, those with the answer first.

    Chunks that are longer than ``chunk_tokens`` are cut.
    """
    found = []
    for example in examples:
        pairs = zip(chunk_texts(example), example.chunks, strict=True)
        texts = [text for text, _ in sorted(pairs, key=lambda pair: not pair[1].is_gold)]
        pieces = [piece for text in texts for piece in cut(text, chunk_tokens)]
        chunks = tuple(dict.fromkeys(pieces))
        found.append(SourceDocument(example.id, chunks, (example.question.strip(),)))
    return found


def language_reference(chunk_tokens: int, chunks: int) -> list[SourceDocument]:
    """Return Python's language reference as documents of so many chunks each."""
    found = []
    for topic, text in sorted(pydoc_data.topics.topics.items()):
        pieces = list(dict.fromkeys(cut(text, chunk_tokens)))
        for first in range(0, len(pieces) - chunks + 1, chunks):
            questions = tuple(f'About "{topic}": {question}' for question in _TOPIC_QUESTIONS)
            part = tuple(pieces[first : first + chunks])
            found.append(SourceDocument(f"{topic}-{first // chunks + 1}", part, questions))
    return found


def cut(text: str, chunk_tokens: int) -> list[str]:
    """Cut a text where it pauses into stripped pieces of about ``chunk_tokens`` at most.

    Raises
    ------
    ConfigError
        ``chunk_tokens`` is below 1.
    """
    if chunk_tokens < 1:
        raise ConfigError(f"a chunk has at least 1 token, not {chunk_tokens}")
    longest = chunk_tokens * CHARACTERS_PER_TOKEN
    pieces = []
    while len(text) > longest:
        ends = (text.rfind(pause, longest // 2, longest) + len(pause) for pause in _PAUSES)
        end = next((end for end in ends if end > longest // 2), longest)
        pieces.append(text[:end])
        text = text[end:]
    return [piece.strip() for piece in [*pieces, text] if piece.strip()]
