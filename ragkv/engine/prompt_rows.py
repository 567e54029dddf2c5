"""The rows that a prompt takes from history and from versions, and the rows that it leaves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ragkv.chunk.kv import KnownChunk
from ragkv.config import ReuseConfig
from ragkv.decode.generate import Drawn
from ragkv.engine.plan import Located, LocatedEntry, Plan, Request
from ragkv.history.history import History, rows_of
from ragkv.history.node import ABSENT, EXACT, Freshness, PrefixMatch
from ragkv.history.tree import ComputedPrompt
from ragkv.history.versions import Versions
from ragkv.select.choose import FLOOR
from ragkv.splice.buffer import SplicedCache
from ragkv.splice.layout import Origin


def found_rows(request: Request, located: Located, history: History) -> PrefixMatch | None:
    """Return the rows of earlier prompts for this one; None unless more than its sink's.

    Exact rows serve every prompt; approximate ones a prompt whose ratio is not above their own.
    """
    sink, tokens = located.sink, located.tokens
    if sink is None or not _is_used(request, history):
        return None
    spans = located.known or ()
    end_of_chunks = np.searchsorted(tokens.offsets[:, 0], spans[-1].end if spans else 0)
    found = history.find(
        tokens.ids, sink.fingerprint, _least(request.config), exact_to=int(end_of_chunks)
    )
    if not len(found.positions) or found.positions[-1] < len(sink.ids):
        return None
    return found


def _least(config: ReuseConfig) -> float:
    """Return the least freshness of rows that a prompt with these settings takes."""
    if config.recompute_ratio == "auto":
        return FLOOR
    return EXACT if config.recompute_ratio == 1 else config.recompute_ratio


def with_rows(
    request: Request, located: Located, history: History, versions: Versions | None
) -> Located:
    """Return the prompt with rows of earlier prompts, those of stored versions included."""
    located = replace(located, history=found_rows(request, located, history))
    if versions is None or not _restore_versions(request, located, history, versions):
        return located
    return replace(located, history=found_rows(request, located, history))


def _restore_versions(
    request: Request, located: Located, history: History, versions: Versions
) -> bool:
    """Restore stored rows of exactly this prompt's tokens; return whether there were any."""
    sink, tokens = located.sink, located.tokens
    if sink is None or not _is_used(request, history) or history.is_beyond(len(tokens)):
        return False
    begun, found = request.clock.started, False
    for span in located.known or ():
        if not located.has_rows(span):
            own = tokens.inside(span.start, span.end)
            path = tokens.ids[: own.stop]
            found |= versions.restore(span.text, path, own.start, sink.fingerprint, begun)
    return found


def with_versions(
    request: Request, located: Located, history: History, versions: Versions
) -> Located:
    """Replace entries behind other chunks by their versions of lowest cache fix overhead."""
    sink = located.sink
    if sink is None or not _is_used(request, history):
        return located
    begin = located.tokens.characters(len(sink.ids))
    known = [span for span in located.known or () if span.start >= begin]
    entries: list[LocatedEntry] = []
    for entry, start, end in located.entries:
        before = list(dict.fromkeys(span.text for span in known if span.end <= start))
        version = None
        if before and not isinstance(entry, KnownChunk):
            version = versions.take(entry.text, before, sink.fingerprint)
        entries.append((version or entry, start, end))
    return replace(located, entries=tuple(entries))


def _is_used(request: Request, history: History) -> bool:
    return request.uses_history and history.keeps


def left_rows(
    request: Request,
    plan: Plan,
    cache: SplicedCache,
    history: History,
    drawn: Drawn | None = None,
    *,
    lossless: bool,
) -> ComputedPrompt | None:
    """Return the rows of a prompt and its answer for later prompts; None for no history.

    The answer's last token has no row, and rows of steps with sparse attention are left out.

    Parameters
    ----------
    drawn
        None: the rows up to the end of the prompt's chunks, which another process decodes from.
    lossless
        Whether entries' rows are those that were encoded.
    """
    sink = plan.located.sink
    if sink is None or not _is_used(request, history):
        return None
    answer: list[int] = []
    if drawn is not None and drawn.blocks_read == drawn.blocks:
        answer = drawn.token_ids[:-1]
    ids = np.concatenate([plan.ids, np.asarray(answer, dtype=plan.ids.dtype)])
    computed = ComputedPrompt(
        ids,
        _freshness(plan, len(ids), lossless=lossless),
        (cache.keys, cache.values),
        rows_of(sink.fingerprint),
        root=history.is_beyond(len(plan.ids)),
        prompt=len(plan.ids),
    )
    return computed if drawn is not None else computed.up_to(plan.layout.known_end)


def _freshness(plan: Plan, tokens: int, *, lossless: bool) -> Freshness:
    """Return the freshness of a prompt's rows and its answer's, ``[tokens]``.

    Computed rows are exact up to the first position whose row is not. Codecs other than raw lose
    something, even of the first chunk. Rows with sparse attention are not exact.
    """
    layout, origin, repair = plan.layout, plan.origin, plan.repair
    computed = np.isin(origin, (Origin.RECOMPUTED, Origin.FRESH))
    exact = np.isin(origin, (Origin.SINK, Origin.EXACT))
    if lossless:
        exact[: layout.exact] |= origin[: layout.exact] == Origin.CACHED
    others = ~(exact | computed)
    if repair.sparse is not None:
        others[plan.choice.positions] = True
    first = int(np.argmax(others)) if others.any() else tokens
    out = np.full(tokens, plan.choice.ratio, np.float32)
    out[: len(origin)][~computed] = ABSENT
    if layout.history is not None:
        out[layout.history.positions] = layout.history.freshness
    if repair.copies is not None:
        out[repair.copies.taken] = plan.choice.ratio
    out[: len(origin)][exact] = EXACT
    out[:first] = EXACT
    return out
