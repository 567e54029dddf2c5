"""AgentKVShift: probes and what follows them, against the formulas in plain loops."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from rotation import turned
from tiny import UNEVEN, ask, tiny_model
from transformers.cache_utils import DynamicCache

from ragkv import RagKV
from ragkv.engine.stream import Prefilled
from ragkv.model.calls import cache_argument
from ragkv.splice.layout import Origin
from ragkv_bench.methods.agentkvshift import METHOD

Make = Callable[..., RagKV]
PROMPT = ask(UNEVEN, "\n\nWhat does it say?")
FAMILIES = ["llama", "llama-yarn", "qwen3", "phi3"]
WINDOWED = ["mistral-window", "gemma3", "gemma2"]
"""Many of their tokens do not move at all in layer 1: the others alone can be ranked."""

KEYS, VALUES = 0, 1


@dataclass(slots=True, eq=False)
class Run:
    """One prompt as it was spliced, and as it was repaired."""

    engine: RagKV
    stale: Prefilled
    out: Prefilled

    @property
    def chunks(self) -> list[list[int]]:
        """The cached positions of every chunk but the first, which is exact."""
        origin = self.out.report.positions
        return [
            [at for at in range(use.start, use.end) if origin[at] != Origin.FRESH]
            for use in self.out.report.chunks[1:]
        ]

    def is_probe(self, at: int) -> bool:
        return self.out.report.positions[at] == Origin.RECOMPUTED

    def row(self, of: Prefilled, kind: int, layer: int, at: int) -> torch.Tensor:
        """One token's key, unrotated, or value: ``[kv_heads, head_dim]``."""
        held = of.cache.layers[layer]
        if kind == VALUES:
            return held.values[0, :, at]
        return turned(self.engine, layer, held.keys[0, :, at], at, -1)


def run(make_engine: Make, family: str, ratio: float) -> Run:
    engine = make_engine(family)
    engine.precompute(UNEVEN, method=METHOD)
    stale = engine.prefill(PROMPT, method=METHOD, recompute_ratio=0)
    return Run(engine, stale, engine.prefill(PROMPT, method=METHOD, recompute_ratio=ratio))


def distances(got: Run, family: str) -> list[dict[int, float]]:
    """How far each token's key and value are from a full prefill's in layer 1."""
    cache = DynamicCache()
    with torch.no_grad():
        model = tiny_model(family)
        model(torch.tensor([got.out.token_ids]), **cache_argument(model, cache))
    fresh, held = cache.layers[1], got.stale.cache.layers[1]
    return [
        {
            at: math.sqrt(float(((new[0, :, at] - old[0, :, at]) ** 2).sum()))
            for chunk in got.chunks
            for at in chunk
        }
        for new, old in ((fresh.keys, held.keys), (fresh.values, held.values))
    ]


@pytest.mark.parametrize(
    ("family", "ratio"),
    [*itertools.product(FAMILIES, (0.1, 0.3, 0.6)), *((family, 0.1) for family in WINDOWED)],
)
def test_every_chunk_has_its_share_of_probes(make_engine: Make, family: str, ratio: float) -> None:
    """The largest shares of keys' and values' probes whose union the ratio holds."""
    got = run(make_engine, family, ratio)
    far = distances(got, family)

    def probes(share: float) -> set[int]:
        found: set[int] = set()
        for chunk in got.chunks:
            count = math.ceil(share * len(chunk) - 1e-9)
            for kind in (KEYS, VALUES):
                found.update(sorted(chunk, key=lambda at: -far[kind][at])[:count])
        return found

    chosen = {at for chunk in got.chunks for at in chunk if got.is_probe(at)}
    cached = got.out.report.tokens.reused + got.out.report.tokens.recomputed
    assert len(chosen) == got.out.report.tokens.recomputed == round(ratio * cached)
    shares = sorted({rank / len(chunk) for chunk in got.chunks for rank in range(len(chunk) + 1)})
    fitting = max(share for share in shares if len(probes(share)) <= len(chosen))
    more = min((share for share in shares if share > fitting), default=1.0)
    assert probes(fitting) <= chosen <= probes(more)
    assert fitting > ratio / 3


@pytest.mark.parametrize("family", [*FAMILIES, *WINDOWED])
def test_the_others_follow_their_chunks_mean(make_engine: Make, family: str) -> None:
    got = run(make_engine, family, 0.1 if family in WINDOWED else 0.3)
    far = distances(got, family)
    layers = got.engine.loaded.model.config.num_hidden_layers
    assert layers > 2
    moved = 0
    for kind in (KEYS, VALUES):
        for chunk in got.chunks:
            order = sorted(chunk, key=lambda at: -far[kind][at])
            count = next((n for n, at in enumerate(order) if not got.is_probe(at)), len(order))
            probes = order[:count] or [at for at in chunk if got.is_probe(at)]
            for layer in range(2, layers):

                def shift(at: int, layer: int = layer, kind: int = kind) -> torch.Tensor:
                    after, before = (got.row(of, kind, layer, at) for of in (got.out, got.stale))
                    return after - before

                mean = sum(shift(at) for at in probes) / len(probes)
                for at in chunk:
                    if not got.is_probe(at):
                        expected = min(far[kind][at], 1.0) * mean
                        torch.testing.assert_close(shift(at), expected, atol=3e-5, rtol=1e-3)
                        moved += bool(expected.abs().max() > 1e-3)
    assert moved > 100


def test_layers_0_and_1_are_exact_and_the_first_chunk_stays(make_engine: Make) -> None:
    got = run(make_engine, "llama", 0.3)
    cache = DynamicCache()
    ids = torch.tensor([got.out.token_ids])
    with torch.no_grad():
        model = tiny_model("llama")
        model(ids, **cache_argument(model, cache))
    for layer in (0, 1):
        for full, held in (
            (cache.layers[layer].keys, got.out.cache.layers[layer].keys),
            (cache.layers[layer].values, got.out.cache.layers[layer].values),
        ):
            torch.testing.assert_close(held[:, :, : ids.shape[1]], full, atol=3e-5, rtol=1e-4)
    end = got.out.report.chunks[0].end
    kept = [at for at in range(end) if got.out.report.positions[at] != Origin.FRESH]
    for before, after in zip(got.stale.cache.layers[2:], got.out.cache.layers[2:], strict=True):
        assert torch.equal(before.keys[:, :, kept], after.keys[:, :, kept])
        assert torch.equal(before.values[:, :, kept], after.values[:, :, kept])


def test_low_precision_follows_too(make_engine: Make) -> None:
    engine = make_engine(dtype="bfloat16")
    engine.precompute(UNEVEN)
    out = engine.prefill(PROMPT, method=METHOD, recompute_ratio=0.3)
    assert out.cache.layers[0].keys.dtype == torch.bfloat16
    assert torch.isfinite(out.logits).all()
