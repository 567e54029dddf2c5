"""The interface of engines, local or remote, for wrappers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from ragkv.answer.completion import Completion
from ragkv.answer.stream import TextStream
from ragkv.config import ReuseConfig
from ragkv.report.account import PrecomputeReport


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """An engine's model.

    Attributes
    ----------
    name
        Hub name, folder, or class name of a model without one.
    fingerprint
        Digest of everything that chunk caches depend on except the sink; None if caches cannot be
        reused.
    positions
        Positions that the configuration supports; None if unknown.
    unsupported
        Why chunk caches cannot be reused; empty if they can.
    has_chat_template
        Whether prompts can be messages; assumed of a server, which refuses them otherwise.
    generation_config
        transformers' default settings of the model; None for a server, where they are unknown.
    """

    name: str
    fingerprint: str | None
    positions: int | None
    unsupported: str = ""
    has_chat_template: bool = True
    generation_config: Any = field(default=None, repr=False)


class Engine(Protocol):
    """:class:`ragkv.RagKV`, or :class:`ragkv.client.RemoteRagKV`."""

    reuse: ReuseConfig

    @property
    def namespace(self) -> str:
        """The namespace; entries of other namespaces are invisible."""

    @property
    def info(self) -> ModelInfo:
        """The model."""

    @property
    def precompute(self) -> Callable[..., PrecomputeReport]:
        """Encode chunks."""

    @property
    def prefetch(self) -> Callable[..., None]:
        """Name retrieved chunks, to load them."""

    @property
    def generate(self) -> Callable[..., Completion]:
        """Answer a prompt."""

    @property
    def stream(self) -> Callable[..., TextStream]:
        """Answer a prompt piece by piece."""

    @property
    def contains(self) -> Callable[..., bool]:
        """Whether a chunk can be reused."""

    def forget(self, text: str | None = None, *, document: str | None = None) -> int:
        """Delete a chunk, or a document's; return how many."""

    def tokenize(self, text: str) -> list[int]:
        """Return a text's tokens, without special tokens."""

    def render(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text that the model reads."""

    def sink_from(
        self,
        template: str | Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return a prompt template's text before its first field."""

    def wait(self) -> None:
        """Return when background work is done."""

    def warm_up(self) -> None:
        """Prepare the first answer in advance."""

    def close(self) -> None:
        """Release the engine's resources."""


class OverEngine:
    """A wrapper over an engine; a ``with`` block closes the engine."""

    def _engine(self) -> Engine:
        raise NotImplementedError

    def warm_up(self) -> None:
        """Prepare the first answer in advance, as :meth:`ragkv.RagKV.warm_up`."""
        self._engine().warm_up()

    def close(self) -> None:
        """Close the engine, even one from outside. Scripts need not call it."""
        self._engine().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
