"""Needles in a haystack of any length, made as RULER makes them.

Source: RULER, arXiv 2404.06654, section 3 and ``niah`` of its data scripts: sentences
of the form "One of the special magic numbers for KEY is: VALUE." are put between the
sentences of an unrelated text, at depths drawn from 40 even steps, and requested
afterwards. Here the text is then cut into chunks, as retrieval would have it.
"""

from __future__ import annotations

import pydoc_data.topics
import random
import re
import textwrap
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ragkv.errors import ConfigError
from ragkv_bench.data.examples import Chunk, Example
from ragkv_bench.data.needle_words import ADJECTIVES, NOUNS
from ragkv_bench.data.tasks import TASKS, prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KINDS = ("single", "multikey", "multivalue", "multiquery")
_NEEDLES = 4
_CHUNK_TOKENS = 256
_DEPTHS = tuple(step / 39 for step in range(40))
# The full stop, exclamation and question mark of Chinese and Japanese stand without a space.
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[\u3002\uff01\uff1f])|\n\s*\n")
_LONGEST_SENTENCE = 400


Hay = Sequence[tuple[str, int]]
"""Sentences and their lengths in tokens."""


@dataclass(frozen=True, slots=True)
class Hidden:
    """The hidden keys and values of an example, and the requested ones.

    ``needles`` has the sentences in their order, and whether they hold an answer. ``hay`` is the
    text around them; where it is empty, the text is a haystack.
    """

    task: str
    needles: tuple[tuple[str, bool], ...]
    question: str
    answers: tuple[str, ...]
    hay: tuple[str, ...] = ()


Hide = Callable[[random.Random], Hidden]
"""Draws one example's contents."""


def build_needles(
    haystack: str,
    tokenizer: PreTrainedTokenizerBase,
    kind: str,
    tokens: int,
    *,
    count: int = 1,
    seed: int = 0,
) -> list[Example]:
    """Make examples over a text, each from another place of it; a short text is repeated.

    The tokenizer counts, with its chat template where it has one. Values have seven digits.

    Parameters
    ----------
    kind
        ``single``: one key, one value. ``multikey``: one of four keys is requested.
        ``multivalue``: all four values of one key. ``multiquery``: four keys' values.
    tokens
        Length of prompt and longest answer together, in tokens, as RULER counts it;
        the prompt fills it as far as whole sentences do, and never exceeds it.

    Raises ConfigError: there is no such kind, the text is empty, or ``tokens`` has no room for
    needles and question.
    """
    if kind not in KINDS:
        raise ConfigError(f"needle kind must be one of {', '.join(KINDS)}, not {kind!r}")
    hay = measured(sentences(haystack), tokenizer)
    if not hay:
        raise ConfigError("the haystack has no text")
    ids = [f"needles_{kind}_{tokens}_{seed}_{number:04d}" for number in range(count)]
    return [hidden_example(hay, tokenizer, needle(kind), tokens, each) for each in ids]


def measured(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> Hay:
    """Return texts with their lengths inside a sentence."""
    return [(text, _tokens(text, tokenizer)) for text in texts]


def needle(kind: str) -> Hide:
    """Return what draws the needles of a kind of :func:`build_needles`."""
    return partial(_hide, kind)


def default_haystack() -> str:
    """Return the Python language reference, which every interpreter carries."""
    return "\n\n".join(pydoc_data.topics.topics.values())


def read_haystack(path: str | Path | None) -> str:
    """Read a UTF-8 text file, None the default, to hide needles in; ConfigError if that fails."""
    try:
        return default_haystack() if path is None else Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"haystack {path} cannot be read as UTF-8 text: {error}") from error


def sentences(text: str) -> list[str]:
    """Cut a text into sentences of at most 400 characters, white space collapsed."""
    parts = (" ".join((part or "").split()) for part in _SENTENCE_END.split(text))
    return [
        piece
        for part in parts
        for piece in textwrap.wrap(part, _LONGEST_SENTENCE, break_on_hyphens=False)
    ]


def hidden_example(
    hay: Hay, tokenizer: PreTrainedTokenizerBase, hide: Hide, tokens: int, example_id: str
) -> Example:
    """Make the example that its id draws; the arguments are those of :func:`build_needles`.

    Raises ConfigError: ``tokens`` has no room for what is hidden and the question.
    """
    draw = random.Random(example_id)  # noqa: S311  seeded, not secret
    hidden = hide(draw)
    if hidden.hay:
        hay = measured(hidden.hay, tokenizer)
    start = draw.randrange(len(hay))
    count = len(hidden.needles)
    few = count <= len(_DEPTHS)
    depths = sorted(draw.sample(_DEPTHS, count) if few else (draw.random() for _ in range(count)))
    room = tokens - TASKS[hidden.task].max_new_tokens
    needles = measured([sentence for sentence, _ in hidden.needles], tokenizer)
    gold = frozenset(sentence for sentence, is_gold in hidden.needles if is_gold)

    def build(size: int) -> Example:
        body = [hay[(start + i) % len(hay)] for i in range(size)]
        for each, depth in reversed(list(zip(needles, depths, strict=True))):
            body.insert(int(size * depth), each)
        chunks = _chunks(body, gold)
        return Example(example_id, hidden.question, hidden.answers, chunks, hidden.task)

    mean = sum(length for _, length in hay) / len(hay)
    sizes = range(int(2 * max(room, 0) / mean) + 2)
    fits = bisect_right(sizes, room, key=lambda size: _prompt_tokens(build(size), tokenizer))
    if not fits:
        least = _prompt_tokens(build(0), tokenizer) + tokens - room
        what = hidden.task.removeprefix("niah_")
        raise ConfigError(f"{what} needles need at least {least} tokens, not {tokens}")
    return build(fits - 1)


def draw_keys(draw: random.Random, count: int) -> list[str]:
    """Return different keys: an adjective, a hyphen, a noun."""
    pairs = draw.sample(range(len(ADJECTIVES) * len(NOUNS)), count)
    return [f"{ADJECTIVES[i // len(NOUNS)]}-{NOUNS[i % len(NOUNS)]}" for i in pairs]


def _hide(kind: str, draw: random.Random) -> Hidden:
    keys_count = 1 if kind in {"single", "multivalue"} else _NEEDLES
    each = _NEEDLES if kind == "multivalue" else 1
    keys = draw_keys(draw, keys_count)
    values = [str(number) for number in draw.sample(range(10**6, 10**7), keys_count * each)]
    of_key = {key: values[each * i : each * (i + 1)] for i, key in enumerate(keys)}
    named = keys if kind == "multiquery" else keys[:1]
    answers = tuple(value for key in named for value in of_key[key])
    listed = named[0] if len(named) == 1 else f"{', '.join(named[:-1])}, and {named[-1]}"
    one = len(answers) == 1
    what = f"{'is the' if one else 'are all the'} special magic number{'s' * (not one)}"
    needles = [
        (f"One of the special magic numbers for {key} is: {value}.", value in answers)
        for key, its in of_key.items()
        for value in its
    ]
    draw.shuffle(needles)
    question = f"What {what} for {listed} mentioned in the provided text?"
    return Hidden(f"niah_{kind}", tuple(needles), question, answers)


def _chunks(body: Hay, gold: frozenset[str]) -> tuple[Chunk, ...]:
    groups: list[list[str]] = []
    filled = 0
    for sentence, length in body:
        if not groups or (filled and filled + length > _CHUNK_TOKENS):
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
