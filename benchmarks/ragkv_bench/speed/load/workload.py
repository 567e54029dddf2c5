"""What clients ask: conversations over documents, reproducible, kept as JSON Lines."""

from __future__ import annotations

import itertools
import json
import pydoc_data.topics
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ragkv.errors import ConfigError
from ragkv_bench.data.examples import Example
from ragkv_bench.data.tasks import chunk_texts

MAX_TURNS = 6
CHARACTERS_PER_TOKEN = 4
"""Of English prose; endpoints say how many tokens a prompt really had."""
_PAUSES = ("\n\n", "\n", ". ", " ")
_TOPIC_QUESTIONS = (
    "Which rule is explained first, and why is it there?",
    "What happens when it fails, and which exception is raised?",
    "Give a short example of it.",
    "Which other part of the language does it depend on?",
)
_FOLLOW_UPS = (
    "Say that again in one sentence.",
    "Which of the passages says so?",
    "What is the opposite case?",
    "Name one thing that the passages leave open.",
    "What follows from it in practice?",
)


@dataclass(frozen=True, slots=True)
class SourceDocument:
    """A document: its name, its chunks in their order, and the questions about it."""

    name: str
    chunks: tuple[str, ...]
    questions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Dialogue:
    """One conversation: the chunks in the prompt's order, and a question a turn."""

    documents: tuple[str, ...]
    chunks: tuple[str, ...]
    questions: tuple[str, ...]

    def messages(self, answers: Sequence[str]) -> list[dict[str, str]]:
        """Return the prompt of the turn after ``answers``: chunks and first question, then turns.

        The head of the prompt, with the system text, is the chat template's own, as in
        ``ragkv ask``.
        """
        first, *later = self.questions
        text = "\n\n".join([*self.chunks, f"Answer from the text above. Question: {first}"])
        found = [{"role": "user", "content": text}]
        for answer, question in zip(answers, later, strict=False):
            found += [
                {"role": "assistant", "content": answer},
                {"role": "user", "content": question},
            ]
        return found


@dataclass(frozen=True, slots=True)
class Workload:
    """All questions in order, and their documents."""

    documents: tuple[SourceDocument, ...]
    dialogues: tuple[Dialogue, ...]

    @property
    def requests(self) -> int:
        """All turns of all conversations."""
        return sum(len(dialogue.questions) for dialogue in self.dialogues)

    def split(self, requests: int) -> tuple[Workload, Workload]:
        """Return the first conversations with so many requests or a few more, and the rest.

        Raises ConfigError where nothing would be left.
        """
        turns = itertools.accumulate((len(one.questions) for one in self.dialogues), initial=0)
        cut = next((index for index, before in enumerate(turns) if before >= requests), None)
        if cut is None or cut == len(self.dialogues):
            raise ConfigError(
                f"a warm-up of {requests} leaves none of the trace's {self.requests} requests"
            )
        first, rest = self.dialogues[:cut], self.dialogues[cut:]
        return Workload(self.documents, first), Workload(self.documents, rest)

    def save(self, path: str | Path) -> None:
        """Write one JSON object a line: the documents, then the conversations."""
        rows = [{"document": asdict(one)} for one in self.documents]
        rows += [{"dialogue": asdict(one)} for one in self.dialogues]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        try:
            Path(path).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error

    @classmethod
    def load(cls, path: str | Path) -> Workload:
        """Read what :meth:`save` wrote; ConfigError for anything else."""
        try:
            text = Path(path).read_text(encoding="utf-8-sig")
            rows = [json.loads(line) for line in text.split("\n") if line.strip()]
            documents = (row["document"] for row in rows if "document" in row)
            dialogues = (row["dialogue"] for row in rows if "document" not in row)
            found = cls(
                tuple(SourceDocument(**_tuples(row)) for row in documents),
                tuple(Dialogue(**_tuples(row)) for row in dialogues),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"--trace {path} is not by `ragkv bench serve --save-trace`: {error!r}"
            ) from error
        if not found.dialogues:
            raise ConfigError(f"{path} has no conversation: write one by --save-trace")
        return found


