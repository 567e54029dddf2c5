"""Attention over chunks that overlap: two parts with a temperature (APE, arXiv 2502.05431)."""

from __future__ import annotations

import torch

from ragkv.attend.score_rule import ScoreRule
from ragkv.splice.overlap import Overlap, Parallel

_ROW_BLOCK = 128


def attend_overlapping(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: torch.Tensor,
    *,
    overlap: Overlap,
    window: int | None,
    scaling: float,
    score_rule: ScoreRule | None = None,
) -> torch.Tensor:
    """Attend in float32 to the keys that :meth:`Overlap.hidden` does not hide.

    The query's rows weigh contexts and other keys separately (:func:`temper`).

    Parameters
    ----------
    query
        ``[1, heads, rows, head_dim]``.
    key, value
        ``[1, kv_heads, tokens, head_dim]``; key j is the token of index j.
    rows
        ``[rows]`` int64: the query rows' indices.
    window
        See :meth:`Overlap.hidden`.
    score_rule
        How scores become weights; None is a softmax.

    Returns
    -------
    torch.Tensor
        ``[1, heads, rows, head_dim]``, of the query's dtype.
    """
    kv_heads, tokens, size = key.shape[1:]
    score_rule = score_rule or ScoreRule()
    keys, values = key[0].float(), value[0].float()
    out = torch.empty_like(query)
    for first in range(0, len(rows), _ROW_BLOCK):
        block = slice(first, first + _ROW_BLOCK)
        queries = query[0, :, block].float() * scaling
        heads, count, _ = queries.shape
        scores = torch.matmul(queries.reshape(kv_heads, -1, size), keys.transpose(1, 2))
        scores = score_rule.capped(scores.view(heads, count, tokens))
        scores.masked_fill_(overlap.hidden(rows[block], tokens, window), float("-inf"))
        context = scores[:, :, overlap.first : overlap.query]
        of_query = (rows[block] >= overlap.query)[:, None]
        context.copy_(torch.where(of_query, temper(context, overlap.parallel), context))
        weights = score_rule.weights(scores).view(kv_heads, -1, tokens)
        out[0, :, block] = torch.matmul(weights, values).view(heads, count, size)
    return out


def temper(scores: torch.Tensor, parallel: Parallel) -> torch.Tensor:
    """Change context scores so that a softmax over all scores gives APE's attention.

    APE weighs two attentions, over the contexts with temperature T and over the rest,
    by a softmax of ``S * T * lse_contexts`` and ``lse_rest``. Adding a number to all
    context scores moves their log-sum-exp by as much and changes nothing among them, so
    ``scores / T + (S * T - 1) * logsumexp(scores / T)`` in the joint softmax is the same.

    Parameters
    ----------
    scores
        ``[..., contexts]`` float32; -inf where a row does not see a key, or sees none.
    """
    sharp = scores / parallel.temperature
    lowest = torch.finfo(sharp.dtype).min
    mass = torch.logsumexp(sharp, dim=-1, keepdim=True).clamp(min=lowest)
    return sharp + (parallel.scale * parallel.temperature - 1) * mass
