"""What the campaign asks, and what the right answers are."""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from store_entries import FINGERPRINT, make_entry
from tiny import some_chunks, tiny_model, tiny_tokenizer

from ragkv import RagKV, ReuseConfig
from ragkv.chunk.sinks import Sink
from ragkv.config import StoreConfig
from ragkv.history.node import PrefixMatch
from ragkv.model.load import load_model
from ragkv.model.loaded import LoadedModel
from ragkv.report.account import ReuseReport
from ragkv.store.types import Found

*TEXTS, NEIGHBOUR = some_chunks(9, words=30)
"""The chunks of the prompts, and one that all of them are encoded behind, too, as versions."""
PROMPTS = ((0, 1, 2), (3, 2, 1), (4, 0, 5), (6, 7, 3), (5, 4, 6), (7, 1, 0))  # few: see _right
RATIOS = (0.0, 0.3, 1.0)
NEW_TOKENS = 3
_MISSED = "missed"
_TOLERANCE = 1e-3  # of ratio 1 against a full prefill: another order of summation

_REUSE = ReuseConfig(on_miss="skip")

Known = frozenset[tuple[int, str]]
"""The chunks that were found in a prompt: reused as an entry or a version, or missed."""


class Question(NamedTuple):
    """Chunks, by their place in TEXTS, and a ratio."""

    chunks: tuple[int, ...]
    ratio: float

    def prompt(self) -> list[dict[str, str]]:
        """Return the messages."""
        text = "\n\n".join(TEXTS[chunk] for chunk in self.chunks)
        return [{"role": "user", "content": f"{text}\n\nWhat is assigned?"}]


@dataclass(frozen=True)
class Answer:
    """The next token's logits and the first tokens, each with the chunks that were reused."""

    logits: torch.Tensor
    known: Known
    tokens: tuple[int, ...]
    known_for_tokens: Known
    misses: tuple[str, ...]

    @property
    def reused(self) -> frozenset[int]:
        """The chunks that were reused for the logits."""
        return frozenset(chunk for chunk, source in self.known if source != _MISSED)


@cache
def loaded() -> LoadedModel:
    """Return the one tiny random model."""
    torch.set_num_threads(1)
    return load_model(tiny_model(layers=2), tiny_tokenizer())


def engine(store: StoreConfig | str) -> RagKV:
    """Open an engine over a store."""
    kv = RagKV(loaded(), store=store, reuse=_REUSE)
    kv._reuse.corpus.loads_always = True  # how long things take must not decide what is compared
    history, healing = kv._reuse.history, kv._reuse.healing
    # earlier prompts decide nothing
    history.find = lambda *_, **__: PrefixMatch(())
    kv._pipeline._planner.keep = lambda *_: None
    healing.note = lambda *_: False
    return kv


def draw_questions(draw: random.Random, count: int) -> list[Question]:
    """Draw prompts of three chunks; every ratio in turn."""
    first = draw.randrange(len(RATIOS))
    return [
        Question(draw.choice(PROMPTS), RATIOS[(first + number) % len(RATIOS)])
        for number in range(count)
    ]


def ask(kv: RagKV, question: Question) -> Answer:
    """Ask for logits, and once more for text."""
    ratio = question.ratio
    prefilled = kv.prefill(question.prompt(), recompute_ratio=ratio)
    completion = kv.generate(question.prompt(), max_new_tokens=NEW_TOKENS, recompute_ratio=ratio)
    return Answer(
        prefilled.logits,
        _known(prefilled.report),
        tuple(completion.token_ids),
        _known(completion.report),
        tuple(miss.reason for miss in prefilled.report.misses + completion.report.misses),
    )


def wrong(question: Question, answer: Answer) -> str:
    """Compare with fresh engines that know exactly the chunks that were reused.

    Returns what differs; empty if nothing does. Logits are compared bit by bit. At ratio
    1 they are also compared with those of a full prefill.
    """
    if not torch.equal(answer.logits, _right(question, answer.known)[0]):
        return f"logits of {question} with {sorted(answer.known)}"
    if answer.tokens != _right(question, answer.known_for_tokens)[1]:
        return f"tokens of {question} with {sorted(answer.known_for_tokens)}"
    if question.ratio == 1.0:
        full = _right(question, frozenset())[0]
        if (answer.logits - full).abs().max() > _TOLERANCE:
            return f"logits of {question} are not those of a full prefill"
    return ""


def precompute(kv: RagKV, chunk: int, *, version: bool = True) -> None:
    """Encode one chunk by itself: in a batch of others, the last bits may differ.

    And behind its neighbour, as a version.
    """
    text = TEXTS[chunk]
    kv.precompute([text])
    if version:
        kv.precompute([NEIGHBOUR])
        kv.prefetch([NEIGHBOUR, text], for_next_answer=False)
        kv.wait()


def sink_of(kv: RagKV) -> Sink:
    """Return the engine's sink."""
    return kv._reuse.corpus.sinks.configured(kv.reuse)


def whole(kv: RagKV, chunks: Iterable[int]) -> list[int]:
    """Return those of the chunks whose entries are there and read back whole."""
    lookup: Callable[[int], Found] = lambda chunk: kv._reuse.corpus.get(  # noqa: E731
        TEXTS[chunk], sink_of(kv)
    )
    return [c for c in chunks if kv.contains(TEXTS[c]) and lookup(c).entry is not None]


@cache
def _right(question: Question, known: Known) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Ask a fresh engine with nothing but these chunks and versions, in memory."""
    with engine(":memory:") as kv:
        for chunk, source in sorted(known):
            if source == _MISSED:  # known, and of no use
                kv._store.put(make_entry(TEXTS[chunk]), FINGERPRINT)
            else:
                precompute(kv, chunk, version=source == "version")
        answer = ask(kv, question)
    if answer.known != known or answer.known_for_tokens != known:
        raise RuntimeError(f"the fresh engine reused {answer.known}, not {known}")
    return answer.logits, answer.tokens


def _known(report: ReuseReport) -> Known:
    missed = [
        (number, _MISSED)
        for number, text in enumerate(TEXTS)
        if any(text.startswith(miss.chunk) for miss in report.misses)
    ]
    return frozenset([(TEXTS.index(use.text), use.source) for use in report.chunks] + missed)
