"""Needles in a haystack of any length, made as RULER makes them.

Source: RULER, arXiv 2404.06654, section 3 and ``niah`` of its data scripts: sentences
of the form "One of the special magic numbers for KEY is: VALUE." are put between the
sentences of an unrelated text, at depths drawn from 40 even steps, and asked for
afterwards. Here the text is then cut into chunks, as retrieval would have it.
"""

from __future__ import annotations

import pydoc_data.topics
import random
import re
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast, get_args

from ragkv.errors import ConfigError
from ragkv_bench.data.examples import Chunk, Example
from ragkv_bench.data.needle_words import ADJECTIVES, NOUNS
from ragkv_bench.data.tasks import TASKS, prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NeedleKind = Literal["single", "multikey", "multivalue", "multiquery"]
ValueType = Literal["numbers", "words", "uuids"]

_NEEDLES = 4
_DEPTHS = tuple(step / 39 for step in range(40))
# The full stop, exclamation and question mark of Chinese and Japanese stand without a space.
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[\u3002\uff01\uff1f])|\n\s*\n")
_LONGEST_SENTENCE = 400


@dataclass(frozen=True, slots=True)
class NeedleSpec:
    """What to hide and how long the text is.

    Attributes
    ----------
    kind
        ``single``: one key, one value. ``multikey``: one of four keys is asked for.
        ``multivalue``: all four values of one key. ``multiquery``: four keys' values.
    tokens
        Length of prompt and longest answer together, in tokens, as RULER counts it;
        the prompt fills it as far as whole sentences do, and never exceeds it.
    chunk_tokens
        About how many tokens a chunk has.
    values
        What is hidden: seven-digit numbers, word pairs or UUIDs.
    """

    kind: NeedleKind
    tokens: int
    chunk_tokens: int = 256
    values: ValueType = "numbers"

    def __post_init__(self) -> None:
        for name, value, known in (
            ("kind", self.kind, get_args(NeedleKind)),
            ("values", self.values, get_args(ValueType)),
        ):
            if value not in known:
                raise ConfigError(f"needle {name} must be one of {', '.join(known)}, not {value!r}")
        if self.tokens < 1 or self.chunk_tokens < 1:
            raise ConfigError("tokens and chunk_tokens must be at least 1")


def build_needles(
    haystack: str,
    tokenizer: PreTrainedTokenizerBase,
    spec: NeedleSpec,
    *,
    count: int = 1,
    seed: int = 0,
) -> list[Example]:
    """Make examples over a text, each from another place of it; a short text is repeated.

    The tokenizer counts, with its chat template where it has one.

    Raises
    ------
    ConfigError
        The text is empty, or ``spec.tokens`` has no room for needles and question.
    """
    hay = [(sentence, _tokens(sentence, tokenizer)) for sentence in sentences(haystack)]
    if not hay:
        raise ConfigError("the haystack has no text")
    return [_example(hay, tokenizer, spec, seed, number) for number in range(count)]


def default_haystack() -> str:
    """Return the Python language reference, which every interpreter carries."""
    return "\n\n".join(pydoc_data.topics.topics.values())


