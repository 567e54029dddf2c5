"""What a peer is, and how it is compared."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from ragkv_bench.speed.result import PeerRow
from ragkv_bench.speed.ttft import Measured, Setting, middle


class Peer(Protocol):
    """An engine that is running."""

    name: str

    def answer(self, ids: Sequence[int], tokens: int) -> tuple[float, float]:
        """Draw so many tokens after a prompt's token ids, greedily, past any end of text.

        Returns
        -------
        tuple
            Seconds from the request to the first token, and to the last one.

        Raises
        ------
        PeerError
            The engine gave fewer tokens.
        """
        ...


Opening = Callable[[], AbstractContextManager[Peer]]
"""Makes a peer that runs inside a ``with`` block."""


def reference(settings: Sequence[Setting]) -> Setting:
    """Return the setting that peers are compared with: first method and tier, highest ratio."""
    first = settings[0]
    same = [each for each in settings if (each.method, each.tier) == (first.method, first.tier)]
    return max(same, key=lambda each: each.ratio)


def compare(
    opening: AbstractContextManager[Peer], measured: Sequence[Measured], against: Setting
) -> list[PeerRow]:
    """Give a peer the prompts that ragkv had, in the same order, and close it.

    The first prompt of each length warms it up and is not counted.
    """
    found = []
    with opening as peer:
        for one in measured:
            warm, *prompts = one.trace.ids
            peer.answer(warm, 1)
            seconds = [peer.answer(ids, 1)[0] for ids in prompts]
            own = [sample.ragkv_s for sample in one.samples[against]]
            speedup, quartiles = middle([a / b for a, b in zip(seconds, own, strict=True)])
            found.append(
                PeerRow(
                    peer.name,
                    one.trace.tokens,
                    statistics.median(seconds),
                    speedup,
                    quartiles,
                    str(against),
                )
            )
    return found
