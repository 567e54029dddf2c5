"""What the primary model's query looks at under full attention: the target of the tuning."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ragkv.attend.forward import SubsetPass, observed_forward
from ragkv.attend.observe import LayerCall, StopPass, attention_of_last_rows
from ragkv.errors import ConfigError, PromptTooLongError
from ragkv.model.architecture import Architecture
from ragkv.model.loaded import LoadedModel, ReusableModel
from ragkv.prompt.find import ChunkFinder, Span
from ragkv.prompt.render import render
from ragkv.prompt.tokens import IntArray, Tokens, tokenize
from ragkv.splice.buffer import SplicedCache
from ragkv_bench.data.examples import Example
from ragkv_bench.data.tasks import chunk_texts, prompt

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """An example's whole prompt as the primary model reads it, cut as the engine cuts it.

    ``spans`` are its chunks, ``first`` is the index of the query's first token, behind the last
    chunk, and ``query`` the text from there on, which the auxiliary model reads behind each chunk.
    """

    id: str
    tokens: Tokens
    spans: tuple[Span, ...]
    first: int
    query: str


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """The attention of a question's query to its chunks, for each chunk in its own arrays.

    Attributes
    ----------
    scores
        ``[tokens]`` float32, in the primary model's tokens: attention weight from the query's
        tokens, mean over heads and query tokens.
    offsets
        ``[tokens, 2]`` int32: characters of the chunk's text that each token covers.
    """

    question: Question
    scores: tuple[FloatArray, ...]
    offsets: tuple[IntArray, ...]


def read_question(example: Example, loaded: LoadedModel) -> Question:
    """Render an example's prompt and find its chunks, as the engine does.

    Raises ConfigError: no chunk is found in the prompt; PromptTooLongError: the primary model does
    not know that many positions.
    """
    chat = bool(loaded.tokenizer.chat_template)
    rendered = render(prompt(example, chat=chat), loaded.tokenizer)
    spans = ChunkFinder(chunk_texts(example)).find(rendered.text)
    if not spans:
        raise ConfigError(
            f"example {example.id}: no chunk is long enough to be reused; omit the example"
        )
    tokens = tokenize(rendered, loaded.tokenizer)
    check_length(len(tokens), loaded, example.id)
    first = int(np.searchsorted(tokens.offsets[:, 0], spans[-1].end, side="left"))
    query = rendered.text[int(tokens.offsets[first, 0]) :]
    return Question(example.id, tokens, tuple(spans), first, query)


def check_length(tokens: int, loaded: LoadedModel, example_id: str) -> None:
    """Raise PromptTooLongError where a model does not know that many positions."""
    known = loaded.positions
    if known is not None and tokens > known:
        raise PromptTooLongError(
            f"example {example_id}: {tokens} tokens, and {loaded.name} has {known} positions; "
            "omit the example or cut its chunks"
        )


def look(question: Question, loaded: ReusableModel) -> Target:
    """Prefill the whole prompt up to the last layer and take what the query attends to.

    The attention of one layer's query rows is all that is ever materialised (CacheClip,
    arXiv 2510.10129: last layer, mean over heads and query tokens).
    """
    architecture = loaded.architecture
    length = len(question.tokens)
    layer = looking_layer(architecture)
    seen: list[torch.Tensor] = []

    def observe(call: LayerCall) -> None:
        if call.layer == layer:
            seen.append(attention_of_last_rows(call, length - question.first))
            raise StopPass

    cache = SplicedCache(loaded, length, spare=0)
    subset = SubsetPass(question.tokens.ids, np.arange(length), cache, observer=observe)
    observed_forward(loaded, subset)
    weights: FloatArray = seen[0].cpu().numpy()
    cuts = [_tokens_of(span, question.tokens) for span in question.spans]
    return Target(
        question,
        tuple(weights[slots] for slots, _ in cuts),
        tuple(offsets for _, offsets in cuts),
    )


def looking_layer(architecture: Architecture) -> int:
    """Return the last layer, or the last that sees the whole prompt where some have windows."""
    unlimited = [layer for layer, window in enumerate(architecture.windows) if window is None]
    return unlimited[-1] if unlimited else architecture.layers - 1


def _tokens_of(span: Span, tokens: Tokens) -> tuple[slice, IntArray]:
    """Return the tokens that touch a chunk, and the chunk's characters that they cover."""
    first = int(np.searchsorted(tokens.offsets[:, 1], span.start, side="right"))
    last = int(np.searchsorted(tokens.offsets[:, 0], span.end, side="left"))
    inside = np.clip(tokens.offsets[first:last], span.start, span.end) - np.int32(span.start)
    return slice(first, last), inside
