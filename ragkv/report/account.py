"""What happened: one account per answer and one per precomputation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, Self

from ragkv.errors import ConfigError
from ragkv.report.reasons import REASONS, STORED_NEXT
from ragkv.report.summary import summary
from ragkv.report.trace import Trace


@dataclass(frozen=True, slots=True)
class Miss:
    """A chunk that was not reused, or not whole: known in the prompt, or named as retrieved.

    Attributes
    ----------
    chunk
        The head of its text, at most 80 characters.
    reason
        One of :data:`ragkv.report.reasons.REASONS`.
    detail
        What is known beyond it, such as what differs in a fingerprint.
    stored_next
        Whether it is encoded after this answer, so that later prompts reuse it.
    """

    chunk: str
    reason: str
    detail: str = ""
    stored_next: bool = False

    @property
    def mend(self) -> str:
        """What to do about it."""
        known = REASONS.get(self.reason)
        mend = "" if known is None else known.mend
        return f"{mend} {STORED_NEXT}".strip() if self.stored_next else mend


Source = Literal["entry", "version", "former"]
"""Where a chunk's rows come from: its stored entry, a version of it that was computed behind other
chunks, or former prompts that begin with the same tokens."""


@dataclass(frozen=True, slots=True)
class ChunkUse:
    """One chunk of the prompt: its position, and what was done with its tokens.

    ``start`` and ``end`` are token positions in the prompt; ``reused`` and
    ``recomputed`` count its cached tokens, the rest of the span is fresh. ``source`` is where the
    rows come from that no former prompt computed; ``former`` where there are none.
    """

    text: str
    start: int
    end: int
    reused: int
    recomputed: int
    source: Source = "entry"


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """The prompt's tokens, counted by the origin of their rows.

    Attributes
    ----------
    sink
        Tokens of the shared sink.
    history_exact, history_repaired
        Tokens behind the sink with rows of earlier prompts or answers: equal to a full prefill's,
        or computed over a partly stale context.
    reused
        Chunk tokens whose rows come from the chunks' entries.
    version
        Chunk tokens whose rows come from versions of the chunks.
    recomputed
        Chunk tokens that were cached and computed again.
    fresh
        Tokens that were not cached: query, text between chunks, misses.
    exact
        Leading tokens whose cached rows equal a full prefill's, up to a codec's rounding: the sink,
        the chunk directly behind it, exact history. None of them is recomputed below a ratio of 1.
    ahead
        Chunk tokens recomputed during decoding; not counted in ``recomputed``.
    handed_over
        Leading tokens whose rows were written for vLLM.
    """

    sink: int = 0
    history_exact: int = 0
    history_repaired: int = 0
    reused: int = 0
    version: int = 0
    recomputed: int = 0
    fresh: int = 0
    exact: int = 0
    ahead: int = 0
    handed_over: int = 0

    @property
    def prompt(self) -> int:
        """Tokens of the whole prompt."""
        return self.cached + self.recomputed + self.fresh

    @property
    def cached(self) -> int:
        """Tokens that were not computed, by any kind of reuse."""
        return self.sink + self.history + self.reused

    @property
    def history(self) -> int:
        """Tokens with rows from earlier prompts, versions included; 0 with ``history=False``."""
        return self.history_exact + self.history_repaired + self.version


@dataclass(frozen=True, slots=True)
class Decoding:
    """The tokens of an answer, and the steps that drew them.

    Attributes
    ----------
    tokens
        Tokens of the answer, including its end token.
    seconds
        From the first token to the last one; 0 for an answer of one token.
    steps
        Decoding passes after the first token.
    drafted, accepted
        Tokens that prompt lookup proposed, and those that became part of the answer.
    blocks, blocks_read
        With sparse attention: blocks of the context that decoding could read, and blocks read, over
        all layers and steps.
    """

    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    blocks: int = 0
    blocks_read: int = 0

    @property
    def ms_per_token(self) -> float:
        """Milliseconds for each token after the first; 0 without one."""
        return 1e3 * self.seconds / max(1, self.tokens - 1)

    @property
    def tokens_per_step(self) -> float:
        """Tokens after the first for each step; 0 without one."""
        return max(0, self.tokens - 1) / max(1, self.steps)


@dataclass(frozen=True, slots=True)
class ReuseReport:
    """The origin of every prompt token, and the time of every step.

    Attributes
    ----------
    method
        The name of the method that chose the recomputed tokens.
    recompute_ratio, effective_ratio
        The requested share (or ``"auto"``), and the share of the placed chunks' tokens that was
        computed by this prompt.
    ttft_s
        Seconds from the call to the first token's logits or text, everything included.
    tokens
        The prompt's tokens by origin.
    decode
        The answer's tokens and steps; all 0 without an answer.
    steps
        Seconds by step: wait, find, load, splice, select, recompute, first_token.
    chunks
        The chunks with rows in the prompt, in its order.
    misses
        Chunks not reused, or not whole, with reasons: the prompt's, and those a retriever named.
    positions
        Origin of each prompt token, when the first token came: 0 sink, 1 reused, 2 recomputed, 3
        fresh, 4 exact history, 5 repaired history, 6 version (bytes, one for each prompt token).
    warnings
        Problems that the user can solve, such as a prompt whose head is not the sink; logged once
        a kind.
    dtype
        The arithmetic, such as ``float32``, or ``float32, quantised products`` of a GGUF.
    choice
        With ``"auto"``: the chosen ratio, and why.
    not_loaded
        Why vLLM computed the prompt itself, such as ``expired``; empty where it loaded the rows.
    trace
        The prompt's text and scores, for its :func:`~ragkv.report.page.page.page`; not in
        :meth:`to_dict`, and ignored by equality.
    """

    method: str
    recompute_ratio: float | str
    effective_ratio: float
    ttft_s: float
    tokens: PromptTokens = PromptTokens()
    decode: Decoding = Decoding()
    steps: dict[str, float] = field(default_factory=dict)
    chunks: tuple[ChunkUse, ...] = ()
    misses: tuple[Miss, ...] = ()
    positions: bytes = b""
    warnings: tuple[str, ...] = ()
    dtype: str = ""
    choice: str = ""
    not_loaded: str = ""
    trace: Trace | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        """Return a summary of at most ten lines."""
        return summary(self)

    @property
    def total_s(self) -> float:
        """Seconds from the call to the last token."""
        return self.ttft_s + self.decode.seconds

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON-ready types, properties included; ``positions`` becomes digits."""
        out = asdict(replace(self, trace=None))
        del out["trace"]
        return out | {
            "tokens": _with_properties(self.tokens),
            "decode": _with_properties(self.decode),
            "total_s": self.total_s,
            "positions": "".join(map(str, self.positions)),
            "misses": tuple({**asdict(miss), "mend": miss.mend} for miss in self.misses),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the report that :meth:`to_dict` wrote, without its trace.

        Fields that this version does not know are left out.

        Raises
        ------
        ConfigError
            It is not such a dictionary.
        """
        try:
            return cls(
                **_known(cls, data)
                | {
                    "tokens": PromptTokens(**_known(PromptTokens, data["tokens"])),
                    "decode": Decoding(**_known(Decoding, data["decode"])),
                    "chunks": tuple(ChunkUse(**_known(ChunkUse, use)) for use in data["chunks"]),
                    "misses": tuple(Miss(**_known(Miss, miss)) for miss in data["misses"]),
                    "positions": bytes(map(int, data["positions"])),
                    "warnings": tuple(data["warnings"]),
                }
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"this is no report by ReuseReport.to_dict(): {error!r}") from error


@dataclass(frozen=True, slots=True)
class PrecomputeReport:
    """What an ingestion step did.

    Attributes
    ----------
    new, existing
        Chunks encoded now, and chunks that were in the store already.
    skipped
        Chunks too short to be worth an entry; they are simply prefilled.
    tokens, bytes
        Tokens encoded and bytes written by this call.
    seconds
        Wall time of the call.
    removed
        Chunks of the document's former version that no document has now.
    too_long
        Chunks that no prompt can hold, since they are longer than the model's positions: not
        encoded.
    unknown_token
        Chunks with a token that the model has no embedding for: not encoded.
    """

    new: int = 0
    existing: int = 0
    skipped: int = 0
    tokens: int = 0
    bytes: int = 0
    seconds: float = 0.0
    removed: int = 0
    too_long: int = 0
    unknown_token: int = 0

    def __add__(self, other: Self) -> Self:
        """Return the report of two calls together."""
        parts = asdict(self), asdict(other)
        return type(self)(**{name: parts[0][name] + parts[1][name] for name in parts[0]})

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON-ready types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the report that :meth:`to_dict` wrote; unknown fields are left out."""
        return cls(**_known(cls, data))


def _with_properties(part: PromptTokens | Decoding) -> dict[str, float]:
    """Return the fields and the properties derived from them."""
    derived = [name for name, each in vars(type(part)).items() if isinstance(each, property)]
    return asdict(part) | {name: getattr(part, name) for name in derived}


def _known(kind: type[Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that are fields of a dataclass."""
    names = {each.name for each in fields(kind)} - {"trace"}
    return {name: value for name, value in data.items() if name in names}
