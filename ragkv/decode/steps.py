"""Decoding steps: passes that compute an answer's tokens over the prompt's cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from ragkv.attend.blocks import BlockAttention
from ragkv.attend.forward import SubsetPass
from ragkv.decode.batch import batch_of
from ragkv.decode.draft import COSTS
from ragkv.model.linear import step_products
from ragkv.model.loaded import ReusableModel
from ragkv.prompt.history import TokenHistory
from ragkv.prompt.tokens import IntArray
from ragkv.recompute.copy_repair import CopyRepair
from ragkv.splice.buffer import SplicedCache

Take = Callable[[torch.Tensor], Sequence[int] | None]


class Steps:
    """Computes the tokens of one answer, one or several in a step.

    A step is a pass over scattered rows: the answer's tokens and, with ``copies``, the stale tokens
    that the answer is about to copy. It is computed together with other answers' steps.

    Parameters
    ----------
    ids
        ``[tokens]`` the prompt's token ids.
    cache
        The prompt's cache.
    logits
        ``[vocab]`` float32: after the prompt. The caller holds the model.
    copies
        Copy repair, or None.
    sparse
        Sparse attention of the steps; None for full attention.
    begin
        Called before the first token is drawn; waits for the logits.
    prefilled
        Called after the first token is drawn, when the caller can release the model.
    """

    def __init__(
        self,
        loaded: ReusableModel,
        ids: IntArray,
        cache: SplicedCache,
        logits: torch.Tensor,
        copies: CopyRepair | None = None,
        *,
        sparse: BlockAttention | None = None,
        begin: Callable[[], object] = lambda: None,
        prefilled: Callable[[], object] = lambda: None,
    ) -> None:
        self.history = TokenHistory(ids)
        self._loaded, self._cache = loaded, cache
        self._logits, self._copies = logits, copies
        self._begin, self._prefilled = begin, prefilled
        self.sparse = sparse
        self._batch = batch_of(loaded)

    @property
    def position_limit(self) -> int | None:
        """First position at which the model's rotary table changes, or None."""
        return self._loaded.architecture.position_limit

    @property
    def draft_costs(self) -> tuple[float, float]:
        """See :attr:`ragkv.decode.draft.Drafts.costs`; known after the prompt's pass."""
        return COSTS[step_products(self._loaded.model)]

    @property
    def answers(self) -> int:
        """Number of answers whose steps run together, this one included."""
        return max(1, self._batch.answers)

    @torch.no_grad()
    def run(self, take: Take) -> None:
        """Draw the first token, then compute steps, until ``take`` ends the answer.

        Parameters
        ----------
        take
            Called with the logits after the prompt, ``[1, vocab]`` float32, and with those after
            each token of a step, ``[tokens, vocab]``. Appends what it draws to the history, and
            returns a draft of the tokens after it, of which the step can use fewer; None ends the
            answer.
        """
        self._begin()
        subset = self._next(take, self._logits[None])
        self._prefilled()
        if subset is not None:
            self._batch.run(self._loaded, subset, partial(self._next, take))

    def _next(self, take: Take, logits: torch.Tensor) -> SubsetPass | None:
        """Draw tokens; return the pass over the last token and the draft."""
        draft = take(logits)
        if draft is None:
            return None
        repaired = np.empty(0, dtype=np.int64)
        if self._copies is not None:
            repaired = self._copies.take(self.history)
            draft = self._copies.without_repair(self.history, draft)
        ids = np.concatenate([self.history.ids, np.asarray(draft, dtype=self.history.ids.dtype)])
        fed = np.arange(len(self.history) - 1, len(ids))
        if self.sparse is not None:
            self.sparse.begin(repaired, len(self.history) - 1)
        rows = np.concatenate([repaired, fed])
        return SubsetPass(ids, rows, self._cache, sparse=self.sparse, keep=len(fed))
