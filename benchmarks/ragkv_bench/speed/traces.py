"""Prompts of a given length over chunks of a given length, from real text."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from ragkv import RagKV
from ragkv.errors import ConfigError
from ragkv.prompt.render import Prompt, Rendered, render
from ragkv.prompt.tokens import Tokens, tokenize
from ragkv_bench.data.examples import Chunk, Example
from ragkv_bench.data.needles import default_haystack
from ragkv_bench.data.tasks import prompt, template
from ragkv_bench.speed.timing import MIN_CHUNK_TOKENS

_TASK = "multihop_qa"
_QUESTION = (
    "Which rule of the Python language do these passages explain first, and why is it there?"
)
_MANY = 10
"""So many chunks have more orders than any benchmark needs."""


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """Prompts over the same chunks, each in another order, with their token ids.

    ``tokens`` is the requested length: the longest prompt has as many or a few less. The first
    prompt is for warming up, each other one for one round. Chunks are encoded behind ``sink``.
    """

    tokens: int
    chunks: tuple[str, ...]
    sink: str
    prompts: tuple[Prompt, ...]
    ids: tuple[list[int], ...]


class Text:
    """A long text in pieces of about so many tokens each."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, piece_tokens: int) -> None:
        self._text = default_haystack()
        self._offsets = tokens_of(self._text, tokenizer).offsets
        self._tokens = piece_tokens

    def __len__(self) -> int:
        return len(self._offsets) // self._tokens

    def piece(self, number: int, tokens: int | None = None) -> str:
        """Return a piece, or its first ``tokens``; ConfigError where the text has ended."""
        if number >= len(self):
            raise ConfigError(
                f"the text for prompts has {len(self._offsets)} tokens, too few for these chunks: "
                "give smaller --tokens"
            )
        first = number * self._tokens
        last = first + (tokens or self._tokens) - 1
        return self._text[self._offsets[first, 0] : self._offsets[last, 1]].strip()


def make_traces(
    kv: RagKV, lengths: Sequence[int], chunk_tokens: int, rounds: int, seed: int = 0
) -> list[RequestTrace]:
    """Return one trace for each prompt length, of ``rounds + 1`` prompts.

    All share their chunks of ``chunk_tokens`` tokens; what is left of a prompt's room is
    one shorter chunk, of another part of the text for each length.

    Raises ConfigError: a length has no room for a chunk, or the text is too short.
    """
    text = Text(kv.tokenizer, chunk_tokens)
    sink = kv.sink_from(template(_TASK, chat=bool(kv.tokenizer.chat_template)))
    traces = []
    for index, length in enumerate(lengths):

        def trace(size: int, index: int = index, length: int = length) -> RequestTrace:
            """Return the prompts whose chunks have so many tokens."""
            whole, rest = divmod(size, chunk_tokens)
            chunks = [text.piece(number) for number in range(whole)]
            if rest >= MIN_CHUNK_TOKENS:
                if whole >= len(text) - len(lengths):
                    text.piece(len(text))
                chunks.append(text.piece(len(text) - 1 - index, rest))
            prompts = tuple(_prompt(kv, order) for order in _orders(chunks, rounds + 1, seed))
            ids = tuple(token_ids(kv, each) for each in prompts)
            return RequestTrace(length, tuple(chunks), sink, prompts, ids)

        sizes = range(MIN_CHUNK_TOKENS, length)
        found = bisect_right(sizes, length, key=lambda size: max(map(len, trace(size).ids)))
        if not found:
            raise ConfigError(
                f"a prompt of {length} tokens has no room for a chunk: give more --tokens"
            )
        traces.append(trace(sizes[found - 1]))
    return traces


def _orders(chunks: list[str], count: int, seed: int) -> list[list[str]]:
    """Draw orders of the chunks, all different as long as there are so many."""
    draw = random.Random(seed)  # noqa: S311  seeded, for repeatable prompts
    orders: list[list[str]] = []
    while len(orders) < count:
        order = draw.sample(chunks, len(chunks))
        if order not in orders or len(orders) >= math.factorial(min(len(chunks), _MANY)):
            orders.append(order)
    return orders


def _prompt(kv: RagKV, chunks: list[str]) -> Prompt:
    pieces = tuple(Chunk(chunk) for chunk in chunks)
    example = Example("bench", _QUESTION, ("",), pieces, _TASK)
    return prompt(example, chat=bool(kv.tokenizer.chat_template))


def token_ids(kv: RagKV, text: Prompt) -> list[int]:
    """Return a prompt's token ids."""
    ids: list[int] = tokenize(render(text, kv.tokenizer), kv.tokenizer).ids.tolist()
    return ids


def tokens_of(text: str, tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """Tokenise a text alone."""
    return tokenize(Rendered(text, add_special_tokens=False), tokenizer)
