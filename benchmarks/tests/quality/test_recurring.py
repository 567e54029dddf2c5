"""Requests over recurring chunks: how they are drawn, and what is said of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from evaluations import small_data

from ragkv import RagKV
from ragkv.errors import ConfigError
from ragkv_bench.quality.recurring import compare_recurring, draw_requests

Make = Callable[..., RagKV]


def test_popular_chunks_recur_and_tend_to_be_first() -> None:
    data = small_data(4)
    drawn = draw_requests(data, 300, chunks=2, alpha=1.5, seed=1)
    assert drawn == draw_requests(data, 300, chunks=2, alpha=1.5, seed=1)
    by_id = {example.id: example for example in data.examples}
    for request in drawn:
        assert len(set(request.chunks)) == 2
        assert set(request.chunks) <= set(by_id[request.id].chunks)
    counts = Counter(request.id for request in drawn)
    assert len(counts) == 4
    assert counts.most_common(1)[0][1] > 120
    first = Counter(request.chunks[0] for request in drawn)
    for example in data.examples:
        assert first[example.chunks[0]] == max(first[chunk] for chunk in example.chunks)


def test_versions_serve_the_later_requests(make_engine: Make) -> None:
    found = compare_recurring(
        make_engine(), small_data(), 16, methods=["query", "cachecraft"], ratios=["auto", 0.0]
    )
    assert found.requests == 16
    rows = {(row.method, row.ratio, row.versions, row.half): row for row in found.rows}
    assert len(rows) == len(found.rows) == 16
    for row in found.rows:
        assert row.requests == 8
        assert sum(row.hits.values()) == 8 * 3
        assert row.hits.get("version", 0) == 0 or row.versions
        assert row.kl_ci95 is not None
        assert row.kl_ci95[0] <= row.kl <= row.kl_ci95[1]
    for method in ("query", "cachecraft"):
        assert (
            rows[method, 0.0, True, 2].hits["version"] > rows[method, 0.0, True, 1].hits["version"]
        )
        assert rows[method, 0.0, True, 2].kl < rows[method, 0.0, False, 2].kl
    cachecraft = (rows["cachecraft", "auto", versions, 2] for versions in (False, True))
    without, with_versions = (row.share_recomputed for row in cachecraft)
    assert with_versions < without


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"methods": ["epic"]}, "epic uses no"),
        ({"methods": ["query"], "requests": 1}, "two halves"),
    ],
)
def test_what_cannot_be_compared_is_refused(make_engine: Make, given: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compare_recurring(make_engine(), small_data(), **{"requests": 4, **given})
