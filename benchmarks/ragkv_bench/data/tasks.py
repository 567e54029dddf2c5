"""The tasks: the prompt of each kind, how it is scored, how long its answer may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ragkv_bench.data.examples import Chunk, Example

Kind = Literal["qa", "summary", "needle", "copy", "abstention", "words", "count"]
Messages = list[dict[str, str]]

# One line break before the chunks: byte-level tokenizers cut a run of line breaks otherwise
# at the end of a text than before a word, and the shared sink would differ in its last token.
_PROBE = "Read these documents: you will be asked about them.\n{context_str}\n\n{question}"
_TEMPLATES: dict[Kind, str] = {
    "qa": (
        "Answer the question using the passages below. Give only the answer, in a few words,"
        " and nothing else.\n\nPassages:\n{context_str}\n\n"
        "Give only the answer to this question, in a few words, and nothing else.\n"
        "Question: {question}"
    ),
    "summary": (
        "Read the transcript below and answer the request about it.\n\nTranscript:\n"
        "{context_str}\n\nAnswer in one short paragraph.\nRequest: {question}"
    ),
    "needle": (
        "Some special magic values are hidden in the following text. Remember them: you will be"
        " asked for them afterwards.\n{context_str}\n\n{question} Answer with these values alone."
    ),
}


@dataclass(frozen=True, slots=True)
class Task:
    """One task of an evaluation file.

    ``kind`` decides prompt and metric: ``qa`` token F1, ``summary`` ROUGE-L, ``needle`` and
    ``words`` recall; ``copy``, ``abstention`` and ``count`` are judged by their probes.
    ``max_new_tokens`` is the longest answer.
    """

    kind: Kind
    max_new_tokens: int


TASKS = {
    "multihop_qa": Task("qa", 32),
    "singlehop_qa": Task("qa", 32),
    "summarization": Task("summary", 160),
    "niah_single": Task("needle", 64),
    "niah_multikey": Task("needle", 64),
    "niah_multivalue": Task("needle", 128),
    "niah_multiquery": Task("needle", 128),
    "copy": Task("copy", 64),
    "abstention": Task("abstention", 32),
    "words": Task("words", 64),
    "count": Task("count", 16),
}


def chunk_text(chunk: Chunk) -> str:
    """Return the text that is precomputed and stands in the prompt, title first."""
    return f"{chunk.title}\n{chunk.text}".strip()


def chunk_texts(example: Example) -> list[str]:
    """Return the texts of the example's chunks, in prompt order."""
    return [chunk_text(chunk) for chunk in example.chunks]


def prompt(example: Example, *, chat: bool = True) -> str | Messages:
    """Return the example's prompt: one user message, or a string for models without a template."""
    text = _TEMPLATES.get(TASKS[example.task].kind, _PROBE).format(
        context_str="\n\n".join(chunk_texts(example)), question=example.question.strip()
    )
    return _user(text) if chat else f"{text}\nAnswer:"


def template(task: str, *, chat: bool = True) -> str | Messages:
    """Return the task's prompt with its fields unfilled, as ``RagKV.sink_from`` takes it."""
    text = _TEMPLATES.get(TASKS[task].kind, _PROBE)
    return _user(text) if chat else text


def _user(text: str) -> Messages:
    return [{"role": "user", "content": text}]
