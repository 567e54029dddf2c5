"""The attention function of ragkv's passes, which transformers calls by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from ragkv.attend.interface import (
    is_innermost,
    ordinary_attention,
    run_pass,
    running_pass,
)
from ragkv.attend.kernels import attend_by_table
from ragkv.attend.observe import LayerCall, Observer
from ragkv.attend.rows import Rows, attend
from ragkv.attend.score_rule import ScoreRule
from ragkv.errors import UnsupportedModelError
from ragkv.model.architecture import backbone_of
from ragkv.model.calls import require_used
from ragkv.model.implementation import implementation_for
from ragkv.model.memory import TOGETHER, TOGETHER_CPU, is_out_of_memory
from ragkv.splice.buffer import SplicedCache

if TYPE_CHECKING:
    from ragkv_kernels import RowTable

    from ragkv.attend.blocks import BlockAttention
    from ragkv.attend.sparse_rows import SparseRows

_ATTENDED = "layers that called ragkv's attention"
_UNKNOWN_ARGUMENTS = ("sinks", "block_indices", "position_bias")
"""Arguments that change an attention's scores, which passes do not support."""


@dataclass(slots=True, eq=False)
class Pass:
    """One pass: its rows, the layers' windows, and its observer.

    ``sparse``: sparse attention of rows in layers without a window. ``last_row_ends``: the last
    layer attends only for the last row. ``masks``: observers' masks, reused in all layers.
    ``tokens``: number of tokens in its cache. ``attended``: number of layers that have attended.
    """

    rows: Rows
    windows: tuple[int | None, ...]
    observer: Observer | None = None
    sparse: SparseRows | BlockAttention | None = None
    last_row_ends: bool = False
    masks: dict[object, torch.Tensor] = field(default_factory=dict)
    tokens: int | None = None
    attended: int = 0


@dataclass(slots=True, eq=False)
class JointPass:
    """Passes over several prompts as one: the rows of each follow those of the one before.

    ``caches`` are the prompts'; their layers have the fresh rows when attention begins.
    """

    passes: Sequence[Pass]
    caches: Sequence[SplicedCache]
    attended: int = 0

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The layers' windows, the same for all."""
        return self.passes[0].windows


@dataclass(slots=True, eq=False)
class TablePass:
    """A pass whose rows and caches are given by a table, for a captured graph.

    ``table`` is a :class:`ragkv_kernels.RowTable`; the caches have the fresh rows when attention
    begins. ``observer`` is called behind each layer's attention with the layer, the query and the
    log-sum-exp of its scores, ``[heads, rows, head_dim]`` and ``[heads, rows]``, and the scaling.
    """

    table: RowTable
    windows: tuple[int | None, ...]
    observer: Callable[[int, torch.Tensor, torch.Tensor, float], None] | None = None
    attended: int = 0

    def attend(self, layer: int, query: torch.Tensor, rule: ScoreRule) -> torch.Tensor:
        """Return the rows' attention in a layer, ``[1, heads, rows, head_dim]``."""
        window = self.windows[layer]
        out, lse = attend_by_table(query, self.table, layer, window=window, rule=rule)
        if self.observer is not None:
            self.observer(layer, query[0], lse, rule.scaling)
        return out[None]


