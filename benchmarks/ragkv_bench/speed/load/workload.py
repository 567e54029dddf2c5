"""What clients ask: conversations over documents, reproducible, kept as JSON Lines."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ragkv.errors import ConfigError
from ragkv_bench.speed.load.documents import SourceDocument

MAX_TURNS = 6
_FOLLOW_UPS = (
    "Say that again in one sentence.",
    "Which of the passages says so?",
    "What is the opposite case?",
    "Name one thing that the passages leave open.",
    "What follows from it in practice?",
)


@dataclass(frozen=True, slots=True)
class Dialogue:
    """One conversation: the chunks in the prompt's order, and a question a turn."""

    documents: tuple[str, ...]
    chunks: tuple[str, ...]
    questions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """Everything that is asked, in order, and the documents that it is asked about."""

    documents: tuple[SourceDocument, ...]
    dialogues: tuple[Dialogue, ...]

    @property
    def requests(self) -> int:
        """All turns of all conversations."""
        return sum(len(dialogue.questions) for dialogue in self.dialogues)

    def split(self, requests: int) -> tuple[Workload, Workload]:
        """Return the first conversations with so many requests or a few more, and the rest.

        Raises
        ------
        ConfigError
            Nothing would be left.
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
        """Write one JSON object a line: the documents, then the conversations.

        Raises
        ------
        ConfigError
            The file cannot be written.
        """
        lines = [
            json.dumps({kind: asdict(one)}, ensure_ascii=False)
            for kind, found in (("document", self.documents), ("dialogue", self.dialogues))
            for one in found
        ]
        try:
            Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error

    @classmethod
    def load(cls, path: str | Path) -> Workload:
        """Read what :meth:`save` wrote.

        Raises
        ------
        ConfigError
            The file cannot be read or is not such a trace.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--trace {path} cannot be read: {error}") from error
        documents: list[SourceDocument] = []
        dialogues: list[Dialogue] = []
        for number, line in enumerate(text.split("\n"), start=1):
            if not line.strip():
                continue
            try:
                ((kind, row),) = json.loads(line).items()
                if kind == "document":
                    documents.append(SourceDocument(**_tuples(row)))
                else:
                    dialogues.append({"dialogue": Dialogue}[kind](**_tuples(row)))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ConfigError(
                    f"{path}:{number} is not by `ragkv bench serve --save-trace`: {error!r}"
                ) from error
        if not dialogues:
            raise ConfigError(f"{path} has no conversation: write one by --save-trace")
        return cls(tuple(documents), tuple(dialogues))


@dataclass(frozen=True, slots=True)
class WorkloadPlan:
    """How a workload is drawn.

    Attributes
    ----------
    requests
        At least so many turns; the last conversation is not cut.
    documents
        How many there are. The first ones are the popular ones: the i-th is drawn with a weight
        of ``1 / i ** alpha`` (Zipf; 0 draws all alike).
    chunks_per_prompt
        A prompt has the chunks of as many documents as that takes, shuffled.
    turns
        Share of the conversations that have 2 to 6 turns; the others have one.
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

    Raises
    ------
    ConfigError
        There are fewer documents than the plan wants, or all together have fewer chunks than a
        prompt.
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
    weights = [(rank + 1) ** -plan.alpha for rank in range(len(popular))]
    dialogues: list[Dialogue] = []
    requests = 0
    while requests < plan.requests:
        dialogues.append(_dialogue(plan, popular, weights, rng))
        requests += len(dialogues[-1].questions)
    return Workload(tuple(popular), tuple(dialogues))


def _dialogue(
    plan: WorkloadPlan,
    documents: Sequence[SourceDocument],
    weights: Sequence[float],
    rng: random.Random,
) -> Dialogue:
    left = dict(enumerate(weights))
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


def messages_of(dialogue: Dialogue, answers: Sequence[str]) -> list[dict[str, str]]:
    """Return the prompt of the turn after ``answers``: chunks and first question, then turns.

    The head of the prompt, with the system text, is the chat template's own, as in ``ragkv ask``.
    """
    first, *later = dialogue.questions
    text = "\n\n".join([*dialogue.chunks, f"Answer from the text above. Question: {first}"])
    found = [{"role": "user", "content": text}]
    for answer, question in zip(answers, later, strict=False):
        found += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
    return found


def _tuples(row: dict[str, Any]) -> dict[str, Any]:
    """Return a saved row; JSON has no tuples, and a text is no list of texts."""
    for name, value in row.items():
        good = isinstance(value, str) if name == "name" else isinstance(value, list)
        if not good or not all(isinstance(each, str) for each in value):
            raise TypeError(f"{name} has the wrong type")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
