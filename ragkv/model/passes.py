"""How passes get the model: a room that computes knows no queue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

Done = TypeVar("Done")


class Passes(Protocol):
    """Runs passes of one model while no other thread uses it."""

    def run(self, compute: Callable[[], Done]) -> tuple[Done, float]:
        """Return the result of passes, and their seconds without those of waiting for requests.

        Decoding steps of answers and other prompts run before and between the layers.
        """
