"""How much of a chunk must be recomputed in another context: Cache-Craft's formulas.

arXiv 2502.15734, section 3. A chunk's rows were computed behind some chunks (old) and are to
stand behind others (new).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt

NO_CONTEXT = 0.5
"""CFO, at alpha 1, of rows that were computed behind the sink alone: CCI without a context."""


def context_impact(
    between: npt.NDArray[np.float64], sizes: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Return ``[chunks]`` the cache context impact, CCI, from 1/2 (no context) to 1.

    ``CCI_i = 1 / (1 + exp(-a / b))`` with ``a = sum over j < i of inter_ij / (|Ci| |Cj|)``
    and ``b = intra_i / |Ci|^2``.

    Parameters
    ----------
    between
        ``[chunks, chunks]``: the attention of all tokens of chunk i to all tokens of chunk
        j, averaged over layers and heads; ``intra`` is its diagonal.
    sizes
        ``[chunks]`` tokens of each chunk.
    """
    density = between / np.outer(sizes, sizes)
    earlier, own = np.tril(density, -1).sum(axis=1), np.diag(density)
    impact: npt.NDArray[np.float64] = 1 / (1 + np.exp(-earlier / np.maximum(own, 1e-30)))
    return impact


def prefix_overlap(old: Sequence[str], inter: Sequence[float], new: Sequence[str]) -> float:
    """Return beta, from 0 to 1: the share of the attention to old chunks that new ones keep.

    Parameters
    ----------
    old, new
        The chunks before this one, each once.
    inter
        The attention of this chunk's tokens to each of the old ones. Where all of it is 0,
        nothing depends on them: the overlap is whole.
    """
    total, known = sum(inter), set(new)
    kept = sum(paid for text, paid in zip(old, inter, strict=True) if text in known)
    return kept / total if total > 0 else 1.0


def order_penalty(old: Sequence[str], new: Sequence[str]) -> float:
    """Return gamma, from 0 to 1: Kendall's tau distance of the common chunks' two orders.

    It is the share of their pairs that stand the other way round; 0 where there is no pair.
    """
    place = {text: at for at, text in enumerate(new)}
    pairs = list(combinations([place[text] for text in old if text in place], 2))
    return sum(first > second for first, second in pairs) / max(1, len(pairs))


def fix_overhead(impact: float, overlap: float, penalty: float, alpha: float = 1.0) -> float:
    """Return the cache fix overhead, ``CFO = alpha CCI (1 - beta (1 - gamma))``, from 0 to 1."""
    return min(1.0, max(0.0, alpha * impact * (1 - overlap * (1 - penalty))))
