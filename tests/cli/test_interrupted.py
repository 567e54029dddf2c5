"""Ctrl-C says what ``ragkv precompute`` has stored, and the same command goes on."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import some_chunks
from typer.testing import CliRunner

from ragkv.cli.main import app
from ragkv.ingest import encode as encoding
from ragkv.report import ingestion_progress
from ragkv.workers import processes, worker

TOTAL = 6


@pytest.fixture
def files(tmp_path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, text in enumerate(some_chunks(TOTAL, words=60)):
        (folder / f"{number}.txt").write_text(text)
    return folder


@pytest.fixture
def run(model, files, tmp_path):
    def run(*args):
        given = ("--model", model, "--store", tmp_path / "store", "--chunk-tokens", 400, *args)
        done = CliRunner().invoke(app, ["precompute", *map(str, (files, *given))])
        return done.exit_code, " ".join(done.stderr.split()), done.stdout

    return run


@pytest.mark.parametrize("stored", [0, 1, 4])
def test_what_is_stored_is_said_and_kept(run, monkeypatch, stored):
    encode = encoding.encode_chunks
    monkeypatch.setattr("ragkv.chunk.encode.BATCH_TOKENS_CPU", 1)

    def interrupted(*given):
        for at, batch in enumerate(encode(*given)):
            if at == stored:
                raise KeyboardInterrupt
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(encoding, "encode_chunks", interrupted)
        code, said, _ = run()
    assert code == 130
    assert (
        f"Interrupted: {stored} of {TOTAL} chunks are stored; the same command continues." in said
    )
    code, _, told = run()
    assert code == 0
    assert f"{TOTAL - stored} new, {stored} already stored" in told


def test_workers_say_it_of_files(run, files, monkeypatch):
    def store_in_processes(make, documents, workers):
        yield [worker.row_of(each, "stored") for each in documents[:2]]
        yield [worker.row_of(documents[2], "failed")]
        raise KeyboardInterrupt

    monkeypatch.setattr(processes, "store_in_processes", store_in_processes)
    monkeypatch.setattr(ingestion_progress, "FIRST_LINE_S", 0.0)
    code, said, _ = run("--workers", 2)
    assert code == 130
    assert re.search(rf"ragkv: 2 of {TOTAL} files done, 00:00 left", said)
    assert f"Interrupted: 2 of {TOTAL} files are stored; the same command continues." in said


SLOWLY = """
import sys, time
from ragkv.chunk import encode
from ragkv.ingest import encode as encoding
from ragkv.cli.main import app
encode.BATCH_TOKENS_CPU = 1
whole = encoding.encode_chunks
def slowly(*given):
    for at, batch in enumerate(whole(*given)):
        yield batch
        if at == 1:
            print("two are written", flush=True)
            time.sleep(60)
encoding.encode_chunks = slowly
app(sys.argv[1:])
"""


def test_a_real_interrupt_shows_no_traceback(model, files, tmp_path):
    command = [sys.executable, "-c", SLOWLY, "precompute", str(files), "--model", model]
    command += ["--store", str(tmp_path / "store")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout.readline() == "two are written\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in said
    assert f"Interrupted: 2 of {TOTAL} chunks are stored; the same command continues." in said
