"""Runs: prompts up to the end of one of their chunks, and versions of their chunks."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ragkv.attend.observe import LayerCall, Observer, attention_to_groups
from ragkv.chunk.sinks import Sink
from ragkv.engine.plan import Located
from ragkv.prompt.tokens import IntArray, Tokens
from ragkv.store.version import PathSpan, Version, context_impact, digest_of_path

Paid = npt.NDArray[np.float64]
_LONGEST_SEPARATOR = 32


class RunChunk(NamedTuple):
    """A chunk of a run.

    Attributes
    ----------
    text
        The chunk's text.
    first, end
        Its tokens, without those that extend beyond it.
    stop
        End of the last token that has a character of it.
    offsets
        ``[tokens, 2]`` characters of its text that its tokens cover.
    """

    text: str
    first: int
    end: int
    stop: int
    offsets: IntArray


@dataclass(slots=True, eq=False)
class Run:
    """Chunks behind a sink. The first ``chain`` of them follow it, and one another, directly."""

    ids: IntArray
    chunks: tuple[RunChunk, ...]
    chain: int
    sink: Sink
    begun: float  # chunks that were deleted later are not kept
    requests: int = 0


def chunks_of(located: Located) -> Iterable[RunChunk]:
    """Yield the prompt's chunks in order, up to the first that is not whole."""
    end = 0
    for span in located.known or ():
        if span.end - span.start != len(span.text):
            return
        chunk = chunk_at(located.tokens, span.text, span.start)
        if chunk.first < end or chunk.end <= chunk.first:
            return
        end = chunk.stop
        yield chunk


def chunk_at(tokens: Tokens, text: str, start: int) -> RunChunk:
    """Return the chunk at a character of the prompt."""
    end = start + len(text)
    own, stop = tokens.inside(start, end), tokens.touching(start, end).stop
    return RunChunk(text, own.start, own.stop, stop, tokens.offsets[own] - np.int32(start))


def chain_of(located: Located, sink: Sink, chunks: Sequence[RunChunk]) -> int:
    """Count the first chunks that follow the whole sink and one another.

    A repeated chunk ends the chain, and so does any text between chunks except a separator: a few
    visible characters of punctuation, which carry no content.
    """
    ids = located.tokens.ids[: len(sink.ids)]
    if not np.array_equal(ids, sink.ids):
        return 0
    end = located.tokens.characters(len(sink.ids))
    seen = set[str]()
    for count, (chunk, span) in enumerate(zip(chunks, located.known or (), strict=False)):
        gap = located.text[end : span.start]
        if not _is_separator(gap) or chunk.text in seen:
            return count
        seen.add(chunk.text)
        end = span.end
    return len(chunks)


def _is_separator(gap: str) -> bool:
    kinds = {unicodedata.category(each)[0] for each in "".join(gap.split())}
    return len(gap) <= _LONGEST_SEPARATOR and kinds <= {"P"}


def adds_attention(paid: Paid, chunks: Sequence[RunChunk], device: torch.device) -> Observer:
    """Return an observer that adds each layer's attention to chunks to ``paid``.

    ``paid`` is ``[tokens, chunks]``; only computed rows change.
    """
    member = torch.zeros(paid.shape, dtype=torch.float32, device=device)
    for group, each in enumerate(chunks):
        member[each.first : each.end, group] = 1.0

    def observe(call: LayerCall) -> None:
        paid[call.rows.cpu().numpy()] += attention_to_groups(call, member).cpu().numpy()

    return observe


def version_in(run: Run, at: int, paid: Paid) -> Version:
    """Return the version of a run's chunk.

    ``paid`` is the attention of the run's tokens to each chunk, mean over the layers.
    """
    chunk, before = run.chunks[at], run.chunks[:at]
    own = paid[chunk.first : chunk.end, : at + 1]
    between = np.zeros((at + 1, at + 1))
    between[at] = own.sum(axis=0)
    sizes = np.array([each.end - each.first for each in run.chunks[: at + 1]])
    order = np.argsort(-own[:, :at].sum(axis=1), kind="stable")
    ids = run.ids[: chunk.end]
    return Version(
        chunk.text,
        run.sink.fingerprint,
        tuple(each.text for each in before),
        between[at, :at].copy(),
        float(between[at, at]),
        float(context_impact(between, sizes)[at]),
        np.argsort(order, kind="stable"),
        digest_of_path(ids),
        chunk.first,
        place=PathSpan(ids, chunk.offsets),
    )
