"""Matrix products of an attention's groups, one group at a time where oneDNN computes them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ragkv.model.implementation import implementation_for, onednn_linear


def products(rows: torch.Tensor, others: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield ``rows @ others^T``: group by group by oneDNN, all groups at once by torch.

    Parameters
    ----------
    rows
        ``[groups, n, inner]``.
    others
        ``[groups, m, inner]``, of any strides.

    Yields
    ------
    torch.Tensor
        ``[some groups, n, m]``, new memory.
    """
    if implementation_for("product", rows) == "onednn":
        for some, other in zip(rows, others, strict=True):
            yield onednn_linear(some, other)[None]
    else:
        yield torch.matmul(rows, others.transpose(1, 2))
