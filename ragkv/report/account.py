"""Reports: one for each answer and one for each precomputation."""

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
    """A chunk that was not reused, or only in part: found in the prompt, or named as retrieved.

    Attributes
    ----------
    chunk
        The first 80 characters of its text.
    reason
        One of :data:`ragkv.report.reasons.REASONS`.
    detail
        More about the reason, such as the difference between two fingerprints.
    stored_next
        Whether it is encoded after this answer, for later prompts.
    """

    chunk: str
    reason: str
    detail: str = ""
    stored_next: bool = False

    @property
    def mend(self) -> str:
        """The remedy."""
        known = REASONS.get(self.reason)
        mend = "" if known is None else known.mend
        return f"{mend} {STORED_NEXT}".strip() if self.stored_next else mend


Source = Literal["entry", "version", "history"]
"""The origin of a chunk's rows: its stored entry, a version computed behind other chunks, or
history (rows of earlier prompts that begin with the same tokens)."""


@dataclass(frozen=True, slots=True)
class ChunkUse:
    """One chunk of the prompt.

    Attributes
    ----------
    start, end
        Its token positions in the prompt.
    reused, recomputed
        Counts of its cached tokens; the rest of its span is fresh.
    source
        The origin of its rows: ``history`` if all of them come from earlier prompts, else the
        origin of the others.
    """

    text: str
    start: int
    end: int
    reused: int
    recomputed: int
    source: Source = "entry"


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """The prompt's tokens by the origin of their rows.

    Attributes
    ----------
    origins
        The origin of each token at the first token of the answer, one byte per token: 0 sink, 1
        reused, 2 recomputed, 3 fresh, 4 exact history, 5 repaired history, 6 version. The
        properties are counted from it.
    exact
        Leading tokens whose cached rows equal a full prefill's, up to a codec's rounding: the sink,
        the chunk directly behind it, exact history. They are recomputed only at a ratio of 1.
    ahead
        Chunk tokens recomputed during decoding; not counted in ``recomputed``.
    handed_over
        Leading tokens whose rows were written for vLLM.
    """

    origins: bytes = b""
    exact: int = 0
    ahead: int = 0
    handed_over: int = 0

    @property
    def sink(self) -> int:
        """Tokens of the shared sink."""
        return self.origins.count(0)

    @property
    def reused(self) -> int:
        """Chunk tokens whose rows come from the chunks' entries."""
        return self.origins.count(1)

    @property
    def recomputed(self) -> int:
        """Chunk tokens that were cached and recomputed."""
        return self.origins.count(2)

    @property
    def fresh(self) -> int:
        """Tokens that were not cached: the query, text between chunks, missed chunks."""
        return self.origins.count(3)

    @property
    def history_exact(self) -> int:
        """Tokens behind the sink with rows of earlier prompts that equal a full prefill's."""
        return self.origins.count(4)

    @property
    def history_repaired(self) -> int:
        """Tokens with rows of earlier prompts that were computed over a partly stale context."""
        return self.origins.count(5)

    @property
    def version(self) -> int:
        """Chunk tokens whose rows come from versions of the chunks."""
        return self.origins.count(6)

    @property
    def prompt(self) -> int:
        """Tokens of the whole prompt."""
        return len(self.origins)

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
        Decoding steps after the first token.
    drafted, accepted
        Tokens that prompt lookup proposed, and those that became part of the answer.
    blocks, blocks_read
        With sparse decoding: blocks of the context, and blocks that were read, summed over all
        layers and steps.
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
        """Milliseconds per token after the first; 0 without one."""
        return 1e3 * self.seconds / max(1, self.tokens - 1)

    @property
    def tokens_per_step(self) -> float:
        """Tokens per step, without the first token; 0 without a step."""
        return max(0, self.tokens - 1) / max(1, self.steps)


