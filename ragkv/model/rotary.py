"""Rotary positions: the model's own tables, applied and undone in float32."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

import torch
from torch import nn

Table = tuple[torch.Tensor, torch.Tensor]
"""cos and sin, each ``[tokens, rotary_dim / 2]`` float32, attention scaling included."""


class RotaryTables:
    """cos and sin by layer kind, taken from the model's rotary module.

    Parameters
    ----------
    rotary
        The backbone's ``rotary_emb``; one with a ``layer_type`` argument (Gemma 3)
        has a table for each kind.
    """

    def __init__(self, rotary: nn.Module) -> None:
        self._rotary = rotary
        self._by_kind = "layer_type" in inspect.signature(rotary.forward).parameters

    def at(self, kind: str, positions: torch.Tensor) -> Table:
        """Return the table of one kind at ``positions`` ``[tokens]``.

        The two halves of the model's tables are equal (rotate-half convention);
        the first is returned.
        """
        probe = torch.empty(0, dtype=torch.float32, device=positions.device)
        arguments = (kind,) if self._by_kind else ()
        cos, sin = self._rotary(probe, positions[None], *arguments)
        half = cos.shape[-1] // 2
        return cos[0, :, :half].float(), sin[0, :, :half].float()

    def tables(self, kinds: Iterable[str], positions: torch.Tensor) -> dict[str, Table]:
        """Return the tables of several kinds at the same positions."""
        return {kind: self.at(kind, positions) for kind in dict.fromkeys(kinds)}


def rotate(x: torch.Tensor, table: Table) -> torch.Tensor:
    """Rotate ``x`` ``[..., tokens, head_dim]`` by a table; rounds once, to x's dtype.

    Only the first ``rotary_dim`` channels turn (Phi-3's partial rotary).
    """
    cos, sin = table
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    out = torch.empty_like(x)
    out[..., :half] = first * cos - second * sin
    out[..., half : 2 * half] = second * cos + first * sin
    out[..., 2 * half :] = x[..., 2 * half :]
    return out


def add_rotated(to: torch.Tensor, x: torch.Tensor, table: Table) -> None:
    """Add what :func:`rotate` makes of ``x`` (float32) to a tensor in place."""
    if to.dtype != torch.float32:  # or it were rounded more than once
        wide = to.float()
        add_rotated(wide, x, table)
        to.copy_(wide)
        return
    cos, sin = table
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    to[..., :half].addcmul_(first, cos).addcmul_(second, sin, value=-1)
    to[..., half : 2 * half].addcmul_(second, cos).addcmul_(first, sin)
    to[..., 2 * half :] += x[..., 2 * half :]


def unrotate(x: torch.Tensor, table: Table) -> torch.Tensor:
    """Undo :func:`rotate`, attention scaling included."""
    cos, sin = table
    scale = cos.square() + sin.square()
    return rotate(x, (cos / scale, -sin / scale))
