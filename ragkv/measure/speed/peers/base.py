"""What a peer is, and how it is compared."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from ragkv.measure.speed.result import PeerRow
from ragkv.measure.speed.ttft import Measured, Setting, middle


class Peer(Protocol):
    """An engine that is running."""

    name: str

    def first_token_s(self, ids: Sequence[int]) -> float:
        """Return the seconds from the request to the first token, for a prompt's token ids.

        Raises
        ------
        PeerError
            The engine gave no token.
        """
        ...


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
            peer.first_token_s(warm)
            seconds = [peer.first_token_s(ids) for ids in prompts]
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
