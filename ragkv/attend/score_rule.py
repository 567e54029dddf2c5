"""How products of queries and keys become weights: scaled, in some models capped or with sinks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch


@dataclass(frozen=True, slots=True, eq=False)
class ScoreRule:
    """A layer's scaling; a cap on the scores (Gemma 2), or learned sinks (gpt-oss).

    Attributes
    ----------
    scaling
        Factor of the products.
    softcap
        Scores become ``softcap * tanh(scores / softcap)`` (Gemma 2); None: they stay.
    sinks
        ``[heads]``: learned scores in each row's softmax without a value, so that its weights
        sum to less than one (gpt-oss); None: there are none.
    """

    scaling: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    @classmethod
    def given(cls, scaling: float, softcap: Any = None, s_aux: Any = None, **_: Any) -> Self:
        """Return the rule in an attention function's arguments."""
        return cls(scaling, softcap, s_aux)

    @property
    def is_softmax(self) -> bool:
        """Whether scores are neither capped nor with sinks."""
        return self.softcap is None and self.sinks is None

    def capped(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores under the cap, before any mask."""
        return scores if self.softcap is None else torch.tanh(scores / self.softcap) * self.softcap

    def weights(self, scores: torch.Tensor, heads: slice = slice(None)) -> torch.Tensor:
        """Return the weights of these heads' scores ``[…, heads, rows, keys]`` float32.

        The scores are capped and masked. They are overwritten unless they have a gradient.
        """
        if self.sinks is None:
            return torch.softmax(scores, dim=-1, out=None if scores.requires_grad else scores)
        lse = self.with_sinks(torch.logsumexp(scores, dim=-1), heads)
        return torch.exp(scores - lse[..., None])

    def with_sinks(self, lse: torch.Tensor, heads: slice = slice(None)) -> torch.Tensor:
        """Return the log-sum-exp ``[…, heads, rows]`` float32 of keys and sinks together."""
        if self.sinks is None:
            return lse
        return torch.logaddexp(lse, self.sinks[heads, None].to(lse.dtype))
