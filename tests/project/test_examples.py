"""The examples run, and the hundred lines of the documents compute what ragkv computes."""

import importlib.util
from pathlib import Path

import pytest
import torch
from tiny import some_chunks, tiny_model, tiny_tokenizer

from ragkv import RagKV
from ragkv.engine import planner

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
AGENTS = sorted((ROOT / "examples" / "agents").glob("*.py"))
IN_100_LINES = ROOT / "docs" / "ragkv_in_100_lines.py"
HEAD, QUESTION = "<|im_start|>user\n", "\n\nWhat is a target?<|im_end|>\n"


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_are_there_and_short():
    assert [path.stem for path in EXAMPLES] == ["core", "langchain_rag", "llama_index_rag"]
    for paths, longest in ((EXAMPLES, 60), (AGENTS, 79), ([IN_100_LINES], 100)):
        for path in paths:
            assert len(path.read_text(encoding="utf-8").splitlines()) <= longest, path


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_answers_both_ways(path, capsys):
    answers = load(path).main(tiny_model(layers=2), tiny_tokenizer(), max_new_tokens=6)
    assert len(answers) == 2
    assert all(isinstance(answer, str) and answer for answer in answers.values())
    assert " reused" in capsys.readouterr().out


@pytest.mark.parametrize("path", AGENTS, ids=lambda path: path.stem)
def test_agents_reuse_more_with_each_step(path, capsys):
    reports = load(path).main(tiny_model(layers=2), tiny_tokenizer(), max_new_tokens=400)
    assert len(reports) >= 2
    reused = [each["tokens"]["prompt"] - each["tokens"]["fresh"] for each in reports]
    assert reused == sorted(set(reused))
    assert " reused, first token after" in capsys.readouterr().out


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
@pytest.mark.parametrize("ratio", [0.0, 0.2, 1.0])
@torch.no_grad()
def test_logits_of_the_hundred_lines_are_ragkvs(monkeypatch, family, ratio):
    lines, model, tokenizer = load(IN_100_LINES), tiny_model(family), tiny_tokenizer()
    chunks = some_chunks(3)
    slots, run = [], planner.repair_forward

    def noted(loaded, subset):
        slots.append(torch.from_numpy(subset.rows))
        return run(loaded, subset)

    monkeypatch.setattr(planner, "repair_forward", noted)
    prompt = HEAD + "\n\n".join(chunks) + QUESTION
    with RagKV(model, tokenizer, store=":memory:") as kv:
        kv.precompute(chunks, sink=HEAD)
        method = {"recompute_ratio": ratio, "method": "epic", "sink": HEAD, "history": False}
        theirs = kv.prefill(prompt, **method)
    sink = lines.encode(model, tokenizer, HEAD)
    others = [lines.encode(model, tokenizer, chunk, sink[1].input_ids) for chunk in chunks]
    read = tokenizer(prompt, return_offsets_mapping=True)
    assert read.input_ids == theirs.token_ids
    keys, values, _ = lines.splice(model, prompt, read, [sink, *others])
    ours = lines.recompute(model, torch.tensor(read.input_ids), slots[-1], keys, values)
    assert theirs.report.tokens.recomputed > 0 or ratio == 0
    torch.testing.assert_close(ours, theirs.logits, rtol=1e-4, atol=1e-4)


def test_everything_recomputed_is_the_models_own_answer():
    lines, model, tokenizer = load(IN_100_LINES), tiny_model("llama"), tiny_tokenizer()
    chunks = some_chunks(3)
    asked = tokenizer(HEAD + "\n\n".join(chunks) + QUESTION, return_tensors="pt").input_ids
    whole = model.generate(asked, attention_mask=torch.ones_like(asked), max_new_tokens=8)
    own = tokenizer.decode(whole[0, asked.shape[1] :], skip_special_tokens=True)
    assert lines.answer(model, tokenizer, HEAD, chunks, QUESTION, ratio=9.0, most=8) == own
