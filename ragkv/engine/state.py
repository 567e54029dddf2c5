"""What an engine says of its model, its requests and its memory."""

from __future__ import annotations

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ragkv.answer.engine import ModelTraits
from ragkv.engine.requests import RequestQueue
from ragkv.engine.reuse import Reuse
from ragkv.model.loaded import LoadedModel, ReusableModel
from ragkv.store.base import TierUse


class EngineState:
    """The read-only part of :class:`ragkv.RagKV`."""

    _loaded: LoadedModel
    _reuse: Reuse | None
    _requests: RequestQueue

    @property
    def running(self) -> int:
        """Number of requests over this model that have begun and not ended."""
        return self._requests.running

    @property
    def waiting(self) -> int:
        """Number of requests over this model that wait for their turn."""
        return self._requests.waiting

    @property
    def tiers(self) -> tuple[TierUse, ...]:
        """Bytes and hits of each tier, and of former prompts."""
        return () if self._reuse is None else self._reuse.tiers

    @property
    def loaded(self) -> LoadedModel:
        """The model with its architecture and fingerprint."""
        return self._loaded

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model."""
        return self._loaded.model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""
        return self._loaded.tokenizer

    @property
    def fingerprint(self) -> str | None:
        """Digest of everything that chunk caches depend on, for the model as it is now, sinkless.

        None for a model whose caches cannot be reused.
        """
        return None if self._reuse is None else self._reuse.corpus.fingerprint.digest

    @property
    def model_name(self) -> str:
        """Hub name, folder, or class name of a model without one."""
        return self._loaded.name

    @property
    def traits(self) -> ModelTraits:
        """What wrappers want to know of the model."""
        own = getattr(self.model, "generation_config", None)
        return ModelTraits(self._loaded.positions, bool(self.tokenizer.chat_template), own)

    @property
    def supported(self) -> bool:
        """Whether chunks can be reused with this model."""
        return isinstance(self._loaded, ReusableModel)

    @property
    def unsupported_reason(self) -> str:
        """Why chunks cannot be reused; empty if they can."""
        return self._loaded.unsupported

    def tokenize(self, text: str) -> list[int]:
        """Return a text's tokens, without special tokens."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def _text_of(self, token: int) -> str:
        return str(self.tokenizer.decode([token], clean_up_tokenization_spaces=False))
