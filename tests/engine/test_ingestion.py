"""Ingestion: steps that overlap, messages, and disks that are too small or fill midway."""

import errno
import itertools
import re
import shutil
import sys
import threading
import time
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from tiny import UNEVEN, some_chunks

from ragkv import StoreConfig
from ragkv.chunk import encode
from ragkv.errors import StoreFullError
from ragkv.ingest import encode as encoding
from ragkv.ingest.size import IngestionSize
from ragkv.model.architecture import backbone_of
from ragkv.model.pool import Pool
from ragkv.report import ingestion_progress
from ragkv.store import TieredStore
from ragkv.store.backends import files


def test_a_batch_is_written_while_the_next_is_computed(make_engine, monkeypatch):
    engine = make_engine()
    computed, seen = threading.Semaphore(0), list[bool]()

    def batches(*args):
        for batch in encode.encode_chunks(*args):
            computed.release()
            yield batch

    def put(*args, **kwargs):
        if not seen:
            seen.append(computed.acquire(timeout=30) and computed.acquire(timeout=30))
        return stored(*args, **kwargs)

    stored = TieredStore.put
    monkeypatch.setattr(encode, "BATCH_TOKENS_CPU", 1)
    monkeypatch.setattr(encoding, "encode_chunks", batches)
    monkeypatch.setattr(TieredStore, "put", put)
    chunks = some_chunks(3)
    engine.precompute(chunks)
    assert seen == [True]
    assert all(engine.contains(chunk) for chunk in chunks)


def test_a_request_waits_for_a_layer_of_an_ingestion(make_engine):
    engine, chunks = make_engine(), some_chunks(4)
    engine.precompute(chunks[:2])
    layers = backbone_of(engine.loaded.model).layers
    encoding, passes, here = threading.Event(), list[tuple[bool, int]](), threading.get_ident()

    def note(layer, *_):
        passes.append((threading.get_ident() == here, layer))
        if not encoding.is_set():
            encoding.set()
            while not engine._lock.is_wanted():
                time.sleep(0.001)

    for at, layer in enumerate(layers):
        layer.register_forward_pre_hook(partial(note, at))
    with Pool(1) as thread:
        thread.submit(engine.precompute, chunks[2:])
        encoding.wait()
        assert engine.prefill("\n\n".join(chunks[:2])).report.tokens.reused
    assert passes.index((False, at)) > passes.index((True, at))  # the last layer
    prompt, other = "\n\n".join([*chunks, "What?"]), make_engine()
    other.precompute(chunks)
    found, expected = (kv.prefill(prompt, method="reuse").logits for kv in (engine, other))
    torch.testing.assert_close(found, expected)


LINE = re.compile(r"ragkv: (\d+) of (\d+) chunks done, \d\d:\d\d left")
CLOSING = re.compile(r"ragkv: (\d+) chunks? new, (\d+) known: [\d.]+ [KM]B in \d\d:\d\d\n\Z")


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log gets a line for every chunk; chunks are encoded one by one, a second each."""
    clock = SimpleNamespace(monotonic=itertools.count().__next__)
    monkeypatch.setattr(ingestion_progress, "time", clock)
    monkeypatch.setattr(ingestion_progress, "FIRST_LINE_S", 0.0)
    monkeypatch.setattr(ingestion_progress, "LINES_S", 0.0)
    monkeypatch.setattr("ragkv.chunk.encode.BATCH_TOKENS_CPU", 1)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("chunks", [some_chunks(6), UNEVEN, some_chunks(2)])
def test_a_log_has_the_time_left_and_a_closing_line(make_engine, capsys, chunks):
    kv = make_engine()
    kv.precompute(chunks[:1])
    report = kv.precompute(chunks, show_progress=None)
    said = capsys.readouterr().err
    new = len(chunks) - 1
    assert LINE.findall(said) == [(str(at), str(new)) for at in range(1, new)]
    assert CLOSING.search(said).groups() == (str(new), "1")
    assert report.new == new


@pytest.mark.usefixtures("at_once")
def test_the_time_left_is_that_of_whole_batches(make_engine, capsys, monkeypatch):
    kv, chunks = make_engine(), some_chunks(6)
    longest = max(len(kv.tokenize(chunk)) for chunk in chunks)
    monkeypatch.setattr("ragkv.chunk.encode.BATCH_TOKENS_CPU", 2 * longest)
    kv.precompute(chunks, show_progress=None)
    assert LINE.findall(capsys.readouterr().err) == [("2", "6"), ("4", "6")]


@pytest.mark.usefixtures("at_once")
def test_the_first_line_has_the_time_left(make_engine, capsys):
    kv = make_engine()
    kv.precompute(some_chunks(1), show_progress=None)
    assert re.match(r"ragkv: encoding 1 chunk .*; time left: estimating\n", capsys.readouterr().err)
    kv.precompute(some_chunks(6, 80)[1:5])
    kv.precompute(some_chunks(6, 80)[5:], show_progress=None)
    assert re.match(
        r"ragkv: encoding 1 chunk .*; time left: about 00:0\d\n", capsys.readouterr().err
    )


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("show", [True, None])
def test_a_terminal_has_a_bar_and_no_lines(make_engine, monkeypatch, capsys, show):
    if show is None:
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    make_engine().precompute(some_chunks(4), show_progress=show)
    said = capsys.readouterr().err
    assert said.startswith("ragkv: encoding 4 chunks")
    assert not LINE.findall(said)
    assert "4/4" in said
    assert CLOSING.search(said)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("show", [True, False, None])
def test_nothing_is_said_where_nothing_is_shown_or_new(make_engine, capsys, show):
    kv = make_engine()
    kv.precompute(some_chunks(2), show_progress=False)
    assert not capsys.readouterr().err
    kv.precompute(some_chunks(2), show_progress=show)
    assert not capsys.readouterr().err


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("after", [0, 2])
def test_a_disk_that_fills_midway_says_the_mend(make_engine, monkeypatch, tmp_path, code, after):
    kv = make_engine(store=StoreConfig(tmp_path, memory_bytes=0))
    kv.precompute(some_chunks(5)[4:])  # the store's own files are there
    write, count = files.write_temporary, 0

    def filling(*given, **more):
        nonlocal count
        count += 1
        if count > after:
            raise OSError(code, "full")
        return write(*given, **more)

    monkeypatch.setattr(files, "write_temporary", filling)
    said = rf"no room left .* {after} of 4 chunks are stored: make room and repeat the call"
    with pytest.raises(StoreFullError, match=said):
        kv.precompute(some_chunks(4))
    monkeypatch.setattr(files, "write_temporary", write)
    report = kv.precompute(some_chunks(4))
    assert (report.new, report.existing) == (4 - after, after)


# ---- the size


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.mark.parametrize("codec", ["raw", "int8", "int4"])
def test_the_size_is_said_before_and_is_the_one_that_follows(make_engine, tmp_path, codec, capsys):
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


def test_a_disk_that_cannot_hold_the_chunks_refuses_them_before(make_engine, tmp_path, monkeypatch):
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
