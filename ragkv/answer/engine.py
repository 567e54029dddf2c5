"""What wrappers know of an engine, whether it is in this process or a server's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ragkv.answer.completion import Completion
from ragkv.answer.stream import TextStream
from ragkv.config import ReuseConfig
from ragkv.report.account import PrecomputeReport


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """What prompts and settings depend on.

    Attributes
    ----------
    positions
        Positions that the model knows; None for any number.
    has_chat_template
        Whether prompts may be messages. A server's may: it says so when it is asked.
    generation_config
        transformers' settings that the model comes with; None for a server's, which are not known.
    """

    positions: int | None
    has_chat_template: bool
    generation_config: Any = None


class Engine(Protocol):
    """:class:`ragkv.RagKV`, or :class:`ragkv.client.RemoteRagKV`.

    ``follow`` and ``afollow`` need a model in this process: of a server they raise ConfigError.
    """

    reuse: ReuseConfig

    @property
    def model_name(self) -> str:
        """The model's name."""

    @property
    def namespace(self) -> str:
        """Entries of another namespace are never seen."""

    @property
    def fingerprint(self) -> str | None:
        """Digest of everything that chunk caches depend on; None where they cannot be reused."""

    @property
    def traits(self) -> ModelTraits:
        """What prompts and settings depend on."""

    @property
    def precompute(self) -> Callable[..., PrecomputeReport]:
        """Encode chunks."""

    @property
    def prefetch(self) -> Callable[..., None]:
        """Name the chunks that were retrieved."""

    @property
    def generate(self) -> Callable[..., Completion]:
        """Answer a prompt."""

    @property
    def stream(self) -> Callable[..., TextStream]:
        """Answer a prompt piece by piece."""

    @property
    def follow(self) -> Callable[..., Any]:
        """Compute the prompts of a retrieval in stages."""

    @property
    def afollow(self) -> Callable[..., Any]:
        """Compute the prompts of a retrieval in stages; the event loop goes on."""

    def contains(self, text: str, **overrides: Any) -> bool:
        """Whether a chunk can be reused."""

    def forget(self, text: str) -> bool:
        """Delete a chunk; return whether it was there."""

    def forget_document(self, document: str) -> int:
        """Delete a document's chunks; return how many."""

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

    def close(self) -> None:
        """Release what the engine holds."""
