"""``ragkv store``: its commands, on a folder."""

import json
import math
import os
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import Result
from store_entries import FINGERPRINT, make_entry, same, without_syncs  # noqa: F401
from typer.testing import CliRunner

from ragkv.cli.console import say_json
from ragkv.cli.main import app
from ragkv.config import StoreConfig
from ragkv.store import open_chunk_store
from ragkv.store.types import Terms

pytestmark = pytest.mark.usefixtures("without_syncs")


def run(*args: object) -> Result:
    return CliRunner().invoke(app, ["store", *map(str, args)])


def run_json(*args: object, code: int = 0) -> dict:
    result = run(*args, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with closing(open_chunk_store(StoreConfig(tmp_path / "store"))) as store:
        for text in ("a", "b", "c"):
            store.put(make_entry(text, tokens=50), FINGERPRINT, Terms("one"))
        store.put(make_entry("old", tokens=50), FINGERPRINT, Terms(expires_at=1.0))
    return tmp_path / "store"


def entry_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


def test_stats(folder):
    found = run_json("stats", "--store", folder)
    assert (found["texts"], found["documents"], found["expired"]) == (4, 1, 1)
    assert found["kinds"][0]["codec"] == "raw"
    assert "4 chunks of 1 document:" in run("stats", "--store", folder).stdout


def test_verify_fails_until_it_has_healed(folder):
    assert run_json("verify", "--store", folder)["sound"]
    path = entry_files(folder)[0]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    found = run_json("verify", "--store", folder, code=1)
    assert (found["damaged"], found["healed"]) == (1, 0)
    assert path.exists()
    shown = run("verify", "--store", folder)
    assert shown.exit_code == 1
    assert "1 damaged" in shown.stdout
    assert run_json("verify", "--store", folder, "--heal")["healed"] == 1
    assert run_json("verify", "--store", folder)["sound"]
    assert not path.exists()


CRASH = """
import os, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("PRAGMA cache_size = 1")
connection.execute("BEGIN IMMEDIATE")
connection.execute("UPDATE Cache SET value = zeroblob(20000)")
os._exit(9)
"""


@pytest.mark.parametrize("command", ["verify", "stats"])
def test_after_a_crash_in_the_middle_of_a_commit(folder, command):
    (database,) = folder.rglob("cache.db")
    assert subprocess.run([sys.executable, "-c", CRASH, database], check=False).returncode == 9
    assert database.with_name("cache.db-journal").stat().st_size > 0
    run_json(command, "--store", folder)
    assert run_json("stats", "--store", folder)["entries"] == 4


def test_what_only_reads_changes_nothing(folder, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    run_json("stats", "--store", folder)
    run_json("verify", "--store", folder)
    run_json("copy", folder, tmp_path / "copy")
    source = "--store", folder
    for command in (["stats", *source], ["verify", *source], ["copy", folder, tmp_path / "no"]):
        refused = run(*command, "--namespace", "typo")
        assert refused.exit_code == 2
        assert "with the namespace 'typo'" in refused.stderr
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert run("verify", "--store", tmp_path / "none").exit_code == 2
    assert not (tmp_path / "none").exists()
    assert not (tmp_path / "no").exists()


def test_gc(folder):
    assert run_json("gc", "--store", folder) == {"removed": 1}
    assert "0 chunks removed" in run("gc", "--store", folder).stdout


@pytest.mark.parametrize("command", [["gc"], ["verify", "--heal"], ["stats"]])
def test_a_mistyped_folder_is_not_made(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(*command, "--store", tmp_path / "nowhere")
    assert result.exit_code == 2
    assert "no store at" in result.stderr
    assert not list(tmp_path.iterdir())


def test_copy(folder, tmp_path):
    done = run_json("copy", folder, tmp_path / "other")
    assert (done["entries"], done["expired"]) == (3, 1)
    assert run_json("verify", "--store", tmp_path / "other")["sound"]
    assert run_json("stats", "--store", tmp_path / "other")["nbytes"] == done["nbytes"]
    shown = run("copy", folder, tmp_path / "other")
    assert "0 entries, 0.0 MB; 3 there already" in shown.stdout
    refused = run("copy", tmp_path / "nowhere", tmp_path / "made")
    assert (refused.exit_code, "no store at" in refused.stderr) == (2, True)
    assert not (tmp_path / "made").exists()
    for place in (":memory:", "ftp://host"):
        assert run("copy", folder, place).exit_code == 2
        assert run("copy", place, folder).exit_code == 2


def test_cp_copies_a_folder(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "other")
    assert run_json("verify", "--store", tmp_path / "other")["sound"]
    with closing(open_chunk_store(StoreConfig(tmp_path / "other"))) as store:
        assert same(store.get("a", FINGERPRINT).entry, make_entry("a", tokens=50))


def test_a_store_without_a_name_is_refused():
    refused = run("gc", "--store", "")
    assert refused.exit_code == 2
    assert "has no name" in refused.stderr


def test_a_stray_folder_does_not_close_a_store(folder):
    """As backups and file managers leave them: nothing of it is touched."""
    kv = entry_files(folder)[0].parent
    stray = kv / "tmp-backup"
    stray.mkdir()
    os.utime(stray, (0, 0))
    assert run("gc", "--store", folder).exit_code == 0
    assert stray.is_dir()
    entry = entry_files(folder)[0]
    entry.unlink()
    entry.mkdir()
    found = run("verify", "--store", folder, "--json")
    assert found.exit_code == 1
    assert "cannot be read" in found.stdout
    assert run("gc", "--store", folder).exit_code == 0


def test_json_is_json_in_color_too(folder, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert json.loads(run("stats", "--store", folder, "--json").stdout)["texts"] == 4


def test_json_has_no_infinity(capsys):
    say_json({"seconds": math.inf})
    assert json.loads(capsys.readouterr().out) == {"seconds": None}


def test_what_has_expired_is_not_copied(folder, tmp_path, monkeypatch):
    with closing(open_chunk_store(StoreConfig(folder))) as store:
        entry = make_entry("soon over", tokens=50)
        store.put(entry, FINGERPRINT, Terms("two", 4e9))
    assert run_json("copy", folder, tmp_path / "before")["entries"] == 4
    monkeypatch.setattr("ragkv.store.operate.time.time", lambda: 5e9)
    for again in (False, True):
        done = run_json("copy", folder, tmp_path / "other")
        kept = (0, 3) if again else (3, 0)
        assert (done["entries"], done["existing"], done["expired"]) == (*kept, 2)
