"""APE: overlapping chunks, two-part attention, and decoding over them.

The reference computes every context by itself, behind the sink, with transformers' own
eager attention, and attends from the query with two softmaxes written out in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import pytest
import torch
from tiny import FAMILIES, some_chunks, tiny_model, tiny_tokenizer
from transformers import AttentionInterface, DynamicCache, PreTrainedModel

from ragkv import Prefilled, RagKV
from ragkv.attend.overlap import attend_overlapping
from ragkv.errors import ConfigError
from ragkv.measure.quality.fidelity import fidelity, reference
from ragkv.model.architecture import backbone_of
from ragkv.select import Method
from ragkv.splice.buffer import SplicedCache
from ragkv.splice.layout import Layout, Origin, Placed
from ragkv.splice.overlap import Overlap, OverlappedCache, Parallel, overlap_of

Make = Callable[..., RagKV]
TOLERANCE = 5e-5
SOME_FAMILIES = ["llama", "qwen2", "phi3", "llama-yarn", "mistral-window", "gemma3"]
JOINT = Method("joint", source="a test", parallel=Parallel(1.0, 1.0))
CHUNKS = [*some_chunks(2), some_chunks(4, words=25)[3]]
QUESTION = "\n\nWhat does the text say?"


def ask(chunks: list[str]) -> list[dict[str, str]]:
    return [{"role": "user", "content": "\n\n".join(chunks) + QUESTION}]


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


def plan(
    head: int, contexts: list[tuple[int, int]], query: int, parallel: Parallel | None = None
) -> Overlap:
    """Plan ``head`` tokens, chunks each with a gap behind it, and ``query`` tokens."""
    placed, at = [], head
    for chunk, gap in contexts:
        rows = np.arange(chunk)
        placed.append(Placed(None, rows, rows + at, at, at + chunk))  # type: ignore[arg-type]
        at += chunk + gap
    ids = np.zeros(at + query, np.int32)
    origin = np.full(len(ids), Origin.FRESH, np.uint8)
    layout = Layout(ids, np.zeros((len(ids), 2), np.int32), head, tuple(placed), origin)
    return overlap_of(layout, parallel or Parallel(), torch.device("cpu"))


def two_softmaxes(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    context: list[int],
    rest: list[int],
    parallel: Parallel,
) -> torch.Tensor:
    """Attend from one row of one head, as the paper says; ``query`` is scaled already."""
    parts, masses = [], []
    for seen, temperature, factor in (
        (context, parallel.temperature, parallel.scale * parallel.temperature),
        (rest, 1.0, 1.0),
    ):
        if seen:
            scores = keys[seen].double() @ query.double() / temperature
            parts.append(torch.softmax(scores, 0) @ values[seen].double())
            masses.append(factor * scores.logsumexp(0))
    return torch.softmax(torch.stack(masses), 0) @ torch.stack(parts)


# ---- the attention by itself


@pytest.mark.parametrize("parallel", [Parallel(1.0, 1.0), Parallel(), Parallel(0.5, 1.3)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("window", [None, 6])
def test_rows_attend_in_two_parts(
    heads: int, kv_heads: int, parallel: Parallel, window: int | None
) -> None:
    torch.manual_seed(0)
    overlap = plan(3, [(6, 1), (9, 2), (4, 0)], 5, parallel)
    owner = [None] * 3 + [0] * 7 + [1] * 11 + [2] * 4  # which context a token belongs to
    place = [0, 1, 2, *range(3, 10), *range(3, 14), *range(3, 7), *range(14, 22)]
    tokens, size = 33, 16  # three of them generated
    rows = [1, 9, 14, 19, 20, 25, 29, 30, 32]
    query = torch.randn(1, heads, len(rows), size)
    key, value = torch.randn(2, 1, kv_heads, tokens, size)
    out = attend_overlapping(
        query, key, value, torch.tensor(rows), overlap=overlap, window=window, scaling=0.3
    )
    for i, row in enumerate(rows):
        seen = [j for j in range(row + 1) if window is None or place[j] > place[row] - window]
        context = [j for j in seen if 3 <= j < 25]
        rest = [j for j in seen if not 3 <= j < 25]
        if row < 25:  # a row of a context: one softmax over the head and its own context
            rest, context = rest + [j for j in context if owner[j] == owner[row]], []
        for head in range(heads):
            of = head // (heads // kv_heads)
            expected = two_softmaxes(
                query[0, head, i] * 0.3, key[0, of], value[0, of], context, rest, parallel
            )
            assert distance(out[0, head, i].double(), expected) < 1e-5


def test_temperature_and_scale_of_one_are_one_softmax() -> None:
    torch.manual_seed(1)
    overlap = plan(2, [(40, 0), (30, 0)], 200, Parallel(1.0, 1.0))
    rows = torch.arange(72, 272)  # more than one block of rows
    query, key = torch.randn(1, 4, 200, 8), torch.randn(1, 2, 272, 8)
    value = torch.randn(1, 2, 272, 8)
    out = attend_overlapping(query, key, value, rows, overlap=overlap, window=None, scaling=0.5)
    scores = query @ key.repeat_interleave(2, 1).transpose(2, 3) * 0.5
    scores = scores.masked_fill(torch.arange(272) > rows[:, None], -math.inf)
    joint = torch.softmax(scores, -1) @ value.repeat_interleave(2, 1)
    torch.testing.assert_close(out, joint, atol=1e-5, rtol=1e-5)


def test_positions_overlap_and_the_query_follows_the_longest() -> None:
    overlap = plan(2, [(3, 1), (2, 0)], 2)
    assert (overlap.first, overlap.query) == (2, 8)
    assert overlap.at(torch.arange(12)).tolist() == [0, 1, 2, 3, 4, 5, 2, 3, 6, 7, 8, 9]
    assert overlap.begins.tolist() == [2, 2, 2, 2, 2, 2, 6, 6, 2, 2]


def test_one_chunk_stays_where_it_is_and_the_last_token_is_of_the_query() -> None:
    overlap = plan(2, [(5, 0)], 0)
    assert overlap.query == 6
    assert overlap.at(torch.arange(9)).tolist() == list(range(9))


# ---- in the engine


@pytest.mark.parametrize("family", FAMILIES)
def test_one_chunk_and_one_softmax_are_full_prefill(make_engine: Make, family: str) -> None:
    engine = make_engine(family)
    chunk = CHUNKS[:1]
    engine.precompute(chunk)
    out = engine.prefill(ask(chunk), method=JOINT)
    assert isinstance(out.cache, OverlappedCache)
    assert out.report.reused_tokens > 80
    assert out.report.recomputed_tokens == 0
    with torch.no_grad():
        full = engine.model(torch.tensor([out.token_ids])).logits[0, -1]
    assert distance(out.logits, full) < TOLERANCE
    assert distance(engine.prefill(ask(chunk), method="ape").logits, full) > 10 * TOLERANCE


def test_a_chunk_alone_without_a_sink(make_engine: Make) -> None:
    engine = make_engine()
    engine.precompute(CHUNKS[:1], sink="")
    out = engine.prefill(CHUNKS[0], method=JOINT, sink="")
    assert (out.report.sink_tokens, out.report.fresh_tokens) == (0, 1)
    with torch.no_grad():
        full = engine.model(torch.tensor([out.token_ids])).logits[0, -1]
    assert distance(out.logits, full) < TOLERANCE


class Slow:
    """APE over a prompt's tokens, from scratch, with a model of its own."""

    def __init__(self, family: str, out: Prefilled, parallel: Parallel) -> None:
        self._model = tiny_model(family, "eager")
        self._ids = out.token_ids
        self._starts = [use.start for use in out.report.chunks]
        self._first, self._query = self._starts[0], out.report.chunks[-1].end
        self._parallel = parallel
        assert self._first == out.report.sink_tokens

    @torch.no_grad()
    def logits(self, answer: list[int]) -> torch.Tensor:
        """Return ``[query and answer tokens, vocab]``."""
        bounds = [*self._starts, self._query]
        contexts = [self._ids[a:b] for a, b in pairwise(bounds)]
        head = self._ids[: self._first]
        alone = [self._run(head + context) for context in contexts]
        cache = DynamicCache()
        for layer in range(self._model.config.num_hidden_layers):
            joined = []
            for name in ("keys", "values"):
                states = [getattr(kv.layers[layer], name) for kv in alone]
                parts = [states[0][:, :, : self._first], *(x[:, :, self._first :] for x in states)]
                joined.append(torch.cat(parts, 2))
            cache.update(*joined, layer)
        asked = self._ids[self._query :] + answer
        start = self._first + max(map(len, contexts))
        positions = torch.arange(start, start + len(asked))
        places = list(range(self._first))
        places += [self._first + at for context in contexts for at in range(len(context))]
        with self._attention([*places, *positions.tolist()]):
            out = self._model(
                torch.tensor([asked]), position_ids=positions[None], past_key_values=cache
            )
        return out.logits[0]

    def _run(self, ids: list[int]) -> DynamicCache:
        cache = DynamicCache()
        self._model(torch.tensor([ids]), past_key_values=cache)
        return cache

    @contextmanager
    def _attention(self, places: list[int]) -> Iterator[None]:
        def attention(
            _: torch.nn.Module,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            mask: torch.Tensor | None,
            scaling: float,
            sliding_window: int | None = None,
            **__: object,
        ) -> tuple[torch.Tensor, None]:
            assert mask is None
            group, before = query.shape[1] // key.shape[1], key.shape[2] - query.shape[2]
            out = torch.empty_like(query)
            for i in range(query.shape[2]):
                row = before + i
                low = -1 if sliding_window is None else places[row] - sliding_window
                seen = [j for j in range(row + 1) if places[j] > low]
                context = [j for j in seen if self._first <= j < self._query]
                rest = [j for j in seen if not self._first <= j < self._query]
                for head in range(query.shape[1]):
                    out[0, head, i] = two_softmaxes(
                        query[0, head, i] * scaling,
                        key[0, head // group],
                        value[0, head // group],
                        context,
                        rest,
                        self._parallel,
                    )
            return out.transpose(1, 2), None

        AttentionInterface.register("slow_ape", attention)
        self._model.config._attn_implementation = "slow_ape"
        yield
        self._model.config._attn_implementation = "eager"


@pytest.mark.parametrize("parallel", [Parallel(1.0, 1.0), Parallel()], ids=["joint", "ape"])
@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_several_chunks_and_decoding_are_the_references(
    make_engine: Make, family: str, parallel: Parallel
) -> None:
    engine = make_engine(family)
    engine.precompute(CHUNKS)
    method = Method("some", source="a test", parallel=parallel)
    out = engine.prefill(ask(CHUNKS), method=method)
    assert out.report.reused_tokens > 200
    slow = Slow(family, out, parallel)
    assert distance(out.logits, slow.logits([])[-1]) < TOLERANCE
    more = [7, 301, 44, 90]
    with torch.no_grad(), out.decoding():  # one token, then several at once
        steps = [
            engine.model(torch.tensor([part]), past_key_values=out.cache).logits[0]
            for part in (more[:1], more[1:])
        ]
    expected = slow.logits(more)[-len(more) :]
    assert distance(torch.cat(steps), expected) < TOLERANCE


def test_text_between_chunks_belongs_to_the_one_before_it(make_engine: Make) -> None:
    """The second chunk is not known: it stands in the first one's context."""
    engine = make_engine()
    engine.precompute([CHUNKS[0], CHUNKS[2]])
    out = engine.prefill(ask(CHUNKS), method="ape")
    assert [use.text for use in out.report.chunks] == [CHUNKS[0], CHUNKS[2]]
    assert out.report.fresh_tokens > 80
    assert distance(out.logits, Slow("llama", out, Parallel()).logits([])[-1]) < TOLERANCE


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_generation_is_greedy_decoding_by_the_reference(make_engine: Make, family: str) -> None:
    engine = make_engine(family)
    engine.precompute(CHUNKS)
    out = engine.prefill(ask(CHUNKS), method="ape")
    slow, answer = Slow(family, out, Parallel()), []
    for _ in range(4):
        answer.append(int(slow.logits(answer)[-1].argmax()))
    drawn = engine.generate(ask(CHUNKS), method="ape", max_new_tokens=4)
    assert drawn.token_ids == answer
    with engine.stream(ask(CHUNKS), method="ape", max_new_tokens=4) as stream:
        list(stream)
        assert stream.completion.token_ids == answer
    untouched(engine.model)


def untouched(model: PreTrainedModel) -> None:
    """Check that no hook and no attention of ours is left."""
    for module in (model, backbone_of(model)):
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
        assert module.config._attn_implementation == "sdpa"


def test_fidelity_decodes_as_the_method_does(make_engine: Make) -> None:
    engine = make_engine()
    engine.precompute(CHUNKS)
    against = reference(engine, engine.prefill(ask(CHUNKS), method="full"), tokens=4)
    out = engine.prefill(ask(CHUNKS), method="ape")
    rows = Slow("llama", out, Parallel()).logits(list(against.token_ids[:-1]))[-4:]
    p, log_q = against.log_probs.exp(), torch.log_softmax(rows.double(), -1)
    kl = float((p * (against.log_probs - log_q)).sum(-1).mean())
    assert kl > 1e-3
    assert fidelity(engine, out, against).kl == pytest.approx(kl, rel=1e-4)
    answer = reference(engine, engine.prefill(ask(CHUNKS), method="ape"), tokens=4).token_ids
    drawn = engine.generate(ask(CHUNKS), method="ape", max_new_tokens=4)
    assert list(answer) == drawn.token_ids


def test_the_ratio_counts_from_one_on(make_engine: Make) -> None:
    engine = make_engine()
    engine.precompute(CHUNKS)
    none = engine.prefill(ask(CHUNKS), method="ape", recompute_ratio=0.0)
    some = engine.prefill(ask(CHUNKS), method="ape", recompute_ratio=0.7)
    assert some.report.recomputed_tokens == 0
    assert torch.equal(none.logits, some.logits)
    full = engine.generate(ask(CHUNKS), method="full", max_new_tokens=6)
    ape = engine.generate(ask(CHUNKS), method="ape", max_new_tokens=6, recompute_ratio=1.0)
    assert ape.report.recomputed_tokens > 200
    assert ape.token_ids == full.token_ids


def test_a_cache_of_overlapping_chunks_is_not_run_by_mistake(make_engine: Make) -> None:
    engine = make_engine()
    engine.precompute(CHUNKS)
    out = engine.prefill(ask(CHUNKS), method="ape")
    token = torch.tensor([[7]])
    with torch.no_grad():
        with pytest.raises(RuntimeError, match=r"prefilled\.decoding"):
            engine.model(token, past_key_values=out.cache)
        with out.decoding(), pytest.raises(RuntimeError, match="leave"):
            engine.model(token)
        untouched(engine.model)
        with pytest.raises(ZeroDivisionError), out.decoding():
            raise ZeroDivisionError
        untouched(engine.model)
        assert out.cache.get_seq_length() == len(out.token_ids)
        with out.decoding():
            ours = engine.model(token, past_key_values=out.cache).logits[0]
    assert distance(ours, Slow("llama", out, Parallel()).logits([7])[-1:]) < TOLERANCE


def test_a_failing_step_leaves_the_model_as_it_was(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    engine.precompute(CHUNKS)

    def explode(*_: object, **__: object) -> torch.Tensor:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr("ragkv.attend.attention.attend_overlapping", explode)
        with pytest.raises(ZeroDivisionError):
            engine.generate(ask(CHUNKS), method="ape", max_new_tokens=2)
    untouched(engine.model)


def test_other_methods_need_no_decoding(make_engine: Make) -> None:
    engine = make_engine()
    engine.precompute(CHUNKS)
    before = engine.prefill(ask(CHUNKS), method="reuse").logits
    engine.generate(ask(CHUNKS), method="ape", max_new_tokens=2)
    out = engine.prefill(ask(CHUNKS), method="reuse")
    assert torch.equal(out.logits, before)
    assert type(out.cache) is SplicedCache
    with out.decoding():
        untouched(engine.model)
    with torch.no_grad():
        engine.model(torch.tensor([[7]]), past_key_values=out.cache)


def test_bfloat16_stays_close() -> None:
    model = tiny_model().to(torch.bfloat16)
    with RagKV(model, tiny_tokenizer(), store=":memory:") as engine:
        engine.precompute(CHUNKS)
        out = engine.prefill(ask(CHUNKS), method="ape")
        assert distance(out.logits, Slow("llama", out, Parallel()).logits([])[-1]) < 0.15


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="above 0"):
        Parallel(temperature=0.0)
    with pytest.raises(ConfigError, match="omit score"):
        Method(
            "both",
            source="a test",
            score=lambda scene: np.zeros(len(scene.layout.cached), np.float32),
            parallel=Parallel(),
        )