def _attention_function(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    before: str | None,
    ragkv_pass: Pass | JointPass | TablePass | None = None,
    **given: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend for a pass, with its rows' positions in place of masks; or as without ragkv."""
    ragkv_pass = ragkv_pass or running_pass(module)
    if ragkv_pass is None:
        return ordinary_attention(before, module, query, key, value, attention_mask, **given)
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    unknown = [name for name in _UNKNOWN_ARGUMENTS if given.get(name) is not None]
    if attention_mask is not None or unknown:
        raise UnsupportedModelError(
            f"Layer {layer} attends with {', '.join(unknown) or 'a mask of its own'}, which "
            "ragkv's passes cannot reproduce: load the model with on_unsupported='full'."
        )
    window, rule = ragkv_pass.windows[layer], ScoreRule.given(**given)
    if given.get("sliding_window") != window:
        raise UnsupportedModelError(
            f"Layer {layer} attends within a window of {given.get('sliding_window')}, but this "
            f"model's configuration has {window}: correct its config.sliding_window."
        )
    ragkv_pass.attended += 1
    if isinstance(ragkv_pass, TablePass):
        out = ragkv_pass.attend(layer, query, rule)
    elif isinstance(ragkv_pass, JointPass):
        parts = torch.split(query, [len(one.rows) for one in ragkv_pass.passes], dim=2)
        out = torch.cat(
            [
                _attend(one, layer, part, cache.layers[layer].seen, rule)
                for one, cache, part in zip(
                    ragkv_pass.passes, ragkv_pass.caches, parts, strict=True
                )
            ],
            dim=2,
        )
    else:
        if ragkv_pass.tokens is not None:
            require_used(key.shape[2], ragkv_pass.tokens, "rows in the cache")
        out = _attend(ragkv_pass, layer, query, (key, value), rule)
    return out.transpose(1, 2).contiguous(), None


def _attend(
    one: Pass,
    layer: int,
    query: torch.Tensor,
    seen: tuple[torch.Tensor, torch.Tensor],
    rule: ScoreRule,
) -> torch.Tensor:
    """Return the attention of a pass's rows to keys and values, ``[1, heads, rows, head_dim]``."""
    (key, value), rows, window = seen, one.rows, one.windows[layer]
    if one.observer is not None:
        positions, masks = rows.positions, one.masks
        call = LayerCall(layer, query, key, value, positions, window, rule, masks)
        one.observer(call)
        if call.is_computed:
            return call.attended()
    sparse, unused, dtype = one.sparse, 0, query.dtype
    if one.last_row_ends and layer == len(one.windows) - 1:
        unused = len(rows) - 1
        query, sparse = query[:, :, unused:], None
        rows = Rows(rows.places[unused:], rows.positions[unused:])
    if rule.is_softmax and implementation_for("attention", query, key, value) == "rounded":
        query, key, value = query.bfloat16(), key.bfloat16(), value.bfloat16()
    if sparse is not None and window is None:
        out = sparse.attend(query, key, value, rule, layer=layer, rows=rows)
    else:
        out = attend(query, key, value, rows, window, rule)
    out = functional.pad(out, (0, 0, unused, 0)) if unused else out
    return out.to(dtype)


@contextmanager
def subset_attention(
    model: PreTrainedModel, one: Pass | JointPass | TablePass | None = None
) -> Iterator[None]:
    """Switch the model to ragkv's attention in the block.

    The model's lock must be held. Other threads' calls stay ordinary. This thread's calls are
    passes, given by the call (``ragkv_pass=``) or, for all calls, by ``one``.
    """
    try:
        with run_pass(backbone_of(model).config, _attention_function, one):
            yield
        if one is not None:
            require_used(one.attended, len(one.windows), _ATTENDED)
    except RuntimeError as error:
        unknown = type(error) is RuntimeError and not is_out_of_memory(error)
        if one is not None and not one.attended and unknown:
            raise UnsupportedModelError(f"{_ATTENDED}: none, but RuntimeError: {error}") from error
        raise


@contextmanager
def last_row_ends(
    model: PreTrainedModel,
    one: Pass | TablePass | None = None,
    number: torch.Tensor | None = None,
) -> Iterator[None]:
    """Run the last layer's feed-forward only for a pass's last row, which needs logits.

    With ``Pass(last_row_ends=True)``, that layer computes keys and values for all rows, and
    everything else for one. Other calls are unchanged, in other threads and in this one.

    Parameters
    ----------
    number
        ``[1]`` int64: the row's number, if padding follows it.
    """
    feed_forward = getattr(backbone_of(model).layers[-1], "mlp", None)
    if feed_forward is None:
        yield
        return

    def last_row(
        _: torch.nn.Module, given: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...] | None:
        """Cut ``[1, rows, hidden]`` to its last row; the other rows' results are never read."""
        if not is_innermost(one):
            return None
        rows = given[0]
        last = rows[:, -1:] if number is None else rows.index_select(1, number)
        return last, *given[1:]

    hook = feed_forward.register_forward_pre_hook(last_row)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def feed_forward_in_pieces(model: PreTrainedModel, one: Pass) -> Iterator[None]:
    """Run the layers' feed-forward for some of a pass's rows at a time, to save memory.

    Its intermediate results are several times as wide as a row. Other calls are unchanged, in other
    threads and in this one.
    """
    size = TOGETHER_CPU if one.rows.positions.device.type == "cpu" else TOGETHER
    if len(one.rows) <= size:
        yield
        return
    parts = [getattr(layer, "mlp", None) for layer in backbone_of(model).layers]
    free = [part for part in parts if part is not None and "forward" not in vars(part)]

    def forward(part: torch.nn.Module, rows: torch.Tensor, *given: Any, **named: Any) -> Any:
        whole = type(part).forward
        if not is_innermost(one) or rows.dim() != 3 or rows.shape[1] <= size or given or named:
            return whole(part, rows, *given, **named)
        first, *rest = torch.split(rows, size, dim=1)
        out = whole(part, first)
        if not isinstance(out, torch.Tensor):  # also returns a router's choices
            return whole(part, rows)
        return torch.cat([out, *(whole(part, piece) for piece in rest)], dim=1)

    for part in free:
        vars(part)["forward"] = partial(forward, part)
    try:
        yield
    finally:
        for part in free:
            del vars(part)["forward"]
