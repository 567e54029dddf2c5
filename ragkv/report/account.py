"""What happened: one account per answer and one per precomputation."""

from __future__ import annotations

from collections import Counter
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
class ReuseReport:
    """Where every prompt token came from and what each step cost.

    ``prompt_tokens = sink_tokens + former_exact_tokens + former_repaired_tokens + reused_tokens +
    version_tokens + recomputed_tokens + fresh_tokens``.

    Attributes
    ----------
    sink_tokens
        Tokens whose KV is the shared sink's.
    former_exact_tokens, former_repaired_tokens
        Tokens behind the sink whose KV former prompts that begin with the same tokens, or their
        answers, computed: as a full prefill does, or over a partly stale context.
    reused_tokens
        Chunk tokens whose cached KV, from their entries, was kept.
    version_tokens
        The same, from versions of the chunks.
    recomputed_tokens
        Chunk tokens that were cached and computed again.
    fresh_tokens
        Tokens that were not cached: query, text between chunks, misses.
    recompute_ratio, effective_ratio
        The requested share (or ``"auto"``), and the share of the placed chunks' tokens that was
        computed by this prompt.
    choice
        What ``"auto"`` saw and chose.
    ttft_s
        Seconds from the call to the first token's logits or text, everything inside.
    steps
        Seconds by step: wait, find, load, splice, select, recompute, first_token.
    completion_tokens
        Tokens of the answer, its end included.
    decode_s, ms_per_token
        Seconds from the first token to the last one, and milliseconds for each token after the
        first; 0 for an answer of one token.
    tokens_per_step
        Tokens after the first over the model's calls that drew them.
    drafted_tokens, accepted_tokens
        Tokens that prompt lookup proposed, and those that the answer took.
    blocks, blocks_read
        Blocks of the context that decoding steps with sparse attention could read, and those that
        they read, over all layers and steps.
    dtype
        What was computed in, such as ``float32``, or ``float32, quantised products`` of a GGUF.
    ahead_tokens
        Chunk tokens recomputed during decoding; they are not among ``recomputed_tokens``.
    exact_tokens
        First tokens of the prompt whose cached rows are a full prefill's, but for what a codec
        rounds: the sink, the chunk right behind it, former prompts' exact rows. None of them is
        recomputed below a ratio of 1.
    handed_over_tokens, not_loaded
        First tokens whose KV vLLM was given; why it computed them itself, such as ``expired``.
    positions
        Per prompt token, when the first token came: 0 sink, 1 reused, 2 recomputed, 3 fresh, 4
        exact and 5 repaired by former prompts, 6 version (bytes of length ``prompt_tokens``).
    warnings
        What the user can mend, such as a prompt whose head is not the sink; logged once a kind.
    misses
        Chunks not reused, or not whole, with reasons: the prompt's, and those a retriever named.
    trace
        The prompt's text and scores, for its :func:`~ragkv.report.page.page.page`; not in
        :meth:`to_dict`, and without a part in equality.
    """

    method: str
    prompt_tokens: int
    sink_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    fresh_tokens: int
    recompute_ratio: float | str
    effective_ratio: float
    ttft_s: float
    steps: dict[str, float] = field(default_factory=dict)
    chunks: tuple[ChunkUse, ...] = ()
    misses: tuple[Miss, ...] = ()
    positions: bytes = b""
    warnings: tuple[str, ...] = ()
    completion_tokens: int = 0
    decode_s: float = 0.0
    ms_per_token: float = 0.0
    tokens_per_step: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    blocks: int = 0
    blocks_read: int = 0
    dtype: str = ""
    ahead_tokens: int = 0
    choice: str = ""
    former_exact_tokens: int = 0
    former_repaired_tokens: int = 0
    version_tokens: int = 0
    exact_tokens: int = 0
    handed_over_tokens: int = 0
    not_loaded: str = ""
    trace: Trace | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        """Return a summary of at most ten lines."""
        return summary(self)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed, by whatever kind of reuse."""
        return self.sink_tokens + self.history_tokens + self.reused_tokens

    @property
    def history_tokens(self) -> int:
        """Prompt tokens whose rows earlier prompts left; none with ``history=False``."""
        return self.former_exact_tokens + self.former_repaired_tokens + self.version_tokens

    @property
    def hits(self) -> dict[Source, int]:
        """Number of chunks by the source of their rows."""
        return dict(Counter(use.source for use in self.chunks))

    @property
    def total_s(self) -> float:
        """Seconds from the call to the last token."""
        return self.ttft_s + self.decode_s

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON-ready types; ``positions`` becomes a string of digits."""
        out = asdict(replace(self, trace=None))
        del out["trace"]
        out["total_s"] = self.total_s
        out["history_tokens"] = self.history_tokens
        out["positions"] = "".join(map(str, self.positions))
        out["misses"] = tuple({**asdict(miss), "mend": miss.mend} for miss in self.misses)
        return out

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
                    "chunks": tuple(ChunkUse(**_known(ChunkUse, use)) for use in data["chunks"]),
                    "misses": tuple(Miss(**_known(Miss, miss)) for miss in data["misses"]),
                    "positions": bytes(map(int, data["positions"])),
                    "warnings": tuple(data["warnings"]),
                }
            )
        except (KeyError, TypeError, ValueError) as error:
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


def _known(kind: type[Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that are fields of a dataclass."""
    names = {each.name for each in fields(kind)} - {"trace"}
    return {name: value for name, value in data.items() if name in names}
