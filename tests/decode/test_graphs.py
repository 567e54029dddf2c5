"""Steps as captured graphs: the same tokens, whoever shares them, and never a stale one."""

import copy
import gc
import logging
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from changed_models import other_attention, other_layer, other_weights
from recording import Recording
from tiny import FAMILIES, ask, some_chunks, tiny_tokenizer

from ragkv import RagKV
from ragkv.attend import graphs
from ragkv.attend.graphs import graphs_for
from ragkv.decode import batch

CHUNKS = some_chunks(3)
PROMPTS = [ask(CHUNKS[:count], question) for count, question in ((3, "What now?"), (2, "Why so?"))]
EAGER = {"gemma2": "a cap on attention's scores", "gpt-oss": "which experts"}
"""Families whose steps cannot be captured, and the reason that is logged."""


@pytest.fixture
def recorded(monkeypatch):
    """Graphs on a CPU, by a recorder that calls the function again."""
    monkeypatch.setitem(graphs.RECORDERS, "cpu", Recording)
    monkeypatch.setattr(Recording, "captured", 0)


def replays(kv: RagKV) -> int:
    found = graphs_for(kv.loaded)
    return 0 if found is None else found.replays


def answers(kv: RagKV, **how) -> list[list[int]]:
    kv.precompute(CHUNKS)
    how = {"max_new_tokens": 12, "ignore_eos": True, **how}
    return [list(kv.generate(prompt, **how).token_ids) for prompt in PROMPTS]


@pytest.mark.parametrize("drafts", [True, False])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_draws_the_same_tokens(make_engine, monkeypatch, caplog, family, drafts):
    expected = answers(make_engine(family), drafts=drafts)
    monkeypatch.setitem(graphs.RECORDERS, "cpu", Recording)
    kv = make_engine(family)
    assert answers(kv, drafts=drafts) == expected
    if family in EAGER:
        assert not replays(kv)
        assert caplog.text.count("passes are not captured") == 1
        assert EAGER[family] in caplog.text
    else:
        assert replays(kv) > 4


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - EAGER.keys()))
def test_the_same_tokens_are_recomputed(make_engine, monkeypatch, family):
    def prefilled(kv):
        kv.precompute(CHUNKS)
        return [kv.prefill(ask(CHUNKS, f"\n\n{n} What?"), recompute_ratio=0.2) for n in range(4)]

    expected = prefilled(make_engine(family))
    monkeypatch.setitem(graphs.RECORDERS, "cpu", Recording)
    kv = make_engine(family)
    found = prefilled(kv)
    assert replays(kv) == (0 if kv.loaded.architecture.position_limit else 3)
    for one, other in zip(found, expected, strict=True):
        assert one.report.positions == other.report.positions
        assert one.report.tokens.recomputed > 5
        torch.testing.assert_close(one.logits, other.logits, atol=5e-5, rtol=1e-4)


def test_a_number_of_rows_is_captured_at_its_second_use(make_engine, recorded):
    kv = make_engine()
    answers(kv, drafts=False, recompute_ratio=0)
    assert Recording.captured == 2  # steps of one row, and the second prompt
    steps = 2 * 11
    assert replays(kv) == steps - 1 + 1


def test_answers_together_draw_the_same_tokens(make_engine, recorded):
    alone = answers(make_engine())
    kv = make_engine()
    answers(kv)
    with ThreadPoolExecutor(6) as pool:
        drawn = list(
            pool.map(
                lambda prompt: list(
                    kv.generate(prompt, max_new_tokens=12, ignore_eos=True).token_ids
                ),
                PROMPTS * 3,
            )
        )
    assert drawn == alone * 3


def test_a_buffer_that_grows_is_found_again(make_engine, recorded, monkeypatch):
    monkeypatch.setattr("ragkv.splice.buffer._SPARE_ROWS", 1)
    monkeypatch.setattr("ragkv.splice.buffer._MOST_SPARE_ROWS", 1)
    kv, plain = make_engine(), make_engine()
    before = answers(kv, max_new_tokens=40)
    graphs_for(plain.loaded)._refused = True
    assert before == answers(plain, max_new_tokens=40)


