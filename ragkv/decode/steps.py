"""Decoding steps: passes that compute an answer's tokens over the prompt's cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from ragkv.attend.forward import SubsetPass, subset_forward
from ragkv.model.experts import experts_by, experts_of
from ragkv.model.linear import fast_linear_layers
from ragkv.model.loaded import ReusableModel
from ragkv.prompt.history import TokenHistory
from ragkv.prompt.tokens import IntArray
from ragkv.recompute.copy_repair import CopyRepair
from ragkv.splice.buffer import SplicedCache
from ragkv.splice.overlap import OverlappedCache


class Steps:
    """Computes the tokens of one answer, one or several in a step. Hold the model's lock.

    A step is a pass over scattered rows: the answer's tokens and, with ``copies``, the stale
    tokens that the answer is about to copy. On a GPU a step that repairs nothing is an ordinary
    call of the model.

    Parameters
    ----------
    ids
        ``[tokens]`` the prompt's token ids.
    cache
        The prompt's cache.
    first
        Computes what is left of the prompt, and returns the logits after it, ``[vocab]`` float32.
    copies
        What the steps repair; None for nothing.
    """

    def __init__(
        self,
        loaded: ReusableModel,
        ids: IntArray,
        cache: SplicedCache,
        first: Callable[[], torch.Tensor],
        copies: CopyRepair | None = None,
    ) -> None:
        self.history = TokenHistory(ids)
        self._loaded, self._cache = loaded, cache
        self._first, self._copies = first, copies
        self._experts = experts_of(loaded.model)

    @property
    def position_limit(self) -> int | None:
        """First position at which the model's rotary table changes, or None."""
        return self._loaded.architecture.position_limit

    @contextmanager
    def running(self) -> Iterator[torch.Tensor]:
        """Compute the prompt, then prepare the model for the steps in the block.

        Yields
        ------
        torch.Tensor
            ``[1, vocab]`` float32: the logits after the prompt.
        """
        model: Any = self._loaded.model
        with torch.no_grad():
            logits = self._first()[None]  # a full prefill stays the model's own
            with model._optimize_model_for_decode(), fast_linear_layers(model):  # noqa: SLF001
                yield logits

    def compute(self, draft: Sequence[int] = ()) -> torch.Tensor:
        """Compute the history's last token, and a draft of those after it.

        Returns
        -------
        torch.Tensor
            ``[1 + len(draft), vocab]`` float32: the logits after each.
        """
        copies, cache = self._copies, self._cache
        repaired = np.empty(0, dtype=np.int64) if copies is None else copies.take(self.history)
        ids = np.concatenate([self.history.ids, np.asarray(draft, dtype=self.history.ids.dtype)])
        fed = np.arange(len(self.history) - 1, len(ids))
        on_cpu = self._loaded.device.type == "cpu"
        if not len(repaired) and not on_cpu and not isinstance(cache, OverlappedCache):
            return self._ordinary(ids[fed])
        rows = np.concatenate([repaired, fed])
        with self._experts_for(len(rows)):
            return subset_forward(self._loaded, SubsetPass(ids, rows, cache, keep=len(fed)))

    def _experts_for(self, rows: int) -> AbstractContextManager[None]:
        """Compute several rows' experts as a prefill does, and one row's as a decoding step."""
        if rows == 1:
            return nullcontext()
        return experts_by(self._loaded.model, self._experts)

    def _ordinary(self, fed: IntArray) -> torch.Tensor:
        # rows of a refused draft
        self._cache.crop(len(self.history) - 1 - self._cache.get_seq_length())
        tokens = torch.from_numpy(fed.astype(np.int64))[None].to(self._loaded.device)
        with self._experts_for(len(fed)):
            out = self._loaded.model(
                input_ids=tokens,
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=len(fed),
            )
        return torch.as_tensor(out.logits[0, -len(fed) :].float())
