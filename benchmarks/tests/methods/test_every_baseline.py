"""What every baseline must keep: exact at ratio 1, and as large a share as the ratio says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tiny import ask, some_chunks

from ragkv import RagKV
from ragkv.errors import UnknownMethodError
from ragkv_bench.methods import BASELINES, named

CHUNKS = some_chunks(3)


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_ratio_one_is_full_prefill_and_shares_rise(
    make_engine: Callable[..., RagKV], name: str, family: str
) -> None:
    engine, settings = make_engine(family), {"method": named(name)}
    engine.precompute(CHUNKS, **settings)
    ratios = (0.0, 0.2, 0.5, 1.0)
    outs = [engine.prefill(ask(CHUNKS), recompute_ratio=ratio, **settings) for ratio in ratios]
    assert all(out.report.method == name for out in outs)
    shares = [out.report.effective_ratio for out in outs]
    assert shares == pytest.approx(ratios, abs=0.01)
    assert outs[1].report.chunks[0].recomputed == 0  # it is exact
    with torch.no_grad():
        full = engine.loaded.model(torch.tensor([outs[-1].token_ids])).logits[0, -1]
    torch.testing.assert_close(outs[-1].logits, full, atol=5e-5, rtol=1e-4)


def test_a_name_alone_is_none_of_the_cores(make_engine: Callable[..., RagKV]) -> None:
    assert named("query") == "query"
    with pytest.raises(UnknownMethodError, match=r"ragkv_bench\.methods"):
        make_engine().prefill("Hello", method="prophetkv")
