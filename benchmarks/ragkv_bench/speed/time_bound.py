"""The arithmetic bound: what a pass over some of a prompt's rows must cost at least."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]


def causal_area(rows: Positions, window: int | None = None) -> int:
    """Count the pairs of query row and key that causal attention must look at.

    Parameters
    ----------
    rows
        ``[rows]`` positions in the prompt; row p sees the keys 0 to p.
    window
        Keys that a row sees at most, itself included; None is no limit.
    """
    seen = rows.astype(np.int64) + 1
    return int((seen if window is None else np.minimum(seen, window)).sum())


@dataclass(frozen=True, slots=True)
class Costs:
    """What a full prefill spends its time on, measured.

    Attributes
    ----------
    tokens
        Tokens of the prefilled prompt.
    linear_s
        Seconds outside attention: projections, MLPs, norms, the last token's logits.
    attention_s
        Seconds within attention, one figure a layer.
    windows
        Per layer: the sliding window, or None.
    """

    tokens: int
    linear_s: float
    attention_s: tuple[float, ...]
    windows: tuple[int | None, ...]

    @property
    def prefill_s(self) -> float:
        """Seconds of the whole prefill."""
        return self.linear_s + sum(self.attention_s)

    def compute_s(self, rows: Positions) -> float:
        """Return the seconds of a pass over ``rows`` at a full prefill's rates.

        The linear part is ``len(rows) / tokens`` of a prefill's, a layer's attention the
        rows' share of the causal area.
        """
        every = np.arange(self.tokens)
        shares = {
            window: causal_area(rows, window) / causal_area(every, window)
            for window in set(self.windows)
        }
        attention = sum(
            seconds * shares[window]
            for seconds, window in zip(self.attention_s, self.windows, strict=True)
        )
        return len(rows) / self.tokens * self.linear_s + attention


def bound_s(costs: Costs, rows: Positions, load_s: float) -> float:
    """Return the least seconds for computing ``rows`` while the other rows are loaded.

    Loading overlaps computation: only its excess adds to the time.
    """
    compute = costs.compute_s(rows)
    return compute + max(0.0, load_s - compute)
