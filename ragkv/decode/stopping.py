"""Stop texts, the request's and the model's own."""

from __future__ import annotations

import torch
from transformers import PreTrainedTokenizerBase

from ragkv.config import DecodeConfig
from ragkv.model.loaded import LoadedModel

_MARGIN = 8
"""Tokens before a stop text that can affect its decoding, or decode to nothing."""


def stops_of(loaded: LoadedModel, config: DecodeConfig) -> tuple[str, ...]:
    """Return the texts that end an answer: the request's, and those of the model's config."""
    own = getattr(loaded.model.generation_config, "stop_strings", None) or ()
    own = (own,) if isinstance(own, str) else own
    return tuple(dict.fromkeys([*config.stops, *own]))


class StopTexts:
    """Detects one of the texts at the end of the answer.

    transformers' own criterion also matches the prompt, and prepares the whole vocabulary for every
    call.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._texts = texts
        # a token is a byte of text at least
        self._tail = max((len(text.encode()) for text in texts), default=0) + _MARGIN

    def reached(self, answer: torch.Tensor) -> bool:
        """Whether the last token of ``answer`` ``[tokens]`` completes a stop text.

        A special token counts both as its name and as an empty text.
        """
        if not self._texts:
            return False
        tail = answer[-self._tail :].tolist()
        read = [
            str(self._tokenizer.decode(tail, skip_special_tokens=skip)) for skip in (True, False)
        ]
        return any(stop in text for text in read for stop in self._texts)
