"""Prompts of a given length over chunks of a given length, from real text."""

from __future__ import annotations

import math
import random
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
_TRIES = 8
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
    """A long text that chunks of exactly so many tokens are cut from."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._text = default_haystack()
        self._offsets = tokens_of(self._text, tokenizer).offsets

    def __len__(self) -> int:
        return len(self._offsets)

    def check(self, tokens: int) -> None:
        """Raise ConfigError where the text has fewer tokens."""
        if tokens > len(self):
            raise ConfigError(
                f"the text for prompts has {len(self)} tokens, too few for these chunks: give "
                "smaller --tokens"
            )

    def cut(self, start: int, tokens: int) -> tuple[str, int]:
        """Return a stripped piece from about token ``start`` on, and the token behind it.

        Alone it has ``tokens`` tokens, or nearly as many where no piece has exactly. Raises
        ConfigError where the text ends before.
        """
        for first in range(start, start + _TRIES):
            end = first + tokens
            for _ in range(_TRIES):
                self.check(end)
                piece = self._text[self._offsets[first, 0] : self._offsets[end - 1, 1]].strip()
                excess = len(tokens_of(piece, self._tokenizer)) - tokens
                if excess == 0:
                    return piece, end
                end = max(first + 1, end - excess)
        return piece, end

    def pieces(self, count: int, tokens: int) -> tuple[list[str], int]:
        """Return so many pieces from the beginning on, and the token behind the last."""
        pieces: list[str] = []
        end = 0
        while len(pieces) < count:
            piece, end = self.cut(end, tokens)
            pieces.append(piece)
        return pieces, end


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
    empty = len(token_ids(kv, _prompt(kv, [])))
    rooms = [divmod(max(0, tokens - empty), chunk_tokens + 1) for tokens in lengths]
    chunks, end = text.pieces(max(whole for whole, _ in rooms), chunk_tokens)
    traces = []
    for number, tokens in enumerate(lengths):
        whole, rest = rooms[number]
        reserved = 2 * (number + 1) * chunk_tokens
        text.check(end + reserved)
        while True:
            last = [text.cut(len(text) - reserved, rest)[0]] if rest >= MIN_CHUNK_TOKENS else []
            trace = _trace(kv, tokens, [*chunks[:whole], *last], rounds + 1, seed)
            excess = max(map(len, trace.ids)) - tokens
            if excess <= 0:
                break
            if not last:  # the last whole chunk is the one to be shortened now
                whole, rest = whole - 1, chunk_tokens
            rest -= excess
        traces.append(trace)
    return traces


def _trace(kv: RagKV, tokens: int, chunks: list[str], count: int, seed: int) -> RequestTrace:
    """Return so many prompts over the chunks."""
    if not chunks:
        raise ConfigError(
            f"a prompt of {tokens} tokens has no room for a chunk: give more --tokens"
        )
    prompts = tuple(_prompt(kv, order) for order in _orders(chunks, count, seed))
    ids = tuple(token_ids(kv, each) for each in prompts)
    sink = kv.sink_from(template(_TASK, chat=bool(kv.tokenizer.chat_template)))
    return RequestTrace(tokens, tuple(chunks), sink, prompts, ids)


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


def tokens_of(text: str, tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """Tokenise a text alone."""
    return tokenize(Rendered(text, add_special_tokens=False), tokenizer)
