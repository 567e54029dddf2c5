"""One prompt on its way, from its tokens to its account."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ragkv.attend.sparse import SparseRows
from ragkv.chunk.kv import LayeredKV
from ragkv.config import ReuseConfig
from ragkv.model.load import LoadedModel
from ragkv.prompt.tokens import IntArray
from ragkv.recompute.copy_repair import Ahead
from ragkv.recompute.drift import Drift
from ragkv.report.account import ChunkUse, Miss, ReuseReport
from ragkv.report.clock import Clock
from ragkv.report.trace import Trace
from ragkv.select import Method, method_of
from ragkv.select.choose import Choice
from ragkv.splice.buffer import SplicedCache
from ragkv.splice.layout import Layout, Origin


@dataclass(slots=True, eq=False)
class Prepared:
    """A prompt on its way. ``cache`` and ``layout`` are None where it is prefilled in full.

    ``found`` counts the known chunks in it, None where nobody looked.
    """

    text: str
    ids: IntArray
    offsets: IntArray
    layout: Layout | None = None
    cache: SplicedCache | None = None
    choice: Choice = Choice(np.zeros(0, np.int64))  # noqa: RUF009  frozen
    drift: Drift | None = None
    sparse: SparseRows | None = None
    ahead: Ahead | None = None
    misses: list[Miss] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    found: int | None = None

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """Positions to compute, sorted: the chosen and the fresh, the prompt's last included."""
        fresh = self.layout.fresh if self.layout is not None else np.arange(len(self.ids))
        return np.union1d(fresh, self.choice.positions)

    @property
    def origin(self) -> npt.NDArray[np.uint8]:
        """``[tokens]`` an :class:`Origin` each, after the choice."""
        if self.layout is None:
            return np.full(len(self.ids), Origin.FRESH, dtype=np.uint8)
        origin = self.layout.origin.copy()
        origin[self.choice.positions] = Origin.RECOMPUTED
        return origin

    def plan(
        self, layout: Layout, method: Method, loaded: LoadedModel, *, ahead: bool = True
    ) -> None:
        """Prepare what the method does besides computing rows in one pass."""
        rows = self.rows
        if not (self.origin == Origin.CACHED).any():  # all is computed
            return
        if method.drift:
            self.drift = Drift(layout, rows, loaded)
        if method.sparse is not None and loaded.device.type == "cpu":
            self.sparse = SparseRows(layout, rows, method.sparse, loaded)
        if ahead and method.lookup is not None and self.choice.scores is not None:
            self.ahead = Ahead(layout, rows, self.choice.scores, method.lookup)

    def miss(self, text: str, reason: str) -> None:
        """Count a chunk that cannot, or should not, be used."""
        self.misses.append(Miss(text[:80], reason))
        if reason == "slower":
            self.late.append(text)
        elif reason != "expired":  # only precompute() renews it
            self.missed.append(text)

    def miss_unaligned(self, layout: Layout, found: Sequence[tuple[LayeredKV, int, int]]) -> None:
        """Count chunks of which no token is the prompt's; to encode them again would not help."""
        used = {id(piece.entry) for piece in layout.placed}
        in_sink = self.offsets[: layout.sink, 1].max(initial=0)
        self.misses += [
            Miss(entry.text[:80], "unaligned")
            for entry, _, end in found
            if id(entry) not in used and end > in_sink
        ]

    def report(
        self, config: ReuseConfig, clock: Clock, first_token_at: float, completion_tokens: int = 0
    ) -> ReuseReport:
        """Account for every token and for every second up to the first token."""
        origin = self.origin
        sink, reused, recomputed, fresh = np.bincount(origin, minlength=4).tolist()
        ttft = first_token_at - clock.started
        rest = ttft - sum(clock.steps.values())
        method = method_of(config)
        return ReuseReport(
            method=method.name,
            prompt_tokens=len(self.ids),
            sink_tokens=sink,
            reused_tokens=reused,
            recomputed_tokens=recomputed,
            fresh_tokens=fresh,
            recompute_ratio=config.recompute_ratio,
            effective_ratio=recomputed / max(1, reused + recomputed),
            choice=self.choice.reason,
            ttft_s=ttft,
            steps={**clock.steps, "first_token": rest},
            chunks=self._uses(origin),
            misses=tuple(self.misses),
            positions=origin.tobytes(),
            warnings=tuple(self.warnings),
            completion_tokens=completion_tokens,
            ahead_tokens=0 if self.ahead is None else self.ahead.repaired,
            trace=Trace(self.text, self.offsets, self._scores(), attention=method.mass),
        )

    def _scores(self) -> npt.NDArray[np.float32]:
        """``[tokens]``: what the cached tokens were ranked by, NaN elsewhere."""
        scores = np.full(len(self.ids), np.nan, dtype=np.float32)
        if self.layout is not None and self.choice.scores is not None:
            scores[self.layout.cached] = self.choice.scores
        return scores

    def _uses(self, origin: npt.NDArray[np.uint8]) -> tuple[ChunkUse, ...]:
        placed = self.layout.placed if self.layout is not None else ()
        return tuple(
            ChunkUse(
                piece.entry.text,
                piece.start,
                piece.end,
                reused=int((origin[piece.slots] == Origin.CACHED).sum()),
                recomputed=int((origin[piece.slots] == Origin.RECOMPUTED).sum()),
            )
            for piece in placed
        )
