"""Decoding after long prompts: what is timed, what is compared, and what the result says."""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from peer import Peer
from tiny import tiny_model, tiny_tokenizer
from torch import nn
from typer.testing import CliRunner

from ragkv import RagKV, SparseDecoding
from ragkv.cli.main import app
from ragkv.decode.prefill import full_prefill
from ragkv.errors import ConfigError
from ragkv.model import load
from ragkv.model.implementation import has_bfloat16_products, has_quantised_products
from ragkv_bench.speed import bound, decode
from ragkv_bench.speed.decode import DecodePlan, _prompt, _transformers, bench_decode, bytes_read

PLAN = DecodePlan((400, 500), (3, 9), ("float32",), ("off", "blocks"), (1, 2), rounds=3, examples=1)
FEW = partial(SparseDecoding, second_block_count=4, initial_window=8, local_window=16)
IDS = np.random.default_rng(0).integers(2, 600, 200, dtype=np.int32)


@pytest.fixture(scope="module")
def kv():
    own = RagKV(tiny_model(), tiny_tokenizer(), store=":memory:", dtype="float32")
    with pytest.MonkeyPatch.context() as patch, own as engine:
        patch.setattr(bound, "_MATRIX_BYTES", 1 << 20)
        patch.setattr(decode, "SparseDecoding", FEW)
        yield engine


@pytest.fixture(scope="module")
def measured(kv):
    peer = Peer()
    return bench_decode({"float32": kv.loaded}, PLAN, peers=[nullcontext(peer)]), peer


def test_there_is_a_row_for_every_setting(kv, measured):
    rows = measured[0]["rows"]
    keys = {(row["engine"], row["sparse"], row["tokens"], row["concurrent"]) for row in rows}
    engines = (("peer", "off"), ("ragkv", "off"), ("ragkv", "blocks"), ("transformers", "off"))
    assert keys == {(*e, tokens, n) for e in engines for tokens in PLAN.tokens for n in (1, 2)}
    for row in rows:
        assert row["quartiles"][0] <= row["ms_per_token"] <= row["quartiles"][1]
        assert (row["bound_ms"] is not None) == (row["engine"] == "ragkv")
    for row in (row for row in rows if row["engine"] == "ragkv"):
        few, skipped = row["sparse"] == "blocks", 4 * 16 * ((row["tokens"] - 24) // 16 - 4)
        nbytes = bytes_read(kv.loaded, row["tokens"], row["concurrent"], few * skipped)
        assert row["bytes_read"] == pytest.approx(nbytes, rel=0.02)
        assert (row["blocks_read"] or 1) < 1 if few else row["kl"] == 0 <= row["needles"] <= 1


def test_peers_are_measured_by_the_slope_between_two_answers(measured):
    rows, peer = [row for row in measured[0]["rows"] if row["engine"] == "peer"], measured[1]
    assert all(row["ms_per_token"] == pytest.approx(100) for row in rows)
    turns = (3, 3, 9, 3, 9, 3, 9)  # a short answer to warm up, then both in turn
    expected = [(row["tokens"], n) for row in rows for n in turns for _ in range(row["concurrent"])]
    assert [(len(ids), count) for ids, count in peer.asked] == expected
    assert len({ids for ids, _ in peer.asked}) == len(PLAN.tokens) * max(PLAN.concurrent)


def test_answers_are_those_of_an_engine_however_often_they_are_drawn(kv):
    asked = _prompt(kv.loaded, IDS, 20, len(IDS))
    first = asked.draw(kv.loaded, "off", 20).token_ids
    assert asked.draw(kv.loaded, "off", 5).token_ids == first[:5]
    assert asked.draw(kv.loaded, "off", 20).token_ids == first
    followed = asked.followed(kv.loaded, "off", first)
    for count in (0, 1, 19):
        alone, _ = full_prefill(kv.loaded, np.concatenate([IDS, np.int32(first[:count])]))
        torch.testing.assert_close(followed.logits[count], alone)
        assert int(alone.argmax()) == first[count]


def test_transformers_decodes_without_the_prompt(kv):
    seen, asked = [], [_prompt(kv.loaded, IDS, 20, 64) for _ in range(2)]
    assert torch.equal(asked[0].cache.keys[:, :, 192:200], asked[0].cache.keys[:, :, :8])
    note = lambda _, __, named: seen.append(tuple(named["input_ids"].shape))  # noqa: E731
    hook = kv.loaded.model.register_forward_pre_hook(note, with_kwargs=True)
    assert _transformers(kv.loaded, asked, 6) > 0
    hook.remove()
    assert seen == [(2, 1)] * 6


@pytest.mark.parametrize(("family", "seen"), [("llama", 4 * 300), ("gemma3", 2 * 300 + 2 * 48)])
def test_a_step_reads_its_linear_weights_and_what_windows_show(family, seen):
    model = tiny_model(family)
    with RagKV(model, tiny_tokenizer(), store=":memory:") as kv:
        linear = [part for part in model.modules() if isinstance(part, nn.Linear)]
        values = sum(part.in_features * part.out_features for part in linear)
        values += 3 * seen * 2 * 2 * model.config.head_dim
        assert bytes_read(kv.loaded, 300, 3) == 4 * values


@pytest.mark.skipif(not has_quantised_products(), reason="this CPU has no such products")
def test_packed_weights_are_read_packed(kv):
    model = tiny_model()
    for part in model.modules():
        if isinstance(part, nn.Linear):
            part.weight.data = torch.randint(-8, 8, part.weight.shape) * 0.02
    plan = DecodePlan((300,), (3, 9), rounds=1)
    with RagKV(model, tiny_tokenizer(), store=":memory:") as packed:
        bench_decode({"float32": kv.loaded, "packed": packed.loaded}, plan)
        share = bytes_read(packed.loaded, 0, 1) / bytes_read(kv.loaded, 0, 1)
        # the output layer's rows suit no 4 bits: it is read in 16 bits, if the CPU multiplies them
        assert 0.1 < share < (0.3 if has_bfloat16_products() else 0.4)
    with pytest.raises(ConfigError, match="leave out packed"):
        bench_decode({"packed": kv.loaded}, plan)


def test_the_command(kv, tmp_path, monkeypatch):
    monkeypatch.setattr(load, "load_model", lambda *_, **_given: kv.loaded)
    path = tmp_path / "d.json"
    lists = ("--tokens", "300", "--answer-tokens", "3,6", "--weights", "float32", "--rounds", "1")
    done = CliRunner().invoke(app, ["bench", "decode", *lists, "--json", str(path)])
    assert done.exit_code == 0, done.output
    found = json.loads(path.read_text("utf-8"))
    assert [row["engine"] for row in found["rows"]] == ["transformers", "ragkv"]
    done = CliRunner().invoke(app, ["bench", "decode", "--tokens", "4090"])
    assert "4096 positions, not 4154" in done.stderr


WRONG = {"tokens": (), "answer_tokens": (64, 16), "weights": ("int3",), "sparse": ("none",)}
WRONG |= {"concurrent": (0,), "rounds": 0, "examples": -1}


@pytest.mark.parametrize("name", WRONG)
def test_plans_that_cannot_be_measured_are_refused(name):
    with pytest.raises(ConfigError):
        DecodePlan(**{name: WRONG[name]})
