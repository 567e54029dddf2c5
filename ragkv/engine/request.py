"""One call: its prompt, settings and clock, and the interface of a remote decoder."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from ragkv.config import DecodeConfig, ReuseConfig
from ragkv.decode.generate import Drawn
from ragkv.decode.listener import Listener
from ragkv.errors import ConfigError
from ragkv.history.node import Rows
from ragkv.model.fingerprint import Fingerprint
from ragkv.model.loaded import LoadedModel
from ragkv.prompt.render import Prompt
from ragkv.prompt.tokens import IntArray
from ragkv.retrieve.named import Retrieved
from ragkv.select import Method


class Clock:
    """Seconds by step. Construction, at the user's call, starts it."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.steps: dict[str, float] = {}
        self._within = 0.0

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Add the block's wall time to the step, without nested steps."""
        outer, self._within = self._within, 0.0
        before = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - before
            self.steps[name] = self.steps.get(name, 0.0) + took - self._within
            self._within = outer + took


class RemoteAnswer(Protocol):
    """An answer that another process decodes.

    Its methods raise ServerError if the process cannot be reached, or has a different model.

    Attributes
    ----------
    handed_over, not_loaded
        The report's fields of these names, final when :meth:`draw` returns.
    """

    handed_over: int
    not_loaded: str

    def hand_over(self, ids: IntArray, compute: Callable[[], Rows]) -> bool:
        """Transfer the rows of the prompt's first tokens; False if they were not computed."""
        ...

    def draw(self, ids: IntArray, listener: Listener, cancelled: Callable[[], bool]) -> Drawn:
        """Answer a prompt, as :func:`ragkv.decode.generate.draw` does."""
        ...


class RemoteDecoder(Protocol):
    """The program that decodes in that process, such as a vLLM."""

    def __call__(self, loaded: LoadedModel, namespace: str, decode: DecodeConfig) -> RemoteAnswer:
        """Begin an answer; raises ConfigError for settings that the program lacks."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A prompt to prefill or to answer.

    Attributes
    ----------
    prompt
        A string, or chat messages.
    config, method
        The call's reuse settings, and the method that they name.
    clock
        Started at the user's call.
    answer_tokens
        Largest number of tokens after the prompt; 0 for a prefill without an answer.
    retrieved, named
        The retrieved chunks: given with the call, and named before it.
    remote
        The answer of a remote decoder; None decodes in this process.
    """

    prompt: Prompt
    config: ReuseConfig
    method: Method
    clock: Clock
    answer_tokens: int = 0
    retrieved: tuple[str, ...] = ()
    named: Retrieved = Retrieved()  # noqa: RUF009  frozen
    remote: RemoteAnswer | None = None

    @property
    def uses_history(self) -> bool:
        """Whether the request takes rows of earlier prompts, and leaves its own."""
        return self.config.history and self.method.uses_chunks


def check_calibration(config: ReuseConfig, name: str, fingerprint: Fingerprint) -> None:
    """Refuse a ratio that was calibrated for another model.

    Raises
    ------
    ConfigError
        ``calibrated_for`` is not the model's fingerprint.
    """
    if config.calibrated_for not in (None, fingerprint.digest):
        raise ConfigError(
            f"recompute_ratio {config.recompute_ratio} was calibrated for another model or dtype "
            f"than {name} in {fingerprint.dtype}: run `ragkv calibrate` for this one, or give "
            "calibrated_for=None to take the ratio all the same"
        )