@dataclass(frozen=True, slots=True)
class ReuseReport:
    """The origin of every prompt token, and the time of every step.

    Attributes
    ----------
    method
        The name of the method that chose the tokens to recompute.
    recompute_ratio
        The requested share of the cached chunks' tokens to recompute, or ``"auto"``.
    ttft_s
        Seconds from the call to the first token's logits or text.
    tokens
        The prompt's tokens by origin.
    decode
        The answer's tokens and steps; all 0 without an answer.
    steps
        Seconds by step: wait, find, load, splice, select, recompute, first_token.
    chunks
        The chunks with rows in the prompt, in its order.
    misses
        Chunks that were not reused, or only in part, with reasons: the prompt's and the retrieved
        ones.
    warnings
        Problems with a remedy, such as a prompt whose head is not the sink. Each kind is logged
        once.
    dtype
        The arithmetic, such as ``float32``, or ``float32, quantised products`` of a GGUF.
    choice
        With ``"auto"``: the chosen ratio, and why.
    not_loaded
        Why vLLM computed the prompt itself, such as ``expired``; empty if it loaded the rows.
    trace
        The prompt's text and scores, for its :func:`~ragkv.report.page.page.page`; not in
        :meth:`to_dict`, and ignored by equality.
    """

    method: str
    recompute_ratio: float | str
    ttft_s: float
    tokens: PromptTokens = PromptTokens()
    decode: Decoding = Decoding()
    steps: dict[str, float] = field(default_factory=dict)
    chunks: tuple[ChunkUse, ...] = ()
    misses: tuple[Miss, ...] = ()
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

    @property
    def effective_ratio(self) -> float:
        """The share of the cached chunks' tokens that this prompt recomputed, 0 to 1."""
        recomputed = sum(use.recomputed for use in self.chunks)
        return recomputed / max(1, recomputed + sum(use.reused for use in self.chunks))

    @property
    def positions(self) -> bytes:
        """The origin of each prompt token: ``tokens.origins``."""
        return self.tokens.origins

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the whole prompt: ``tokens.prompt``."""
        return self.tokens.prompt

    @property
    def reused_tokens(self) -> int:
        """Chunk tokens whose rows come from the chunks' entries: ``tokens.reused``."""
        return self.tokens.reused

    @property
    def conversation_tokens(self) -> int:
        """Tokens with rows from earlier prompts: ``tokens.history``."""
        return self.tokens.history

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON-ready types, counts included; ``positions`` becomes digits."""
        out = asdict(replace(self, trace=None))
        del out["trace"]
        tokens = _with_properties(self.tokens)
        del tokens["origins"]
        return out | {
            "effective_ratio": self.effective_ratio,
            "tokens": tokens,
            "decode": _with_properties(self.decode),
            "total_s": self.total_s,
            "positions": "".join(map(str, self.positions)),
            "misses": tuple({**asdict(miss), "mend": miss.mend} for miss in self.misses),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the report that :meth:`to_dict` wrote, without its trace.

        Unknown fields are ignored.

        Raises
        ------
        ConfigError
            The dictionary is not such a report.
        """
        try:
            origins = bytes(map(int, data["positions"]))
            return cls(
                **_known(cls, data)
                | {
                    "tokens": PromptTokens(origins, **_known(PromptTokens, data["tokens"])),
                    "decode": Decoding(**_known(Decoding, data["decode"])),
                    "chunks": tuple(ChunkUse(**_known(ChunkUse, use)) for use in data["chunks"]),
                    "misses": tuple(Miss(**_known(Miss, miss)) for miss in data["misses"]),
                    "warnings": tuple(data["warnings"]),
                }
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"not a report by ReuseReport.to_dict(): {error!r}") from error


@dataclass(frozen=True, slots=True)
class PrecomputeReport:
    """What one precomputation did.

    Attributes
    ----------
    new, existing
        Chunks encoded now, and chunks already in the store.
    skipped
        Chunks too short for an entry; prompts compute them.
    tokens, bytes
        Tokens encoded and bytes written by this call.
    seconds
        Wall time of the call.
    removed
        Deleted chunks of the document's previous revision, which no document contains now.
    too_long
        Chunks longer than the model's positions: not encoded.
    unknown_token
        Chunks with a token without an embedding in the model: not encoded.
    versions
        Chunks that were also computed behind their neighbours, by ``neighbours=True``.
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
    versions: int = 0

    def __add__(self, other: Self) -> Self:
        """Return the sum of two reports."""
        parts = asdict(self), asdict(other)
        return type(self)(**{name: parts[0][name] + parts[1][name] for name in parts[0]})

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON-ready types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the report that :meth:`to_dict` wrote; unknown fields are ignored."""
        return cls(**_known(cls, data))


def _with_properties(part: PromptTokens | Decoding) -> dict[str, Any]:
    """Return the fields and the properties derived from them."""
    derived = [name for name, each in vars(type(part)).items() if isinstance(each, property)]
    return asdict(part) | {name: getattr(part, name) for name in derived}


def _known(kind: type[Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that are fields of a dataclass."""
    names = {each.name for each in fields(kind)} - {"trace"}
    return {name: value for name, value in data.items() if name in names}
