"""``ragkv precompute --workers``: the same store as one process makes."""

from __future__ import annotations

import json

import pytest
from ingesting import KILLED, Killed, assert_alike
from store_servers import redis_server, s3_server  # noqa: F401
from tiny import some_chunks
from typer.testing import CliRunner

from ragkv import RagKV
from ragkv.cli.main import app
from ragkv.workers import processes, worker


@pytest.fixture
def files(tmp_path):
    folder, texts = tmp_path / "texts", some_chunks(12, words=60)
    folder.mkdir()
    for number in range(6):
        (folder / f"{number}.txt").write_text("\n\n".join(texts[2 * number : 2 * number + 2]))
    return folder


def run(*args):
    return CliRunner().invoke(app, ["precompute", *map(str, args)])


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
    model, files, shared_store, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(worker, "IngestWorker", Killed)
    monkeypatch.setenv(KILLED, str(tmp_path / "killed"))
    shared = files, "--model", model, "--chunk-tokens", 100, "--json", "--store"
    given = [[tmp_path / "one"], [shared_store, "--workers", 2], [shared_store]]
    runs = [run(*shared, *how).stdout for how in given]
    alone, both, again = map(json.loads, runs)
    assert "a worker process was killed" in caplog.text
    assert both["new"] + both["existing"] == alone["new"] > 6
    assert (again["new"], again["existing"]) == (0, alone["new"])
    with RagKV(model, store=tmp_path / "one") as one, RagKV(model, store=shared_store) as two:
        assert_alike(one, two)


def test_a_file_that_was_not_stored_is_named(files, tmp_path, monkeypatch):
    def store_in_processes(make, documents, workers):
        yield [worker.row_of(each, "failed", "no reason") for each in documents[3:4]]

    monkeypatch.setattr(processes, "store_in_processes", store_in_processes)
    done = run(files, "--store", tmp_path / "none", "--workers", 2)
    assert (done.exit_code, done.stdout[:24]) == (2, "0 new, 0 already stored,")
    assert f"not stored: 1 of 6 files, e.g. {files / '3.txt'}: no reason" in done.stderr
