"""The account of a prompt: its report, with misses and warnings."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ragkv.chunk.kv import KnownChunk
from ragkv.decode.generate import Drawn
from ragkv.engine.plan import Plan, Request
from ragkv.explain import Facts, Lookup, explain, unsupported
from ragkv.explain.misses import DAMAGED
from ragkv.explain.warnings import MissLog, answer_warnings
from ragkv.ingest.corpus import Corpus
from ragkv.prompt.chat import Chat
from ragkv.report.account import ChunkUse, Decoding, Miss, PromptTokens, ReuseReport, Source
from ragkv.report.trace import Trace
from ragkv.retrieve.named import Retrieved
from ragkv.splice.layout import Origin
from ragkv.store.version import PlacedVersion

Account = tuple[tuple[Miss, ...], tuple[str, ...]]
"""The chunks that were not reused, and the warnings on them."""

_SOURCES: dict[type, Source] = {PlacedVersion: "version", KnownChunk: "history"}


def report_of(
    request: Request,
    plan: Plan,
    first_token_at: float,
    *,
    dtype: str,
    drawn: Drawn | None = None,
    account: Account = ((), ()),
) -> ReuseReport:
    """Account for every token and every second, up to the first token or to ``drawn``'s last.

    Parameters
    ----------
    account
        The chunks that were not reused, and the warnings.
    """
    origin = _with_versions(plan)
    steps = request.clock.steps
    ttft = first_token_at - request.clock.started
    copies = plan.repair.copies
    return ReuseReport(
        method=request.method.name,
        recompute_ratio=request.config.recompute_ratio,
        ttft_s=ttft,
        tokens=PromptTokens(
            origins=origin.tobytes(),
            exact=_exact_tokens(plan),
            ahead=0 if copies is None else copies.repaired,
            handed_over=0 if request.remote is None else request.remote.handed_over,
        ),
        decode=Decoding() if drawn is None else _decoding(drawn),
        steps={**steps, "first_token": ttft - sum(steps.values())},
        chunks=_uses(plan, origin),
        misses=account[0],
        warnings=(*plan.warnings, *account[1]),
        dtype=dtype,
        choice=plan.choice.reason,
        not_loaded="" if request.remote is None else request.remote.not_loaded,
        trace=Trace(
            plan.located.text,
            plan.located.tokens.offsets,
            _scores(plan),
            attention=request.method.auto == "attention",
        ),
    )


def _with_versions(plan: Plan) -> npt.NDArray[np.uint8]:
    """Return the plan's origins, with a separate one for rows of versions."""
    origin = plan.origin
    for piece in plan.layout.placed:
        if isinstance(piece.entry, PlacedVersion):
            origin[piece.slots[origin[piece.slots] == Origin.CACHED]] = Origin.VERSION
    return origin


def _exact_tokens(plan: Plan) -> int:
    if plan.cache is None:
        return 0
    layout = plan.layout
    return max(layout.exact, 0 if layout.history is None else layout.history.exact)


def _decoding(drawn: Drawn) -> Decoding:
    return Decoding(
        tokens=len(drawn.token_ids),
        seconds=drawn.last_token_at - drawn.first_token_at,
        steps=drawn.steps,
        drafted=drawn.drafted,
        accepted=drawn.accepted,
        blocks=drawn.blocks,
        blocks_read=drawn.blocks_read,
    )


def _scores(plan: Plan) -> npt.NDArray[np.float32]:
    """``[tokens]``: the ranking of the cached tokens, NaN elsewhere."""
    scores = np.full(len(plan.ids), np.nan, dtype=np.float32)
    if plan.choice.scores is not None:
        scores[plan.layout.cached] = plan.choice.scores
    return scores


def _uses(plan: Plan, origin: npt.NDArray[np.uint8]) -> tuple[ChunkUse, ...]:
    """Return the chunks with rows in the prompt, in its order."""
    uses = []
    for piece in plan.layout.placed:
        source = _SOURCES.get(type(piece.entry), "entry")
        counts = np.bincount(origin[piece.start : piece.end], minlength=len(Origin))
        recomputed, fresh = int(counts[Origin.RECOMPUTED]), int(counts[Origin.FRESH])
        reused = piece.end - piece.start - recomputed - fresh
        text = piece.entry.text
        uses.append(ChunkUse(text, piece.start, piece.end, reused, recomputed, source))
    return tuple(uses)


def account_of(
    request: Request, plan: Plan, corpus: Corpus, log: MissLog, *, stores: bool
) -> Account:
    """Return a prompt's misses and warnings.

    Parameters
    ----------
    log
        The engine's log, which receives one line.
    stores
        Whether missed chunks are encoded after the answer.
    """
    located, not_stored = plan.located, corpus.not_stored
    for text, reason in located.missed:
        if reason in DAMAGED:  # the store has deleted the entry
            not_stored.note([text], reason)
    facts = Facts(
        text=located.text,
        tokens=located.tokens,
        origin=plan.origin,
        spans=located.known,
        missed=(*located.missed, *plan.missed),
        uses_chunks=request.method.uses_chunks,
        stores_missed=stores,
    )
    lookup = Lookup(
        is_known=corpus.has,
        reason_of=not_stored.reason_of,
        differences=lambda text: (
            "" if located.sink is None else not_stored.differences(text, located.sink.fingerprint)
        ),
    )
    named = named_for(request)
    misses = explain(facts, named, lookup)
    warnings = (*log.add(named.new, misses), *_answer_warnings(request, plan))
    return tuple(misses), warnings


def unsupported_account(request: Request, *_: object) -> Account:
    """Return the account of a prompt for a model whose caches cannot be reused."""
    return tuple(unsupported(named_for(request).new)), ()


def named_for(request: Request) -> Retrieved:
    """Return the chunks that were named with a request, and before it."""
    new = dict.fromkeys((*request.retrieved, *request.named.new))
    return Retrieved(tuple(new), request.named.earlier)


def _answer_warnings(request: Request, plan: Plan) -> tuple[str, ...]:
    if not isinstance(request.prompt, Chat) or not request.uses_history:
        return ()
    located, history = plan.located, plan.located.history
    known = 0 if history is None or not len(history.positions) else int(history.positions[-1]) + 1
    reused = {entry.text for entry, _, _ in located.entries}
    return answer_warnings(request.prompt, located.text, located.tokens.characters(known), reused)
