"""Which chunks are similar, by the vectors of a pipeline's own embedding model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ragkv.errors import ConfigError

_ROWS = 1024
"""Rows of similarities that are in memory at once."""


def nearest(texts: Sequence[str], vectors: npt.ArrayLike, count: int) -> dict[str, list[str]]:
    """Return the most similar texts of each, the most similar last.

    FusionRAG (arXiv 2601.12904) encodes each chunk behind these: see ``neighbours`` of
    :meth:`ragkv.RagKV.precompute`.

    Parameters
    ----------
    texts
        The chunks. One that is there several times counts once.
    vectors
        ``[texts, dimensions]``, of any length; their cosine is the similarity.
    count
        Neighbours of each chunk, or fewer where there are not so many.

    Raises
    ------
    ConfigError
        There is not one vector of finite numbers for each text, or ``count`` is below 1.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigError(f"count must be a whole number from 1, not {count!r}")
    try:
        rows = np.asarray(vectors, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the vectors are no matrix of numbers: {error}") from error
    if rows.ndim != 2 or len(rows) != len(texts) or not np.isfinite(rows).all():
        raise ConfigError(
            f"{len(texts)} texts need as many vectors of finite numbers, not shape {rows.shape}"
        )
    first = {text: at for at, text in reversed(list(enumerate(texts)))}
    names, rows = list(first), rows[list(first.values())]
    rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)
    count = min(count, len(names) - 1)
    out: dict[str, list[str]] = {}
    for begin in range(0, len(names), _ROWS):
        block = rows[begin : begin + _ROWS] @ rows.T
        block[np.arange(len(block)), begin + np.arange(len(block))] = -np.inf
        order = np.argsort(-block, axis=1, kind="stable")[:, :count]
        for at, found in enumerate(order, begin):
            out[names[at]] = [names[other] for other in found[::-1]]
    return out
