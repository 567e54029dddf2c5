"""Evaluation data: JSON Lines, one example a line, errors named by file and line."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from ragkv.errors import ConfigError
from ragkv_bench.data.tasks import TASKS

Value = TypeVar("Value", str, list[Any])


class DataError(ConfigError):
    """A line of an evaluation file cannot be used; the message names file and line."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One retrieved passage; ``title`` may be empty."""

    text: str
    title: str = ""
    is_gold: bool = False


@dataclass(frozen=True, slots=True)
class Example:
    """One question over chunks in prompt order.

    ``answers`` are alternatives in the question-answering tasks, one reference in
    ``summarization``, and all required in the needle tasks.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    chunks: tuple[Chunk, ...]
    task: str


@dataclass(frozen=True, slots=True)
class DataSet:
    """The examples of a file."""

    name: str
    examples: tuple[Example, ...]

    def pick(self, limit: int | None, seed: int = 0, *, skip: int = 0) -> DataSet:
        """Return ``limit`` examples drawn with ``seed``, in the file's order.

        A larger limit with the same seed holds the smaller one's examples. ``None``
        keeps all.

        Parameters
        ----------
        skip
            Leave out the examples that a limit of this draws with the same seed.

        Raises ConfigError: ``limit`` is below 1, ``skip`` below 0, or nothing is left.
        """
        if limit is not None and limit < 1:
            raise ConfigError(f"limit must be at least 1, not {limit!r}")
        if not 0 <= skip < max(1, len(self.examples)):
            raise ConfigError(
                f"skip must be at least 0 and less than the {len(self.examples)} examples of "
                f"{self.name}, not {skip!r}"
            )
        if not skip and (limit is None or limit >= len(self.examples)):
            return self
        order = list(range(len(self.examples)))
        random.Random(seed).shuffle(order)  # noqa: S311  seeded, not secret
        end = None if limit is None else skip + limit
        kept = tuple(self.examples[i] for i in sorted(order[skip:end]))
        return DataSet(self.name, kept)


def read_data(path: str | Path) -> DataSet:
    """Read a JSONL file of examples; blank lines are passed over.

    Raises DataError: the file cannot be read, a line is bad, or there is none.
    """
    file = Path(path)
    try:
        lines = file.read_bytes().removeprefix(b"\xef\xbb\xbf").splitlines()
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror or error}") from error
    seen: dict[str, int] = {}
    examples: list[Example] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            examples.append(_parse(line, seen))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{file}:{number}: {error}") from error
        seen[examples[-1].id] = number
    if not examples:
        raise DataError(f"{file}: has no example")
    return DataSet(file.stem, tuple(examples))


def write_data(path: str | Path, examples: Iterable[Example]) -> None:
    """Write examples as JSONL in the form that :func:`read_data` reads."""
    with Path(path).open("w", encoding="utf-8") as out:
        out.writelines(
            json.dumps(asdict(example), ensure_ascii=False) + "\n" for example in examples
        )


def _parse(line: bytes, seen: dict[str, int]) -> Example:
    try:
        row = json.loads(line.decode("utf-8"))
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start} of the line)") from error
    except UnicodeEncodeError as error:
        raise ValueError("has a lone surrogate, which tokenizers do not read") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} (column {error.colno})") from error
    if not isinstance(row, dict):
        raise ValueError(f"must be a JSON object, not {type(row).__name__}")
    example_id, task = _field(row, "id", str), _field(row, "task", str)
    if example_id in seen:
        raise ValueError(f"id {example_id!r} is line {seen[example_id]}'s already")
    if task not in TASKS:
        raise ValueError(f"task {task!r} is unknown; known: {', '.join(TASKS)}")
    answers = _field(row, "answers", list)
    if not all(isinstance(answer, str) and answer.strip() for answer in answers):
        raise ValueError("answers must be non-empty strings")
    chunks = [_chunk(chunk, f"chunks[{i}]") for i, chunk in enumerate(_field(row, "chunks", list))]
    return Example(example_id, _field(row, "question", str), tuple(answers), tuple(chunks), task)


def _chunk(value: Any, where: str) -> Chunk:
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object, not {type(value).__name__}")
    title, is_gold = value.get("title") or "", value.get("is_gold", False)
    if not isinstance(title, str):
        raise ValueError(f"{where}.title must be a string, not {type(title).__name__}")
    if not isinstance(is_gold, bool):
        raise ValueError(f"{where}.is_gold must be true or false, not {is_gold!r}")
    return Chunk(_field(value, "text", str, f"{where}."), title.strip(), is_gold)


def _field(row: dict[str, Any], name: str, kind: type[Value], where: str = "") -> Value:
    """Return a text or a list that is not empty."""
    if name not in row:
        raise ValueError(f"field {where}{name} is missing")
    value = row[name]
    if not isinstance(value, kind):
        expected = "string" if kind is str else "list"
        raise ValueError(f"{where}{name} must be a {expected}, not {type(value).__name__}")
    if not (value.strip() if isinstance(value, str) else value):
        raise ValueError(f"{where}{name} is empty")
    return value