def _tuples(row: dict[str, Any]) -> dict[str, Any]:
    """Return a saved row; JSON has no tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}


@dataclass(frozen=True, slots=True)
class WorkloadPlan:
    """How a workload is drawn.

    It has at least so many ``requests``: the last conversation is not cut. The i-th document is
    drawn with a weight of ``1 / i ** alpha`` (Zipf; 0 draws all alike). A prompt has the chunks of
    as many documents as it takes, shuffled. ``turns`` is the share of the conversations that have
    2 to 6 turns; the others have one.
    """

    requests: int = 100
    documents: int = 50
    chunks_per_prompt: int = 6
    turns: float = 0.3
    alpha: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("requests", "documents", "chunks_per_prompt"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0 <= self.turns <= 1:
            raise ConfigError(f"turns is a share from 0 to 1, not {self.turns}")
        if self.alpha < 0:
            raise ConfigError(f"alpha must be at least 0, not {self.alpha}")


def draw_workload(plan: WorkloadPlan, documents: Sequence[SourceDocument]) -> Workload:
    """Draw conversations over ``documents``, of which ``plan.documents`` are drawn first.

    Raises ConfigError where there are fewer documents than the plan needs, or all together have
    fewer chunks than a prompt.
    """
    rng = random.Random(plan.seed)  # noqa: S311  seeded, not secret
    if len(documents) < plan.documents:
        raise ConfigError(
            f"there are {len(documents)} documents, not {plan.documents}: give a smaller "
            "--documents, or more --data"
        )
    popular = rng.sample(list(documents), plan.documents)
    if len({chunk for document in popular for chunk in document.chunks}) < plan.chunks_per_prompt:
        raise ConfigError("all documents have fewer chunks than --chunks-per-prompt: give more")
    dialogues: list[Dialogue] = []
    requests = 0
    while requests < plan.requests:
        dialogues.append(_dialogue(plan, popular, rng))
        requests += len(dialogues[-1].questions)
    return Workload(tuple(popular), tuple(dialogues))


def _dialogue(
    plan: WorkloadPlan, documents: Sequence[SourceDocument], rng: random.Random
) -> Dialogue:
    left = {index: (index + 1) ** -plan.alpha for index in range(len(documents))}
    drawn: list[SourceDocument] = []
    chunks: dict[str, None] = {}
    while len(chunks) < plan.chunks_per_prompt:
        (index,) = rng.choices(list(left), list(left.values()))
        del left[index]
        drawn.append(documents[index])
        chunks |= dict.fromkeys(documents[index].chunks)
    order = list(chunks)[: plan.chunks_per_prompt]
    rng.shuffle(order)
    turns = rng.randint(2, MAX_TURNS) if rng.random() < plan.turns else 1
    first = rng.choice(drawn[0].questions)
    others = [each for document in drawn for each in document.questions if each != first]
    rng.shuffle(others)
    questions = list(dict.fromkeys([first, *others, *_FOLLOW_UPS]))[:turns]
    return Dialogue(tuple(one.name for one in drawn), tuple(order), tuple(questions))


def documents_of(examples: Sequence[Example], chunk_tokens: int) -> list[SourceDocument]:
    """Return a document for every example: its chunks, those with the answer first.

    Chunks that are longer than ``chunk_tokens`` are cut.
    """
    found = []
    for example in examples:
        pairs = zip(chunk_texts(example), example.chunks, strict=True)
        texts = [text for text, _ in sorted(pairs, key=lambda pair: not pair[1].is_gold)]
        pieces = dict.fromkeys(piece for text in texts for piece in cut(text, chunk_tokens))
        found.append(SourceDocument(example.id, tuple(pieces), (example.question.strip(),)))
    return found


def language_reference(chunk_tokens: int, chunks: int) -> list[SourceDocument]:
    """Return Python's language reference as documents of so many chunks each."""
    found = []
    for topic, text in sorted(pydoc_data.topics.topics.items()):
        pieces = list(dict.fromkeys(cut(text, chunk_tokens)))
        questions = tuple(f'About "{topic}": {question}' for question in _TOPIC_QUESTIONS)
        for first in range(0, len(pieces) - chunks + 1, chunks):
            part = tuple(pieces[first : first + chunks])
            found.append(SourceDocument(f"{topic}-{first // chunks + 1}", part, questions))
    return found


def cut(text: str, chunk_tokens: int) -> list[str]:
    """Cut a text where it pauses into stripped pieces of about ``chunk_tokens`` at most."""
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
