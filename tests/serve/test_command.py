"""``ragkv serve`` as a process."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields

import httpx
import pytest
from served import CHAT, CHUNKS, chat, until
from tiny import saved
from typer.testing import CliRunner

from ragkv import ReuseConfig, StoreConfig
from ragkv.cli import serve as command
from ragkv.cli.main import app


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return saved(tmp_path_factory.mktemp("models") / "tiny-model")


@contextmanager
def serving(*options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    code = "from ragkv.cli.main import app; app()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "serve", "--port", "0", *options],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"Serving tiny-model at (http://127\.0\.0\.1:\d+)\n", line)
        assert found, line
        yield found[1], process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_server_with_keys_from_start_to_sigterm(model, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("alpha=sk-a\nbeta=sk-b\n", encoding="utf-8")
    options = ("--model", model, "--store", str(tmp_path / "store"))
    with serving(*options, "--api-key-file", str(keys)) as (url, process):
        until(lambda: httpx.get(f"{url}/health").status_code == 200)
        headers = {"Authorization": "Bearer sk-a"}
        with httpx.Client(base_url=url, headers=headers, timeout=60) as client:
            assert client.post("/v1/chunks", json={"texts": CHUNKS}).json()["report"]["new"] == 3
            answer = client.post(CHAT, json=chat()).json()
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
            headers["Authorization"] = "Bearer sk-b"
            other = client.get("/v1/chunks", params={"text": CHUNKS[0]}, headers=headers)
            assert other.json() == {"text_known": False}
            long = {"prompt": CHUNKS[0], "max_tokens": 200, "ignore_eos": True, "stream": True}
            with client.stream("POST", "/v1/completions", json=long) as running:
                lines = running.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-2]
        assert process.wait(30) == 0


def run(*options: str):
    return CliRunner().invoke(app, ["serve", *options])


@pytest.fixture
def no_model(monkeypatch) -> Iterator[None]:
    """What is wrong is found before a model is loaded."""
    monkeypatch.setattr(command, "open_engine", None)
    return


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [("--host", "192.168.1.5", "--api-key-file"), ("--api-key-file", "none", "cannot be read")],
)
def test_wrong_keys(no_model, option, value, says):
    result = run(option, value)
    assert result.exit_code == 2
    assert says in " ".join(result.stderr.split())


def test_a_missing_package(no_model, monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "uvicorn" else 1)
    result = run()
    assert result.exit_code == 2
    assert "[serve]'" in " ".join(result.stderr.split())


class OpenedError(Exception):
    """Raised instead of opening an engine."""


@pytest.fixture
def opened(monkeypatch) -> dict[str, object]:
    """The arguments of the engine that would be opened."""
    found: dict[str, object] = {}

    def open_engine(model: object, **given: object) -> None:
        found.update(given)
        raise OpenedError

    monkeypatch.setattr(command, "open_engine", open_engine)
    return found


SETTINGS = {
    "reuse": {
        "method": "cacheclip",
        "recompute_ratio": 0.3,
        "auxiliary_model": "small",
        "on_miss": "skip",
    },
    "store": {
        "memory_bytes": 1,
        "disk_bytes": 2,
        "device_bytes": 3,
        "history_bytes": 4,
        "read_only": True,
        "codec": "int8",
    },
    "limits": {"max_running": 5, "kv_bytes": 6},
}


def as_option(name: str, value: object) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    return [flag, str(value)]


def test_settings_are_options_and_those_of_the_store_a_file(opened, tmp_path):
    lines = (f"{name} = {json.dumps(value)}" for name, value in SETTINGS["store"].items())
    (tmp_path / "store.toml").write_text("\n".join(lines), encoding="utf-8")

    given = {**SETTINGS["reuse"], **SETTINGS["limits"]}
    options = [as_option(*each) for each in given.items()]
    options.append(["--store-config", str(tmp_path / "store.toml")])
    result = run(*[word for option in options for word in option])
    assert isinstance(result.exception, OpenedError), result.output
    for config in ("reuse", "store"):
        assert asdict(opened[config]).items() >= SETTINGS[config].items()
    assert {name: opened[name] for name in SETTINGS["limits"]} == SETTINGS["limits"]


def test_a_store_config_in_json(opened, tmp_path):
    settings = {"codec": "int4", "history_bytes": 0, "memory_bytes": 9}
    (tmp_path / "store.json").write_text(json.dumps(settings))
    run("--store", "s", "--store-config", str(tmp_path / "store.json"))
    assert opened["store"] == StoreConfig("s", **settings, device_bytes=None)


def test_namespaces_share_the_budgets(opened, tmp_path):
    (tmp_path / "keys").write_text("alpha=sk-a\nbeta=sk-b\n", encoding="utf-8")
    (tmp_path / "store.toml").write_text("memory_bytes = 8\ndisk_bytes = 1\nhistory_bytes = 6\n")
    files = (tmp_path / "keys", tmp_path / "store.toml")
    run("--api-key-file", str(files[0]), "--store-config", str(files[1]))
    store = opened["store"]
    assert (store.memory_bytes, store.disk_bytes, store.history_bytes) == (4, 1, 3)
    assert store.device_bytes is None


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("store.toml", "memory_bytes = ", "cannot be read as TOML"),
        ("store.toml", "codecs = 'raw'", "did you mean codec?"),
        ("store.toml", "path = 'elsewhere'", "unknown store setting path"),
        ("store.toml", "memory_bytes = -1", "memory_bytes must lie between"),
        ("store.json", '{"codecs": "raw"}', "did you mean codec?"),
        ("store.json", "codec = 'raw'", "cannot be read as JSON"),
        ("store.json", "[1]", "must contain an object of settings"),
        ("store.toml", None, "cannot be read"),
    ],
)
def test_a_wrong_store_config_is_refused_by_name(no_model, tmp_path, name, text, says):
    file = tmp_path / name
    if text is not None:
        file.write_text(text, encoding="utf-8")
    result = run("--store-config", str(file))
    assert result.exit_code == 2
    assert says in " ".join(result.stderr.split())


def test_only_settings_of_single_pipelines_are_no_options():
    left = {field.name for field in (*fields(ReuseConfig), *fields(StoreConfig))}
    left -= {*SETTINGS["reuse"], *SETTINGS["store"]}
    assert left == {"path", "sink", "calibrated_for", "history"}  # --store and --sink-from are two