def test_a_graph_holds_no_prompts_memory(make_engine, recorded):
    kv = make_engine()
    kv.precompute(CHUNKS)
    for _ in range(3):
        out = kv.prefill(PROMPTS[0], recompute_ratio=0.2)
    assert replays(kv)
    held = weakref.ref(out.cache)
    memory = weakref.ref(out.cache.keys)
    del out
    gc.collect()
    assert held() is None
    assert memory() is None


def changed_in_place(kv: RagKV) -> None:
    with torch.no_grad():
        kv.loaded.model.model.layers[2].mlp.up_proj.weight.mul_(-2)


@pytest.mark.parametrize(
    "change",
    [other_weights, other_layer, changed_in_place, other_attention],
    ids=lambda f: f.__name__,
)
def test_a_changed_model_is_never_replayed_stale(make_engine, recorded, change):
    kv = make_engine()
    answers(kv, method="full")
    with kv.turn():
        change(kv)
    counted = replays(kv)
    found = answers(kv, method="full")
    assert replays(kv) > counted
    with RagKV(copy.deepcopy(kv.loaded.model), tiny_tokenizer(), store=":memory:") as fresh:
        graphs_for(fresh.loaded)._refused = True
        assert found == answers(fresh, method="full")


def test_a_hook_of_somebody_else_is_called_in_every_step(make_engine, recorded, caplog):
    kv = make_engine()
    answers(kv)
    calls = []
    handle = kv.loaded.model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    with caplog.at_level(logging.WARNING):
        answers(kv, drafts=False)
    assert len(calls) >= 2 * 12
    assert "a hook on model.layers.0" in caplog.text
    handle.remove()
    counted = replays(kv)
    answers(kv)
    assert replays(kv) > counted


def test_a_capture_that_fails_leaves_steps_as_they_are(make_engine, recorded, monkeypatch, caplog):
    def fails(self, compute):
        raise RuntimeError("operation not permitted when stream is capturing")

    expected = answers(make_engine())
    monkeypatch.setattr(Recording, "capture", fails)
    kv = make_engine()
    assert answers(kv) == expected
    assert caplog.text.count("not permitted") == 1


def test_graphs_are_freed_with_the_last_engine(make_engine, recorded):
    kv = make_engine()
    answers(kv)
    found = graphs_for(kv.loaded)
    assert found._graphs
    kv.close()
    assert not found._graphs


def test_memory_that_runs_out_in_a_capture_leaves_the_pass_to_be_computed(
    make_engine, recorded, monkeypatch, caplog
):
    captures = []

    def lacks(self, compute):
        captures.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    expected = answers(make_engine())
    with monkeypatch.context() as short:
        short.setattr(Recording, "capture", lacks)
        kv = make_engine()
        assert answers(kv) == expected
    assert 1 < len(captures) <= 2 * len(PROMPTS)  # again for each prompt and each answer
    assert answers(kv) == expected
    assert replays(kv)
    assert "not captured" not in caplog.text


def test_no_step_is_computed_within_a_capture(make_engine, recorded, monkeypatch):
    """A graph that is replayed while another is captured is an error of CUDA's."""
    monkeypatch.setattr(batch, "MAX_WAIT_S", 0)
    capturing, nested = [], []
    capture, compute = Recording.capture, batch._compute

    def noting(self, work):
        capturing.append(1)
        try:
            return capture(self, work)
        finally:
            capturing.pop()

    def counting(answers):
        nested.append(bool(capturing))
        return compute(answers)

    monkeypatch.setattr(Recording, "capture", noting)
    monkeypatch.setattr(batch, "_compute", counting)
    kv = make_engine()
    kv.precompute(CHUNKS)
    with kv.stream(PROMPTS[1], max_new_tokens=40, ignore_eos=True) as stream:
        next(stream)
        for _ in range(3):
            kv.prefill(PROMPTS[0], recompute_ratio=0.2)
        list(stream)
    assert Recording.captured >= 2
    assert nested
    assert not any(nested)


def test_a_graph_that_was_captured_in_inference_mode_serves_others(make_engine, recorded):
    expected = answers(make_engine())
    kv = make_engine()
    with torch.inference_mode():
        assert answers(kv) == expected
    counted = replays(kv)
    assert counted
    assert answers(kv) == expected
    assert replays(kv) > counted
