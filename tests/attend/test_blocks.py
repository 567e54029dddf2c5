"""Sparse attention of decoding steps: against plain loops, and in whole answers."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from pairwise import all_pairs
from tiny import FAMILIES, random_model, some_chunks, tiny_tokenizer
from transformers import LlamaConfig

from ragkv import RagKV, ReuseConfig, SparseDecoding
from ragkv.attend import blocks as blocks_module
from ragkv.attend.blocks import BlockAttention
from ragkv.attend.rows import Rows, attend
from ragkv.attend.score_rule import ScoreRule
from ragkv.errors import ConfigError
from ragkv.history.tree import ComputedPrompt, PrefixTree

CHUNKS = some_chunks(3)
PROMPT = [{"role": "user", "content": "\n\n".join(CHUNKS) + "\n\nWhat does it say?"}]
SMALL = SparseDecoding(second_block_count=4, initial_window=4, local_window=12)
NONE = np.zeros(0, np.int64)
HEADS, KV_HEADS, WIDTH, SCALING = 6, 2, 16, 0.25
ANSWER = {"max_new_tokens": 24, "ignore_eos": True, "drafts": False}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 8 tokens that every step chooses anew."""
    monkeypatch.setattr(blocks_module, "BLOCK_SIZE", 8)
    monkeypatch.setattr(blocks_module, "TOKEN_STEP", 1)


