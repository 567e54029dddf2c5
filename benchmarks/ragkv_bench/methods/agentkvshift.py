"""Probe tokens in every chunk, whose mean shift the chunk's other tokens follow.

AgentKVShift, arXiv 2607.21604: the difference between a chunk's cached and real rows is mostly one
shift that all of its tokens have in common. Layer 0 is computed in full, then layer 1's keys and
values are; ``d`` is how far a token's moved there, keys and values apart. Of every chunk the share
of tokens with the largest ``d`` of keys, and the same share by values, are recomputed: the probes.
In every layer the mean shift of a chunk's probes is added to its other tokens, times ``min(d, 1)``
(:mod:`ragkv_bench.methods.mean_shift`).

The probes, the shift in common and its weight of at most 1 are from summaries of the abstract; the
formulas of probes and weight follow what a reimplementation says of the paper's algorithm 1.
Assumed here: the layer is layer 1, the first whose rows depend on other tokens; ``d`` is the
Euclidean distance over all KV heads; keys' shifts are averaged before rotation; the recompute
ratio counts all probes.
"""

from functools import partial

import numpy as np

from ragkv.select.method import FloatArray, Method, Scene, Scored
from ragkv.select.rules.cacheblend import deviations
from ragkv_bench.methods.mean_shift import MeanShift


def score(scene: Scene) -> Scored:
    """Return ``[cached]``: minus the share of its chunk at which a token becomes a probe."""
    layout = scene.layout
    moved = np.sqrt(deviations(scene))
    stale = layout.cached >= layout.exact
    scores = np.zeros(len(stale), dtype=np.float32)
    for piece in layout.placed:
        own = np.searchsorted(layout.cached, piece.slots)
        own = own[stale[own]]
        best = np.minimum(_ranks(moved[0, own]), _ranks(moved[1, own]))
        scores[own] = -best / max(1, len(own))
    return Scored(scores, partial(MeanShift, layout, moved, scene.loaded))


def _ranks(moved: FloatArray) -> FloatArray:
    """Return ``[tokens]``: how many tokens moved further."""
    ranks = np.empty(len(moved), dtype=np.float32)
    ranks[np.argsort(-moved, kind="stable")] = np.arange(len(moved))
    return ranks


METHOD = Method("agentkvshift", score=score)
