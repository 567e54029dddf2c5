"""A retrieval that is followed: each of its lists is speculated on while the next is searched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

Found = TypeVar("Found")


class Cancellable(Protocol):
    """Work that may turn out to be in vain."""

    def cancel(self) -> None:
        """End it."""
        ...


Guess = TypeVar("Guess", bound=Cancellable)


class Following(Generic[Found, Guess]):
    """Goes through a retrieval's lists.

    Parameters
    ----------
    stages
        The lists, the last of which is the retrieval's result.
    speculate
        Begins work on a list, in place of that on the list before.
    """

    def __init__(
        self,
        stages: Iterable[Sequence[Found]],
        speculate: Callable[[Sequence[Found], Guess | None], Guess],
    ) -> None:
        self.last: list[Found] = []
        self._stages, self._speculate = iter(stages), speculate
        self._guess: Guess | None = None
        self._cancelled = False

    def step(self) -> bool:
        """Wait for the next list and speculate on it; return whether there was one.

        An error ends the work on the list before, too.
        """
        try:
            found = next(self._stages, None)
            if found is None:
                return False
            self.last = list(found)
            self._guess = self._speculate(self.last, self._guess)
        except BaseException:
            self.cancel()
            raise
        if self._cancelled:
            self.cancel()
        return True

    def cancel(self) -> None:
        """End the work, now or when the step that another thread is in has ended."""
        self._cancelled = True
        if self._guess is not None:
            self._guess.cancel()
