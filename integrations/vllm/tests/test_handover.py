"""Hand-overs: files that one id opens for one prompt, in a folder that is bounded and private."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import stat
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from safetensors import safe_open
from vllm_ragkv.handover import HandOverFolder

from ragkv.errors import ConfigError

IDS = np.arange(5, dtype=np.int32)
KEYS, VALUES = torch.randn(2, 2, 3, 9, 4).unbind()


@pytest.fixture
def folder(tmp_path):
    return HandOverFolder(tmp_path / "kv", most_bytes=100_000)


def files(folder, end=".safetensors"):
    return [path for path in folder.path.iterdir() if path.suffix == end]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_file_has_the_first_rows_and_says_what_they_are(folder, dtype):
    folder.write(IDS, KEYS, VALUES, dtype, "one")
    (path,) = files(folder)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["ragkv"])
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no mapping
    assert len(found) == 4
    for layer in range(2):
        for name, rows in (("key", KEYS), ("value", VALUES)):
            part = found[f"{name}.{layer}"]
            assert torch.equal(part, rows[layer, :, :5].transpose(0, 1).to(getattr(torch, dtype)))
            words = np.frombuffer(part.view(torch.uint8).numpy().tobytes(), "<i8")
            assert about["checksum"][f"{name}.{layer}"] == words.sum()
    told = ("format", "instance", "tokens", "layers", "kv_heads", "head_dim", "dtype")
    assert tuple(about[name] for name in told) == (1, "one", 5, 2, 3, 4, dtype)


def test_an_id_is_signed_for_the_prompt(folder):
    opens = folder.write(IDS, KEYS, VALUES, "float32", "one")
    raw = base64.urlsafe_b64decode(opens + "=")
    (path,) = files(folder)
    assert raw[:16].hex() == path.stem
    assert int.from_bytes(raw[16:24], "big") == path.stat().st_mtime > time.time()
    assert int.from_bytes(raw[24:28], "big") == len(IDS)
    digest = hashlib.sha256(IDS.astype("<i4").tobytes()).digest()
    secret = (folder.path / "secret").read_bytes()
    assert len(secret) == 32
    assert raw[28:] == hmac.new(secret, raw[:28] + digest, hashlib.sha256).digest()[:16]


def test_a_secret_is_made_once_and_the_user_s_alone(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: HandOverFolder(tmp_path / "kv", most_bytes=1), range(32)))
    assert len({folder.salt("a") for folder in made}) == 1
    assert made[0].salt("a") != made[0].salt("b")
    assert [path.name for path in made[0].path.iterdir()] == ["secret"]
    assert stat.S_IMODE((made[0].path / "secret").stat().st_mode) == 0o600
    assert stat.S_IMODE(made[0].path.stat().st_mode) == 0o700


def test_a_folder_of_others_is_refused(tmp_path):
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(tmp_path / "kv")
    (tmp_path / "kv").mkdir(mode=0o700)
    for name in ("open", "link"):
        with pytest.raises(ConfigError, match="this user only"):
            HandOverFolder(tmp_path / name, most_bytes=1)


def test_bytes_are_bounded_and_expired_files_deleted(folder):
    folder.write(IDS, KEYS, VALUES, "float32", "one")
    (path,) = files(folder)
    size = path.stat().st_size
    assert folder.has_room(100_000 - size - 32)
    assert not folder.has_room(100_000 - size)
    os.utime(path, (time.time() - 1,) * 2)
    assert folder.has_room(100_000 - 32)
    assert not files(folder)


def test_files_of_writers_that_were_killed_are_deleted_later(folder):
    writing, killed = (folder.path / f"{name}.new" for name in ("a", "b"))
    writing.touch()
    killed.touch()
    os.utime(killed, (time.time() - 1000,) * 2)
    assert folder.has_room(1)
    assert files(folder, ".new") == [writing]


def test_nothing_is_left_of_a_file_that_cannot_be_written(folder, monkeypatch):
    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr("vllm_ragkv.handover.save_file", full)
    with pytest.raises(OSError, match="No space"):
        folder.write(IDS, KEYS, VALUES, "float32", "one")
    assert [path.name for path in folder.path.iterdir()] == ["secret"]


def test_what_became_of_a_handover_is_told_once(folder):
    opens = folder.write(IDS, KEYS, VALUES, "float32", "one")
    (path,) = files(folder)
    told = path.with_suffix(".json")
    told.write_text('{"format": 1, "instance": "one", "loaded": 5, "reason": ""}')
    assert not folder.take_outcome(opens)
    assert folder.take_outcome(opens) == "unknown"
    told.write_text("[torn")
    assert folder.take_outcome(opens) == "unknown"
    assert [path.name for path in folder.path.iterdir()] == ["secret"]
