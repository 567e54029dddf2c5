"""The account of a prompt: its misses and warnings."""

from __future__ import annotations

from ragkv.engine.plan import Account, Plan
from ragkv.engine.request import Request
from ragkv.explain import Facts, Lookup, explain, unsupported
from ragkv.explain.earlier_answers import answer_warnings
from ragkv.explain.miss_log import MissLog
from ragkv.explain.misses import DAMAGED
from ragkv.ingest.corpus import Corpus
from ragkv.prompt.chat import Chat
from ragkv.retrieve.named import Retrieved


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
    located, former = plan.located, plan.located.former
    known = 0 if former is None or not len(former.positions) else int(former.positions[-1]) + 1
    reused = {entry.text for entry, _, _ in located.entries}
    return answer_warnings(request.prompt, located.text, located.tokens.characters(known), reused)