def tensors(tokens: int, rows: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Return a query, keys and values, as a layer's attention has them."""
    torch.manual_seed(seed)
    key, value = torch.randn(2, 1, KV_HEADS, tokens, WIDTH)
    return 2 * torch.randn(1, HEADS, rows, WIDTH), key, value


def attended(
    blocks: BlockAttention, parts: tuple[torch.Tensor, ...], repaired: np.ndarray = NONE
) -> torch.Tensor:
    """Run one step of one layer over the last rows."""
    query, key, value = parts
    places = np.arange(key.shape[2] - query.shape[2], key.shape[2])
    blocks.begin(repaired, int(places[0]))
    return blocks.attend(
        query, key, value, ScoreRule(SCALING), layer=0, rows=Rows.on("cpu", places)
    )


def bound(query: torch.Tensor, keys: torch.Tensor) -> float:
    """Bound the scores of one query ``[head_dim]`` and a block's keys."""
    scores = [0.0]
    for at, number in enumerate(query.tolist()):
        channel = keys[:, at]
        scores.append(float(max(number * channel.min(), number * channel.max())))
    return sum(scores)


def expected(settings: SparseDecoding, parts: tuple[torch.Tensor, ...], size: int) -> torch.Tensor:
    """Attend by plain loops: score all blocks, and attend to the keys that are read."""
    query, key, value = parts
    rows, tokens, group = query.shape[2], key.shape[2], HEADS // KV_HEADS
    begin = settings.initial_window
    count = (tokens - rows - begin - settings.local_window) // size
    out = torch.empty_like(query)
    for head in range(KV_HEADS):
        shares = torch.zeros(count)
        for own in range(head * group, head * group + group):
            for row in range(rows):
                scores = [
                    bound(
                        query[0, own, row] * SCALING,
                        key[0, head, begin + block * size : begin + block * size + size],
                    )
                    for block in range(count)
                ]
                shares += torch.softmax(torch.tensor(scores), dim=0)
        best = shares.topk(settings.second_block_count).indices.tolist()
        read = torch.ones(tokens, dtype=torch.bool)
        for block in range(count):
            at = begin + block * size
            read[at : at + size] = block in best
        for own in range(head * group, head * group + group):
            for row in range(rows):
                seen = read & (torch.arange(tokens) <= tokens - rows + row)
                weights = torch.softmax(key[0, head, seen] @ query[0, own, row] * SCALING, dim=0)
                out[0, own, row] = weights @ value[0, head, seen]
    return out


@pytest.mark.usefixtures("each_implementation")
@pytest.mark.parametrize(
    ("rows", "tokens", "size", "windows"),
    all_pairs([1, 5], [60, 133], [1, 4, 8], [(0, 0), (4, 12), (7, 1)]),
)
def test_steps_read_the_blocks_that_match_best(monkeypatch, rows, tokens, size, windows):
    monkeypatch.setattr(blocks_module, "BLOCK_SIZE", size)
    parts = tensors(tokens, rows)
    initial, local = windows
    settings = SparseDecoding(second_block_count=3, initial_window=initial, local_window=local)
    ours = attended(BlockAttention(settings, 1), parts)
    torch.testing.assert_close(ours, expected(settings, parts, size), atol=2e-5, rtol=1e-4)


@pytest.mark.usefixtures("each_implementation")
def test_bounds_follow_the_keys():
    """Also of rows that an answer adds, and of rows that a step repairs."""
    layer = BlockAttention(SMALL, 1)
    whole = tensors(200, 1)
    for tokens in (120, 121, 160, 199):
        parts = tensors(tokens, 1)[0], *(part[:, :, :tokens] for part in whole[1:])
        torch.testing.assert_close(
            attended(layer, parts), attended(BlockAttention(SMALL, 1), parts), atol=0, rtol=0
        )
    repaired = np.array([2, 5, 90, 91, 198])
    whole[1][:, :, repaired] = 3 * torch.randn(1, KV_HEADS, len(repaired), WIDTH)
    everything = attended(layer, whole, repaired)
    dense = attend(*whole, Rows.on("cpu", np.array([199])), None, ScoreRule(SCALING))
    assert torch.equal(everything, dense)
    assert torch.equal(attended(layer, whole), attended(BlockAttention(SMALL, 1), whole))


def test_blocks_are_chosen_once_in_so_many_steps(monkeypatch):
    blocks = BlockAttention(SMALL, 1)
    steps = [tensors(150, 1, seed) for seed in range(4)]
    monkeypatch.setattr(blocks_module, "TOKEN_STEP", 3)
    outs = [attended(blocks, (query, *steps[0][1:])) for query, _, _ in steps]
    for step, out in enumerate(outs):
        fresh = attended(BlockAttention(SMALL, 1), (steps[step][0], *steps[0][1:]))
        assert torch.equal(out, fresh) == (step % 3 == 0)


@pytest.fixture
def all_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step reads as many blocks as there are, and copies them as it does fewer."""
    monkeypatch.setattr(BlockAttention, "_wanted", property(lambda self: self._count))


@pytest.mark.usefixtures("all_blocks")
@pytest.mark.parametrize("family", FAMILIES)
def test_all_blocks_are_dense_attention_bit_for_bit(make_engine, family):
    engine = make_engine(family)
    engine.precompute(CHUNKS)
    settings = {**ANSWER, "logprobs": 3, "history": False}
    dense = engine.generate(PROMPT, **settings)
    found = engine.generate(PROMPT, sparse=SMALL, **settings)
    assert found.token_ids == dense.token_ids
    assert found.logprobs == dense.logprobs
    windowed = all(window is not None for window in engine.loaded.architecture.windows)
    assert (found.report.decode.blocks == 0) == windowed
    assert found.report.decode.blocks == found.report.decode.blocks_read
    drafted = engine.generate(PROMPT, sparse=SMALL, **{**settings, "drafts": True})
    assert drafted.token_ids == dense.token_ids


@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma2", "gpt-oss", "qwen3"])
@pytest.mark.parametrize("method", ["query", "full"])
def test_answers_read_some_blocks(make_engine, family, method):
    """Together with others they are as alone."""
    engine = make_engine(family)
    engine.precompute(CHUNKS)
    settings = {**ANSWER, "method": method, "history": False}
    alone = engine.generate(PROMPT, sparse=SMALL, **settings)
    dense = engine.generate(PROMPT, **settings)
    assert 0 < alone.report.decode.blocks_read < alone.report.decode.blocks
    assert (dense.report.decode.blocks, dense.report.decode.blocks_read) == (0, 0)
    with ThreadPoolExecutor(3) as pool:
        kinds = ["off", SMALL, SMALL]
        asked = [pool.submit(engine.generate, PROMPT, sparse=k, **settings) for k in kinds]
        together = [each.result() for each in asked]
    assert together[0].token_ids == dense.token_ids
    assert all(each.token_ids == alone.token_ids for each in together[1:])


def test_rows_of_sparse_steps_are_not_kept_for_later_prompts(make_engine, monkeypatch):
    kept: list[ComputedPrompt] = []
    monkeypatch.setattr(PrefixTree, "add", lambda _, computed: kept.append(computed))
    engine = make_engine(reuse=ReuseConfig())
    engine.precompute(CHUNKS)
    reports = [engine.generate(PROMPT, sparse=each, **ANSWER).report for each in ("off", SMALL)]
    lengths = [len(each.ids) - reports[0].tokens.prompt for each in kept]
    assert lengths == [ANSWER["max_new_tokens"] - 1, 0]


def test_auto_is_on_where_it_saves_time(monkeypatch):
    monkeypatch.undo()
    wide = LlamaConfig(
        vocab_size=600, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=8, head_dim=128, max_position_embeddings=4096,
        bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    with RagKV(random_model(wide), tokenizer=tiny_tokenizer()) as engine:
        short = engine.generate(PROMPT, sparse="auto", **ANSWER).report
        long = "\n\n".join(CHUNKS * 8)
        found = engine.generate(long, sparse="auto", **ANSWER).report
        assert short.decode.blocks == 0
        assert 0 < found.decode.blocks_read < found.decode.blocks
        assert engine.generate(long, **ANSWER).report.decode.blocks == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"second_block_count": 0},
        {"initial_window": 1.5},
        {"local_window": -1},
    ],
)
def test_wrong_settings_are_named(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        SparseDecoding(**wrong)


def test_a_call_takes_off_auto_or_settings(make_engine):
    with pytest.raises(ConfigError, match="must be one of off, auto"):
        make_engine().generate(PROMPT, sparse="snapkv")


def test_score_rules_hold_over_the_blocks_read():
    query, key, value = tensors(90, 1)
    rule = ScoreRule(SCALING, softcap=2.0, sinks=torch.randn(HEADS))
    places = Rows.on("cpu", np.array([89]))
    settings = replace(SMALL, second_block_count=9, local_window=13)
    blocks = BlockAttention(settings, 1)
    blocks.begin(NONE, 89)
    ours = blocks.attend(query, key, value, rule, layer=0, rows=places)
    dense = attend(query, key, value, places, None, rule)
    torch.testing.assert_close(ours, dense)
