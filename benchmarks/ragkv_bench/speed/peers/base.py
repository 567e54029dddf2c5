"""The interface of a peer, and of its requests."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from ragkv_bench.results import Found
from ragkv_bench.speed.timing import AnswerTime


class Peer(Protocol):
    """An engine that is running.

    Attributes
    ----------
    build
        The processor instructions of its build; empty if unknown.
    """

    name: str
    build: str

    def answer(self, ids: Sequence[int], tokens: int) -> tuple[float, float]:
        """Draw so many tokens after a prompt's token ids, greedily, past any end of text.

        Returns the seconds from the request to the first token, and to the last one; raises
        PeerError where none came.
        """
        ...


Startable = AbstractContextManager[Peer]
"""A peer that runs inside a ``with`` block."""


def ask(peer: Peer, prompts: Sequence[Sequence[int]], tokens: int) -> list[AnswerTime]:
    """Ask a peer all prompts; the first warms it up and is not counted."""
    return [AnswerTime(*peer.answer(ids, tokens)) for ids in prompts][1:]


def builds_of(rows: Sequence[Found]) -> str:
    """Return a caption's lines with the processor instructions of the peers' builds."""
    builds = {row["name"]: row["build"] for row in rows if row["build"]}
    return "".join(f"\n{name}: {build}" for name, build in builds.items())
