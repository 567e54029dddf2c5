"""What an engine says of its model, its requests and its memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ragkv.answer.engine import ModelTraits
from ragkv.engine.settings import check_settings
from ragkv.model.load import pretrained
from ragkv.model.loaded import LoadedModel
from ragkv.prompt.chat import prompt_of
from ragkv.prompt.render import Prompt, render
from ragkv.report.speculations import SpeculationReport
from ragkv.retrieve.following import Speculator, afollow, follow

if TYPE_CHECKING:
    from ragkv.store.base import TierUse

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """An engine's model.

    Attributes
    ----------
    name
        Hub name, folder, or class name of a model without one.
    fingerprint
        Digest of everything that chunk caches depend on but the sink, for the model as it is now;
        None where caches cannot be reused.
    positions
        Positions that its configuration covers; None if it does not say.
    unsupported
        Why chunk caches cannot be reused; empty if they can.
    """

    name: str
    fingerprint: str | None
    positions: int | None
    unsupported: str = ""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """An engine at one moment.

    Attributes
    ----------
    running, waiting
        Requests over the model that have begun and not ended, and those that wait for their turn.
    tiers
        Bytes and hits of each tier, of former prompts and of versions.
    speculations
        What speculations gave and cost so far.
    """

    running: int
    waiting: int
    tiers: tuple[TierUse, ...]
    speculations: SpeculationReport


class WrappersNames(Speculator):
    """What the wrappers still ask of :class:`ragkv.RagKV` by other names."""

    _loaded: LoadedModel
    forget: Any
    pretrained = staticmethod(pretrained)
    check_settings = staticmethod(check_settings)

    def _info(self) -> Any:
        return getattr(self, "info")  # noqa: B009

    @property
    def fingerprint(self) -> str | None:
        """Digest of everything that chunk caches depend on."""
        digest: str | None = self._info().fingerprint
        return digest

    @property
    def model_name(self) -> str:
        """The model's name."""
        return self._loaded.name

    @property
    def traits(self) -> ModelTraits:
        """What wrappers want to know of the model."""
        own = getattr(self._loaded.model, "generation_config", None)
        return ModelTraits(self._loaded.positions, bool(self._loaded.tokenizer.chat_template), own)

    def tokenize(self, text: str) -> list[int]:
        """Return a text's tokens, without special tokens."""
        ids: list[int] = self._loaded.tokenizer(text, add_special_tokens=False, verbose=False)[
            "input_ids"
        ]
        return ids

    def render(self, prompt: Prompt, chat_template_kwargs: Mapping[str, Any] | None = None) -> str:
        """Return the text of a prompt that the model reads."""
        return render(prompt_of(prompt, chat_template_kwargs), self._loaded.tokenizer).text

    def forget_document(self, document: str) -> int:
        """Delete a document's chunks."""
        count: int = self.forget(document=document)
        return count

    def follow(
        self,
        stages: Iterable[Sequence[Found]],
        prompt_of: Callable[[Sequence[Found]], Prompt],
        **overrides: Any,
    ) -> list[Found]:
        """Compute the prompts of a retrieval in stages."""
        return follow(self, stages, prompt_of, **overrides)

    async def afollow(
        self,
        stages: Iterable[Sequence[Found]],
        prompt_of: Callable[[Sequence[Found]], Prompt],
        **overrides: Any,
    ) -> list[Found]:
        """Compute the prompts of a retrieval in stages; the event loop goes on."""
        return await afollow(self, stages, prompt_of, **overrides)
