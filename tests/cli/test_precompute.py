"""``ragkv precompute`` by several workers, and interrupted: what it stores and reports."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from ingesting import KILLED, Killed, assert_alike
from store_servers import redis_server, s3_server  # noqa: F401
from tiny import ask, some_chunks
from typer.testing import CliRunner

from ragkv import RagKV
from ragkv.cli.main import app
from ragkv.ingest import encode as encoding
from ragkv.report import ingestion_progress
from ragkv.workers import worker

TOTAL = 6
"""Files, of two chunks each."""


@pytest.fixture
def files(tmp_path) -> Path:
    folder, texts = tmp_path / "texts", some_chunks(2 * TOTAL, words=60)
    folder.mkdir()
    for number in range(TOTAL):
        (folder / f"{number}.txt").write_text("\n\n".join(texts[2 * number : 2 * number + 2]))
    return folder


@pytest.fixture
def run(model, files, tmp_path) -> Callable[..., Result]:
    """Return ``run(*options)``: each file is one chunk, unless an option says otherwise."""

    def run(*args: object) -> Result:
        given = ("--model", model, "--store", tmp_path / "store", "--chunk-tokens", 400, *args)
        return CliRunner().invoke(app, ["precompute", *map(str, (files, *given))])

    return run


# ---- workers


SLOW = [pytest.param(each, marks=pytest.mark.slow) for each in ("redis", "s3")]


@pytest.fixture(params=["folder", *SLOW])
def shared_store(request, tmp_path):
    """What several workers write into."""
    if request.param == "folder":
        return tmp_path / "two"
    server = request.getfixturevalue(f"{request.param}_server")
    url = server if isinstance(server, str) else server.url.replace("/0", "/7")
    return url.replace("prefix", tmp_path.name)


def test_two_workers_of_which_one_is_killed_make_the_store_of_one(
    model, run, shared_store, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(worker, "IngestWorker", Killed)
    monkeypatch.setenv(KILLED, str(tmp_path / "killed"))
    stores = [[tmp_path / "one"], [shared_store, "--workers", 2], [shared_store]]
    runs = [run("--chunk-tokens", 100, "--json", "--store", *each).stdout for each in stores]
    alone, both, again = map(json.loads, runs)
    assert "a worker process was killed" in caplog.text
    assert both["new"] + both["existing"] == alone["new"] > 6
    assert (again["new"], again["existing"]) == (0, alone["new"])
    with RagKV(model, store=tmp_path / "one") as one, RagKV(model, store=shared_store) as two:
        assert_alike(one, two)


def test_a_file_that_was_not_stored_is_named(run, files, monkeypatch):
    def store_in_processes(make, documents, workers):
        yield [worker.row_of(each, "failed", "no reason") for each in documents[3:4]]

    monkeypatch.setattr(worker, "store_in_processes", store_in_processes)
    done = run("--workers", 2)
    assert (done.exit_code, done.stdout[:24]) == (2, "0 new, 0 already stored,")
    assert f"not stored: 1 of 6 files, e.g. {files / '3.txt'}: no reason" in done.stderr


# ---- Ctrl-C


def assert_interrupted(code: int, stderr: str, stored: int, what: str) -> None:
    """Check the message of an interruption, which leads to the same command again."""
    expected = f"Interrupted: {stored} of {TOTAL} {what} are stored; the same command continues."
    assert (code, expected in " ".join(stderr.split())) == (130, True)


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
        done = run()
    assert_interrupted(done.exit_code, done.stderr, stored, "chunks")
    done = run()
    assert done.exit_code == 0
    assert f"{TOTAL - stored} new, {stored} already stored" in done.stdout


def test_workers_say_it_of_files(run, monkeypatch):
    def store_in_processes(make, documents, workers):
        yield [worker.row_of(each, "stored") for each in documents[:2]]
        yield [worker.row_of(documents[2], "failed")]
        raise KeyboardInterrupt

    monkeypatch.setattr(worker, "store_in_processes", store_in_processes)
    monkeypatch.setattr(ingestion_progress, "FIRST_LINE_S", 0.0)
    done = run("--workers", 2)
    assert_interrupted(done.exit_code, done.stderr, 2, "files")
    assert re.search(rf"ragkv: 2 of {TOTAL} files done, 00:00 left", done.stderr)


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
    command += ["--store", str(tmp_path / "store"), "--chunk-tokens", "400"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout.readline() == "two are written\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert "Traceback" not in said
    assert_interrupted(process.returncode, said, 2, "chunks")


# ---- versions


def test_versions_behind_neighbours_serve_prompts_of_any_order(run, files, model, tmp_path):
    done = run("--neighbours")
    assert done.exit_code == 0
    assert f"{TOTAL} versions" in done.stdout
    texts = [path.read_text() for path in sorted(files.iterdir())]
    with RagKV(model, store=tmp_path / "store") as kv:
        for order in ([4, 0, 2, 5], [3, 1, 0]):
            found = kv.prefill(ask([texts[at] for at in order]), recompute_ratio=0.2)
            sources = [use.source for use in found.report.chunks]
            assert sources == ["entry"] + ["version"] * (len(order) - 1)
    written = len(list((tmp_path / "store").rglob("*.safetensors")))
    assert run("--neighbours").exit_code == 0
    assert len(list((tmp_path / "store").rglob("*.safetensors"))) == written
