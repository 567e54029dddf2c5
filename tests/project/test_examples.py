"""The examples run, and with everything recomputed the swapped pipeline says the same."""

import importlib.util
from pathlib import Path

import pytest
from tiny import tiny_model, tiny_tokenizer

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_are_there():
    names = {"core", "langchain_rag", "llama_index_rag"}
    assert {path.stem for path in EXAMPLES} == names


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_short(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 60


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_answers_both_ways(path, capsys):
    answers = load(path).main(tiny_model(layers=2), tiny_tokenizer(), max_new_tokens=6)
    assert len(answers) == 2
    assert all(isinstance(answer, str) and answer for answer in answers.values())
    assert " reused" in capsys.readouterr().out


AGENTS = sorted((Path(__file__).parents[2] / "examples" / "agents").glob("*.py"))


@pytest.mark.parametrize("path", AGENTS, ids=lambda path: path.stem)
def test_agents_reuse_more_with_each_step(path, capsys):
    assert len(path.read_text(encoding="utf-8").splitlines()) < 80
    reports = load(path).main(tiny_model(layers=2), tiny_tokenizer(), max_new_tokens=400)
    assert len(reports) >= 2
    reused = [each["tokens"]["prompt"] - each["tokens"]["fresh"] for each in reports]
    assert reused == sorted(set(reused))
    assert " reused, first token after" in capsys.readouterr().out
