"""A vLLM of one version, served from an environment of its own with ragkv's connector."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
from store_servers import free_port

PACKAGE = Path(__file__).parents[2]
VERSIONS = ("0.27.1", "0.30.0", "0.32.0")


def installed_python(version: str) -> Path:
    """Return the Python that has this version; `make vllm` installs it."""
    return PACKAGE.parents[1] / ".vllm" / version / "bin" / "python"


class VLLM:
    """A server of a version; ``folder`` is where hand-overs are."""

    def __init__(self, version: str, model: Path, folder: Path, *options: str) -> None:
        self.folder = folder
        self.port = free_port()
        self.log = folder.with_name(f"{folder.name}.log")
        transfer = {
            "kv_connector": "RagKVConnector",
            "kv_connector_module_path": "vllm_ragkv.connector",
            "kv_role": "kv_consumer",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"folder": str(folder)},
        }
        settings = {
            "model": model,
            "served-model-name": "model",
            "host": "127.0.0.1",
            "port": self.port,
            "dtype": "float32",
            "block-size": 32,
            "kv-transfer-config": json.dumps(transfer),
        }
        pairs = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
        server = [str(installed_python(version)), "-m", "vllm.entrypoints.openai.api_server"]
        self.command = [*server, "--enforce-eager", *pairs, *options]
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=300)
        self.instance = ""

    def start(self) -> None:
        """Start it and wait until it answers; raise RuntimeError with its log's end otherwise."""
        quiet = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",  # steps of few tokens, and other tests beside
        }
        own = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command,
                env={**own, **quiet, "PYTHONPATH": str(PACKAGE)},
                cwd=self.folder.parent,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        for _ in range(600):
            with suppress(httpx.TransportError):
                if self.client.get("/health").is_success:
                    asked = self.ask([1, 2, 3], max_tokens=1, kv_transfer_params={"ragkv": {}})
                    self.instance = asked["kv_transfer_params"]["ragkv"]["instance"]
                    return
            if self.process.poll() is not None:
                break
            time.sleep(0.5)
        self.kill()
        raise RuntimeError(self.log.read_text("utf-8", "replace")[-20_000:])

    def kill(self) -> None:
        """End it at once, as a machine that fails does."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def ask(self, prompt: list[int], handed: str = "", **fields: Any) -> dict[str, Any]:
        """Return a greedy completion of token ids, with the KV that an id names."""
        answer = self.client.post("/v1/completions", json=_request(prompt, handed, fields))
        assert answer.is_success, answer.text
        return answer.json()

    def tokens(self, prompt: list[int], handed: str = "", **fields: Any) -> list[int]:
        return self.ask(prompt, handed, **fields)["choices"][0]["token_ids"]

    def stream(self, prompt: list[int], handed: str = "", **fields: Any) -> Iterator[list[int]]:
        """Yield the tokens of each part of a streamed completion."""
        asked = _request(prompt, handed, {"stream": True, **fields})
        with self.client.stream("POST", "/v1/completions", json=asked) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]

    def metric(self, name: str) -> float:
        lines = self.client.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def _request(prompt: list[int], handed: str, fields: dict[str, Any]) -> dict[str, Any]:
    salted = {"cache_salt": handed, "kv_transfer_params": {"ragkv": {"id": handed}}}
    return {
        "prompt": prompt,
        "max_tokens": 12,
        "temperature": 0,
        "return_token_ids": True,
        "cache_salt": "a namespace",
        **(salted if handed else {}),
        **fields,
    }