def read_haystack(path: str | Path) -> str:
    """Read a UTF-8 text file to hide needles in.

    Raises
    ------
    ConfigError
        The file cannot be read or has no text.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"haystack {path} cannot be read as UTF-8 text: {error}") from error
    if not text.strip():
        raise ConfigError(f"haystack {path} is empty")
    return text


def sentences(text: str) -> list[str]:
    """Cut a text into sentences of at most 400 characters, white space collapsed."""
    out: list[str] = []
    for part in _SENTENCE_END.split(text):
        words = " ".join((part or "").split())
        while len(words) > _LONGEST_SENTENCE:
            cut = words.rfind(" ", 0, _LONGEST_SENTENCE)
            cut = cut if cut > 0 else _LONGEST_SENTENCE
            out.append(words[:cut])
            words = words[cut:].lstrip()
        if words:
            out.append(words)
    return out


def _example(
    hay: list[tuple[str, int]],
    tokenizer: PreTrainedTokenizerBase,
    spec: NeedleSpec,
    seed: int,
    number: int,
) -> Example:
    draw = random.Random(f"{seed}/{spec.kind}/{spec.values}/{number}")  # noqa: S311
    example_id = f"needles_{spec.kind}_{spec.values}_{spec.tokens}_{seed}_{number:04d}"
    task = f"niah_{spec.kind}"
    needles, question, answers = _hide(spec, draw)
    start = draw.randrange(len(hay))
    depths = sorted(draw.sample(_DEPTHS, len(needles)))
    budget = spec.tokens - TASKS[task].length(example_id)

    def build(size: int) -> Example:
        body = [hay[(start + i) % len(hay)] for i in range(size)]
        for needle, depth in reversed(list(zip(needles, depths, strict=True))):
            body.insert(int(size * depth), (needle, _tokens(needle, tokenizer)))
        gold = frozenset(needle for needle, value in needles.items() if value in answers)
        chunks = _chunks(body, gold, spec.chunk_tokens)
        return Example(example_id, question, answers, chunks, task)

    mean_length = sum(length for _, length in hay) / len(hay)
    size = _largest(lambda size: _prompt_tokens(build(size), tokenizer), budget, mean_length)
    if size is None:
        least = _prompt_tokens(build(0), tokenizer) + spec.tokens - budget
        raise ConfigError(f"{spec.kind} needles need at least {least} tokens, not {spec.tokens}")
    return build(size)


def _largest(count: Callable[[int], int], budget: int, mean_length: float) -> int | None:
    """Return the largest number of sentences that fits, or None where not even 0 does.

    ``count`` gives a prompt's tokens; each guess follows from what the last one missed.
    """
    low, high = -1, sys.maxsize
    guess = 0
    while high - low > 1:
        missed = budget - count(guess)
        low, high = (guess, high) if missed >= 0 else (low, guess)
        guess = min(max(guess + round(missed / mean_length), low + 1), high - 1)
    return low if low >= 0 else None


def _hide(spec: NeedleSpec, draw: random.Random) -> tuple[dict[str, str], str, tuple[str, ...]]:
    """Return the needles in their order with their values, the question and its answers."""
    keys_count = 1 if spec.kind in ("single", "multivalue") else _NEEDLES
    values_count = _NEEDLES if spec.kind == "multivalue" else 1
    pairs = draw.sample(range(len(ADJECTIVES) * len(NOUNS)), keys_count + _NEEDLES)
    words = [f"{ADJECTIVES[i // len(NOUNS)]}-{NOUNS[i % len(NOUNS)]}" for i in pairs]
    keys, spare = words[:keys_count], words[keys_count:]
    values = iter(_values(spec.values, keys_count * values_count, spare, draw))
    of_key = {key: [next(values) for _ in range(values_count)] for key in keys}
    asked = keys if spec.kind == "multiquery" else keys[:1]
    hidden = {
        f"One of the special magic {spec.values} for {key} is: {value}.": value
        for key, its in of_key.items()
        for value in its
    }
    answers = tuple(value for key in asked for value in of_key[key])
    listed = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}"
    what = f"are all the special magic {spec.values}"
    if len(answers) == 1:
        what = f"is the special magic {spec.values[:-1]}"
    order = list(hidden)
    draw.shuffle(order)
    question = f"What {what} for {listed} mentioned in the provided text?"
    return {needle: hidden[needle] for needle in order}, question, answers


def _values(kind: ValueType, count: int, spare: list[str], draw: random.Random) -> list[str]:
    if kind == "numbers":
        return [str(number) for number in draw.sample(range(10**6, 10**7), count)]
    if kind == "words":
        return spare[:count]
    return [str(uuid.UUID(int=draw.getrandbits(128), version=4)) for _ in range(count)]


def _chunks(
    body: list[tuple[str, int]], gold: frozenset[str], chunk_tokens: int
) -> tuple[Chunk, ...]:
    groups: list[list[str]] = []
    filled = 0
    for sentence, length in body:
        if not groups or (filled and filled + length > chunk_tokens):
            groups.append([])
            filled = 0
        groups[-1].append(sentence)
        filled += length
    return tuple(
        Chunk(" ".join(group), f"Part {number}", is_gold=not gold.isdisjoint(group))
        for number, group in enumerate(groups, start=1)
    )


def _tokens(text: str, tokenizer: PreTrainedTokenizerBase) -> int:
    return len(tokenizer(f" {text}", add_special_tokens=False)["input_ids"])


def _prompt_tokens(example: Example, tokenizer: PreTrainedTokenizerBase) -> int:
    built = prompt(example, chat=bool(tokenizer.chat_template))
    if isinstance(built, str):
        return len(tokenizer(built)["input_ids"])
    text = cast(
        "str", tokenizer.apply_chat_template(built, add_generation_prompt=True, tokenize=False)
    )
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])
