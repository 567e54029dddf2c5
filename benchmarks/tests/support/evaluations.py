"""A small evaluation: its data, its records, short answers, and an interruption."""

from __future__ import annotations

from dataclasses import replace

import pytest
import typer
from tiny import some_chunks, tiny_model, tiny_tokenizer
from typer.testing import CliRunner

import ragkv
from ragkv_bench.commands.evaluate import evaluate_command
from ragkv_bench.data.examples import Chunk, DataSet, Example
from ragkv_bench.data.tasks import TASKS
from ragkv_bench.quality.records import EvalRecord
from ragkv_bench.quality.subject import Subject


@pytest.fixture(autouse=True)
def short_answers(monkeypatch):
    for name in ("multihop_qa", "niah_single"):
        monkeypatch.setitem(TASKS, name, replace(TASKS[name], max_new_tokens=4))


def load_tiny_models(monkeypatch):
    """Let a command load a tiny model whatever it is asked for."""
    real = ragkv.RagKV
    monkeypatch.setattr(
        ragkv, "RagKV", lambda _, **kwargs: real(tiny_model(), tiny_tokenizer(), **kwargs)
    )


def run_eval(*arguments):
    """Run ``ragkv eval``; raise what it raises."""
    app = typer.Typer()
    app.command()(evaluate_command)
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if isinstance(result.exception, Exception):
        raise result.exception
    return result


def small_data(count=2):
    pieces = some_chunks(3 * count, words=30)
    examples = [
        Example(
            id=f"x_{i}",
            question="What does {this} say?",
            answers=("a", "b"),
            chunks=tuple(Chunk(text, f"Title {i}") for text in pieces[3 * i : 3 * i + 3]),
            task="multihop_qa" if i % 2 else "niah_single",
        )
        for i in range(count)
    ]
    return DataSet("mine", tuple(examples))


def make_record(example_id, method, ratio=0.2, **changes):
    values = {
        "key": f"{example_id}{method}{ratio}",
        "id": example_id,
        "method": method,
        "ratio": ratio,
        "answer": "",
        "score": 0.0,
        "kl": 0.0,
        "agreement": 1.0,
        "share_recomputed": 1.0,
        "prompt_tokens": 10,
        "ttft_s": 2.0,
        "ttft_full_s": 2.0,
    }
    return EvalRecord(**{**values, **changes})


def stop_after(monkeypatch, count):
    """Interrupt the run at its ``count``-th measurement; return what was measured."""
    measure, seen = Subject.measure, []

    def counted(self, method, ratio):
        if len(seen) == count:
            raise KeyboardInterrupt
        seen.append((self._example.id, method))
        return measure(self, method, ratio)

    monkeypatch.setattr(Subject, "measure", counted)
    return seen
