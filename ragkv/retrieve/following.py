"""Retrievals in stages: each list of hits is speculated on while the next one is searched."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

Found = TypeVar("Found")


class Cancellable(Protocol):
    """Work that may turn out to be in vain."""

    def cancel(self) -> None:
        """End it."""
        ...


class Speculator(Protocol):
    """A :class:`ragkv.RagKV`."""

    @property
    def speculate(self) -> Callable[..., Cancellable]:
        """Begins to compute a prompt."""
        ...


def follow(
    kv: Speculator,
    stages: Iterable[Sequence[Found]],
    prompt_of: Callable[[Sequence[Found]], object],
    **overrides: Any,
) -> list[Found]:
    """Return a retrieval's result, and speculate on what it has found while it goes on.

    Parameters
    ----------
    kv
        The :class:`ragkv.RagKV` that will answer.
    stages
        Lists of what was found so far, the last of which is the result: a
        :class:`ragkv.retrieve.staged.StagedSearch`, or a generator of your own, such as one that
        yields the first hits and then, reranked, the final ones.
    prompt_of
        Returns the prompt that will be asked with them.
    **overrides
        Fields of ReuseConfig, those of the call to come.
    """
    following = _Following(kv, stages, prompt_of, overrides)
    while following.step():
        pass
    return following.last


async def afollow(
    kv: Speculator,
    stages: Iterable[Sequence[Found]],
    prompt_of: Callable[[Sequence[Found]], object],
    **overrides: Any,
) -> list[Found]:
    """Do the same in a thread; a cancelled task ends the speculation, too."""
    following = _Following(kv, stages, prompt_of, overrides)
    try:
        while await asyncio.to_thread(following.step):
            pass
    except BaseException:
        following.cancel()
        raise
    return following.last


class _Following(Generic[Found]):
    def __init__(
        self,
        kv: Speculator,
        stages: Iterable[Sequence[Found]],
        prompt_of: Callable[[Sequence[Found]], object],
        overrides: dict[str, Any],
    ) -> None:
        self.last: list[Found] = []
        self._stages, self._prompt_of, self._overrides = iter(stages), prompt_of, overrides
        self._speculate = kv.speculate
        self._guess: Cancellable | None = None
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
            prompt = self._prompt_of(self.last)
            self._guess = self._speculate(prompt, instead_of=self._guess, **self._overrides)
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
