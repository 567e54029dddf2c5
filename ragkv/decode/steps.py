"""Decoding steps: passes that compute an answer's tokens over the prompt's cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from ragkv.attend.forward import SubsetPass
from ragkv.decode.batch import AnswerSteps, batch_of
from ragkv.model.loaded import ReusableModel
from ragkv.prompt.history import TokenHistory
from ragkv.prompt.tokens import IntArray
from ragkv.recompute.copy_repair import CopyRepair
from ragkv.splice.buffer import SplicedCache


class Steps:
    """Computes the tokens of one answer, one or several in a step.

    A step is a pass over scattered rows: the answer's tokens and, with ``copies``, the stale
    tokens that the answer is about to copy. It runs together with those of other answers.

    Parameters
    ----------
    ids
        ``[tokens]`` the prompt's token ids.
    cache
        The prompt's cache.
    first
        Computes what is left of the prompt, and returns the logits after it, ``[vocab]`` float32;
        the caller has the model.
    copies
        What the steps repair; None for nothing.
    prefilled
        Called after ``first``: the caller may let go of the model.
    """

    def __init__(
        self,
        loaded: ReusableModel,
        ids: IntArray,
        cache: SplicedCache,
        first: Callable[[], torch.Tensor],
        copies: CopyRepair | None = None,
        *,
        prefilled: Callable[[], object] = lambda: None,
    ) -> None:
        self.history = TokenHistory(ids)
        self._loaded, self._cache = loaded, cache
        self._first, self._copies, self._prefilled = first, copies, prefilled
        self._batch = batch_of(loaded)
        self._steps: AnswerSteps

    @property
    def position_limit(self) -> int | None:
        """First position at which the model's rotary table changes, or None."""
        return self._loaded.architecture.position_limit

    @property
    def answers(self) -> int:
        """Number of answers whose steps run together."""
        return self._batch.answers

    @contextmanager
    def running(self) -> Iterator[torch.Tensor]:
        """Compute the prompt, then run the steps of the block.

        Yields
        ------
        torch.Tensor
            ``[1, vocab]`` float32: the logits after the prompt.
        """
        with torch.no_grad():
            logits = self._first()[None]
            with self._batch.answer() as self._steps:
                self._prefilled()
                yield logits

    def compute(self, draft: Sequence[int] = ()) -> torch.Tensor:
        """Compute the history's last token, and a draft of those after it.

        Returns
        -------
        torch.Tensor
            ``[1 + len(draft), vocab]`` float32: the logits after each.
        """
        copies = self._copies
        repaired = np.empty(0, dtype=np.int64) if copies is None else copies.take(self.history)
        ids = np.concatenate([self.history.ids, np.asarray(draft, dtype=self.history.ids.dtype)])
        fed = np.arange(len(self.history) - 1, len(ids))
        rows = np.concatenate([repaired, fed])
        subset = SubsetPass(ids, rows, self._cache, keep=len(fed))
        return self._steps.compute(self._loaded, subset)
