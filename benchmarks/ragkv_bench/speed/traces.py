"""Prompts of a given length over chunks of a given length, from real text."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from ragkv import RagKV
from ragkv.errors import ConfigError
from ragkv.prompt.render import Prompt, Rendered, render
from ragkv.prompt.tokens import tokenize
from ragkv_bench.data.examples import Chunk, Example
from ragkv_bench.data.needles import default_haystack
from ragkv_bench.data.tasks import prompt, template

MIN_CHUNK_TOKENS = 16
_TASK = "multihop_qa"
_QUESTION = (
    "Which rule of the Python language do these passages explain first, and why is it there?"
)
_TRIES = 8
_MANY = 10
"""So many chunks have more orders than any benchmark needs."""
_TOO_SHORT = (
    "the text for prompts has {tokens} tokens, too few for these chunks: give smaller --tokens"
)


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """Prompts over the same chunks, each in another order.

    Attributes
    ----------
    tokens
        The requested length: the longest prompt has this many tokens or a few less.
    chunks
        The chunks' texts.
    sink
        The text that chunks are encoded behind.
    prompts
        The first is for warming up, each other one for one round.
    ids
        Each prompt's token ids.
    """

    tokens: int
    chunks: tuple[str, ...]
    sink: str
    prompts: tuple[Prompt, ...]
    ids: tuple[list[int], ...]


class Text:
    """A long text that chunks of exactly so many tokens are cut from."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._text = default_haystack() if text is None else text
        self._offsets = tokenize(Rendered(self._text, add_special_tokens=False), tokenizer).offsets

    def __len__(self) -> int:
        return len(self._offsets)

    def cut(self, start: int, tokens: int) -> tuple[str, int]:
        """Return a stripped piece from about token ``start`` on, and the token behind it.

        Alone it has ``tokens`` tokens, or nearly as many where no piece has exactly.

        Raises
        ------
        ConfigError
            The text ends before.
        """
        for first in range(start, start + _TRIES):
            end = first + tokens
            for _ in range(_TRIES):
                if end > len(self):
                    raise ConfigError(_TOO_SHORT.format(tokens=len(self)))
                piece = self._text[self._offsets[first, 0] : self._offsets[end - 1, 1]].strip()
                excess = _length(piece, self._tokenizer) - tokens
                if excess == 0:
                    return piece, end
                end = max(first + 1, end - excess)
        return piece, end


def make_traces(
    kv: RagKV, lengths: tuple[int, ...], chunk_tokens: int, rounds: int, seed: int = 0
) -> list[RequestTrace]:
    """Return one trace for each prompt length, of ``rounds + 1`` prompts.

    All share their chunks of ``chunk_tokens`` tokens; what is left of a prompt's room is
    one shorter chunk, of another part of the text for each length.

    Raises
    ------
    ConfigError
        A length has no room for a chunk, or the text is too short.
    """
    text = Text(kv.tokenizer)
    chunks: list[str] = []
    end = 0
    traces = []
    for number, tokens in enumerate(lengths, start=1):
        room = tokens - len(token_ids(kv, _prompt(kv, [])))
        whole, rest = divmod(max(0, room), chunk_tokens + 1)
        while len(chunks) < whole:
            piece, end = text.cut(end, chunk_tokens)
            chunks.append(piece)
        tail = len(text) - 2 * number * chunk_tokens
        if tail < end:
            raise ConfigError(_TOO_SHORT.format(tokens=len(text)))

        def cut(count: int, start: int = tail) -> str:
            return text.cut(start, count)[0]

        sizes = {"chunk_tokens": chunk_tokens, "rounds": rounds, "seed": seed}
        traces.append(_fit(kv, tokens, chunks[:whole], rest, cut=cut, **sizes))
    return traces


def _fit(
    kv: RagKV,
    tokens: int,
    whole: list[str],
    rest: int,
    *,
    chunk_tokens: int,
    cut: Callable[[int], str],
    rounds: int,
    seed: int,
) -> RequestTrace:
    """Shorten the last chunk until no order of the chunks makes a longer prompt than asked."""
    while True:
        chunks = [*whole, cut(rest)] if rest >= MIN_CHUNK_TOKENS else whole
        if not chunks:
            raise ConfigError(
                f"a prompt of {tokens} tokens has no room for a chunk: give more --tokens"
            )
        prompts = tuple(_prompt(kv, order) for order in _orders(chunks, rounds + 1, seed))
        ids = tuple(token_ids(kv, each) for each in prompts)
        excess = max(map(len, ids)) - tokens
        if excess <= 0:
            sink = kv.sink_from(template(_TASK, chat=bool(kv.tokenizer.chat_template)))
            return RequestTrace(tokens, tuple(chunks), sink, prompts, ids)
        if rest < MIN_CHUNK_TOKENS:  # the last whole chunk is the one to be shortened now
            whole, rest = whole[:-1], chunk_tokens
        rest -= excess


def _orders(chunks: list[str], count: int, seed: int) -> list[list[str]]:
    """Draw orders of the chunks, all different as long as there are so many."""
    draw = random.Random(seed)  # noqa: S311  seeded, for repeatable prompts
    orders: list[list[str]] = []
    while len(orders) < count:
        fresh = len(orders) % math.factorial(min(len(chunks), _MANY))
        order = draw.sample(chunks, len(chunks))
        if order not in orders[len(orders) - fresh :]:
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


def _length(text: str, tokenizer: PreTrainedTokenizerBase) -> int:
    return len(tokenize(Rendered(text, add_special_tokens=False), tokenizer))
