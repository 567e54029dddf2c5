"""Compute the versions of chunks that follow one another, in one pass of their own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ragkv.attend.forward import SubsetPass, subset_forward
from ragkv.attend.observe import LayerCall, attention_to_groups
from ragkv.chunk.kv import ChunkKV, LayeredKV
from ragkv.engine.corpus import Sink
from ragkv.model.loaded import ReusableModel
from ragkv.model.rotary import unrotate
from ragkv.prompt.tokens import IntArray
from ragkv.splice.layout import Layout, Origin
from ragkv.splice.place import splice
from ragkv.store.prefixes.node import Rows, copy_rows
from ragkv.store.versions.version import Version, context_impact


def joined_ids(sink: Sink, entries: Sequence[LayeredKV]) -> IntArray:
    """Return the ids of the sink and the chunks behind it, each as it was tokenised alone."""
    return np.concatenate([sink.ids, *(entry.token_ids for entry in entries)]).astype(np.int32)


def compute_versions(
    loaded: ReusableModel,
    sink: Sink,
    entries: Sequence[LayeredKV],
    expiries: Sequence[float | None],
) -> list[Version]:
    """Return a version of each chunk but the first, behind all chunks before it.

    The model reads the sink and the chunks, and nothing else: a version is a function of these
    texts, whatever prompt asked for it. Its lock must be held.

    Parameters
    ----------
    entries
        The chunks in order, of which only the tokens are read.
    expiries
        When each of them expires.
    """
    ids, first = joined_ids(sink, entries), len(sink.ids)
    sizes = np.array([len(entry.token_ids) for entry in entries])
    ends = first + np.cumsum(sizes)
    spans = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    origin = np.full(len(ids), Origin.FRESH, dtype=np.uint8)
    origin[:first] = Origin.SINK
    layout = Layout(ids, np.zeros((len(ids), 2), np.int32), first, (), origin, first)
    member = torch.zeros(len(ids), len(entries), dtype=torch.float32, device=loaded.device)
    for chunk, span in enumerate(spans):
        member[span, chunk] = 1.0
    paid = np.zeros((len(ids), len(entries)))

    def observe(call: LayerCall) -> None:
        paid[first:] += attention_to_groups(call, member).cpu().numpy()

    cache = splice(layout, sink.rows, loaded, 0)
    subset_forward(loaded, SubsetPass(ids, layout.fresh, cache, observer=observe))
    paid /= loaded.architecture.layers
    between = np.array([paid[span].sum(axis=0) for span in spans])
    impact = context_impact(between, sizes)
    keys, values = _unrotated((cache.keys, cache.values), first, len(ids), loaded)
    texts = [entry.text for entry in entries]
    out = []
    for at in range(1, len(entries)):
        entry, span = entries[at], spans[at]
        rows = copy_rows((keys, values), span.start - first, span.stop - first)
        order = np.argsort(-paid[span, :at].sum(axis=1), kind="stable")
        times = [time for time in expiries[: at + 1] if time is not None]
        out.append(
            Version(
                entry.text,
                ChunkKV(entry.text, entry.token_ids, entry.offsets, *rows),
                sink.fingerprint,
                tuple(texts[:at]),
                between[at, :at].copy(),
                float(between[at, at]),
                float(impact[at]),
                np.argsort(order, kind="stable"),
                min(times, default=None),
            )
        )
    return out


def _unrotated(rows: Rows, first: int, end: int, loaded: ReusableModel) -> Rows:
    """Return the rows of positions ``first`` to ``end``, keys unrotated."""
    kinds = loaded.architecture.rope_kinds
    tables = loaded.rotary.tables(kinds, torch.arange(first, end, device=loaded.device))
    keys, values = (part[:, :, first:end] for part in rows)
    turned = [unrotate(each, tables[kind]) for each, kind in zip(keys, kinds, strict=True)]
    return torch.stack(turned), values
