"""What an ingestion says of itself, and where the disk cannot hold it."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from tiny import some_chunks

from ragkv import RagKV, StoreConfig
from ragkv.errors import StoreFullError
from ragkv.ingest.size import IngestionSize

Make = Callable[..., RagKV]


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.mark.parametrize("codec", ["raw", "int8", "int4"])
def test_the_size_is_said_before_and_is_the_one_that_follows(
    make_engine: Make, tmp_path: Path, codec: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kv = make_engine(store=StoreConfig(tmp_path, codec=codec))
    report = kv.precompute(some_chunks(4), show_progress=None)
    line, closing = capsys.readouterr().err.splitlines()  # standard error is no terminal here
    assert closing.startswith("ragkv: 4 chunks new, 0 known: ")
    assert f"4 chunks of {report.tokens} tokens" in line
    assert f"codec {codec}" in line
    assert f"left in {tmp_path}" in line
    assert ('codec="int8" takes' in line) == (codec == "raw")
    size = IngestionSize(kv.loaded, codec, [report.tokens])
    assert 0.6 * report.bytes < size.nbytes() <= report.bytes  # headers come on top
    assert kv.precompute(some_chunks(4), show_progress=None).new == 0
    assert not capsys.readouterr().err  # nothing is encoded


def test_a_bar_is_shown_in_a_terminal_and_where_it_is_asked_for(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kv = make_engine()
    chunks = some_chunks(6)
    kv.precompute(chunks[:2])
    kv.precompute(chunks[2:3], show_progress=False)
    assert not capsys.readouterr().err
    kv.precompute(chunks[3:4], show_progress=True)
    assert "1/1" in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    kv.precompute(chunks[4:], show_progress=None)
    said = capsys.readouterr().err
    assert said.startswith("ragkv: encoding 2 chunks")
    assert "2/2" in said


def test_a_disk_that_cannot_hold_the_chunks_refuses_them_before(
    make_engine: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 40, 1 << 40, 100_000))
    kv = make_engine(store=tmp_path / "raw")
    with pytest.raises(StoreFullError, match=r'100 KB are left in .* StoreConfig\(codec="int8"\)'):
        kv.precompute(some_chunks(4))
    assert not any(kv.contains(chunk) for chunk in some_chunks(4))
    assert make_engine(store=StoreConfig(tmp_path / "4", codec="int4")).precompute(some_chunks(4))
    monkeypatch.setattr(shutil, "disk_usage", _unknown)
    assert kv.precompute(some_chunks(1)).new == 1  # not known: it is tried


def _unknown(_: object) -> None:
    raise OSError("no such file system")
