"""Rotary positions: the model's own tables, applied and reverted in float32."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import torch

Turn = Literal["halves", "adjacent", "backwards", "still"]
"""Which channels of a key rotate as a pair, and in which direction.

``halves``: a channel and the one half the rotary dimensions after it (Llama and most others).
``adjacent``: each with its neighbour (GPT-J, Cohere, GLM). ``backwards``: halves, by the negative
angle (nanochat). ``still``: the layer has no positions (NoPE: SmolLM3, EXAONE 4).
"""
TURNS: tuple[Turn, ...] = ("halves", "adjacent", "backwards", "still")


class RopeKind(NamedTuple):
    """The rotation of a layer's keys: the table's name, empty for the only one, and the pairing."""

    table: str = ""
    turn: Turn = "halves"


class Table(NamedTuple):
    """cos and sin, each ``[tokens, rotary_dim / 2]`` float32, attention scaling included.

    ``adjacent`` channels rotate as pairs; otherwise the two halves do.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    adjacent: bool = False

    def at(self, rows: torch.Tensor | slice) -> Table:
        """Return the table of some of the tokens ``[rows]``."""
        return Table(self.cos[rows], self.sin[rows], self.adjacent)

    @property
    def channels(self) -> tuple[slice, slice]:
        """The rotated channels: pair i is channel i of both slices."""
        half = self.cos.shape[-1]
        if self.adjacent:
            return slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        return slice(half), slice(half, 2 * half)


class RotaryTables:
    """cos and sin by kind of layer, taken from the model's rotary module.

    Parameters
    ----------
    backbone
        Its ``rotary_emb`` makes the tables; one with a ``layer_type`` argument (Gemma 3) makes a
        table for each kind.
    """

    def __init__(self, backbone: Any) -> None:
        self._backbone = backbone
        rotary: Any = self._backbone.rotary_emb
        self._by_kind = "layer_type" in inspect.signature(rotary.forward).parameters
        self._columns: dict[str, slice] = {}

    def at(self, kind: RopeKind, positions: torch.Tensor) -> Table:
        """Return the table of one kind at ``positions`` ``[tokens]``.

        It has each number once, unlike most models' tables.
        """
        if kind.turn == "still":
            ones = torch.ones(len(positions), 1, device=positions.device)
            return Table(ones, torch.zeros_like(ones))
        cos, sin = self._of_model(kind.table, positions)
        once = self._once(kind.table, positions.device)
        cos, sin = cos[:, once], sin[:, once]
        return Table(cos, -sin if kind.turn == "backwards" else sin, kind.turn == "adjacent")

    def _of_model(self, table: str, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the model's own tables, ``[tokens, rotary_dim]`` float32."""
        probe = torch.empty(0, dtype=torch.float32, device=positions.device)
        rotary = self._backbone.rotary_emb  # the current one: users can replace it
        cos, sin = rotary(probe, positions[None], *([table] if self._by_kind else []))
        return cos[0].float(), sin[0].float()

    def _once(self, table: str, device: torch.device) -> slice:
        """Return the columns of a table with each number once.

        Numbers are repeated by halves (Llama), repeated in place (Cohere), or not (gpt-oss).
        """
        if table not in self._columns:
            one = torch.ones(1, dtype=torch.long, device=device)
            sin = self._of_model(table, one)[1][0].tolist()
            half = len(sin) // 2
            if sin[:half] == sin[half:]:
                self._columns[table] = slice(half)
            elif sin[::2] == sin[1::2]:
                self._columns[table] = slice(0, None, 2)
            else:
                self._columns[table] = slice(None)
        return self._columns[table]

    def tables(self, kinds: Iterable[RopeKind], positions: torch.Tensor) -> dict[RopeKind, Table]:
        """Return the tables of several kinds at the same positions."""
        return {kind: self.at(kind, positions) for kind in dict.fromkeys(kinds)}


def rotate(x: torch.Tensor, table: Table) -> torch.Tensor:
    """Rotate ``x`` ``[..., tokens, head_dim]`` by a table; round once, to its dtype.

    Only the first ``rotary_dim`` channels rotate (Phi-3's partial rotary).
    """
    out = torch.empty_like(x)
    rotate_into(out, x, table)
    return out


def rotate_into(out: torch.Tensor, x: torch.Tensor, table: Table) -> None:
    """Write the rotation of ``x`` to a tensor in other memory, see :func:`rotate`."""
    if not out.dtype == x.dtype == torch.float32:
        out.copy_(rotate(x.float(), table))
        return
    a, b = table.channels
    first, second = x[..., a], x[..., b]
    # each product is rounded, as on a device
    torch.mul(first, table.cos, out=out[..., a]).sub_(second * table.sin)
    torch.mul(second, table.cos, out=out[..., b]).add_(first * table.sin)
    out[..., b.stop :] = x[..., b.stop :]


def add_rotated(to: torch.Tensor, x: torch.Tensor, table: Table) -> None:
    """Add the rotation of ``x`` (float32) to a tensor in place, see :func:`rotate`."""
    if to.dtype != torch.float32:  # to round the sum only once
        wide = to.float()
        add_rotated(wide, x, table)
        to.copy_(wide)
        return
    a, b = table.channels
    first, second = x[..., a], x[..., b]
    to[..., a].addcmul_(first, table.cos).addcmul_(second, table.sin, value=-1)
    to[..., b].addcmul_(second, table.cos).addcmul_(first, table.sin)
    to[..., b.stop :] += x[..., b.stop :]


def unrotate(x: torch.Tensor, table: Table) -> torch.Tensor:
    """Revert :func:`rotate`, attention scaling included."""
    scale = table.cos.square() + table.sin.square()
    return rotate(x, Table(table.cos / scale, -table.sin / scale, table.adjacent))
