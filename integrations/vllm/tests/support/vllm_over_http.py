"""A stand-in for vLLM with ragkv's connector: ``/v1/completions`` over a tiny model."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from transformers import DynamicCache, PreTrainedModel

from ragkv.model.calls import cache_argument


@dataclass
class StandIn:
    """What it has, does and has seen.

    ``fails`` is the status of every completion; ``breaks_after`` so many tokens the connection
    drops; while ``going`` is cleared no token comes; ``asked`` are all requests.
    """

    model: PreTrainedModel
    folder: Path
    instance: str = "first"
    positions: int = 4096
    fails: int | None = None
    breaks_after: int | None = None
    connector: bool = True
    going: threading.Event = field(default_factory=threading.Event)
    asked: list[dict[str, Any]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    aborted: int = 0

    @property
    def streamed(self) -> list[dict[str, Any]]:
        """The requests for answers, without those by which ragkv looks at it."""
        return [body for body in self.asked if body.get("stream")]

    def load(self, ids: list[int], opens: str, salt: str) -> DynamicCache:
        """Return the rows that an id opens for a prompt; none where it does not."""
        cache, raw = DynamicCache(), base64.urlsafe_b64decode(opens + "=" * (-len(opens) % 4))
        path = self.folder / f"{raw[:16].hex()}.safetensors"
        digest = hashlib.sha256(
            np.asarray(ids[: int.from_bytes(raw[24:28], "big")], "<i4")
        ).digest()
        secret = (self.folder / "secret").read_bytes()
        reason = ""
        if hmac.new(secret, raw[:28] + digest, hashlib.sha256).digest()[:16] != raw[28:]:
            reason = "signature"
        elif salt != opens:
            reason = "salt"
        elif int.from_bytes(raw[16:24], "big") < time.time():
            reason = "expired"
        else:
            with safe_open(path, "pt") as file:
                about = json.loads(file.metadata()["ragkv"])
                reason = "" if about["instance"] == self.instance else "instance"
                for layer in range(about["layers"]) if not reason else ():
                    names = f"key.{layer}", f"value.{layer}"
                    parts = [file.get_tensor(name) for name in names]
                    sums = [int(part.view(torch.int64).sum()) for part in parts]
                    assert sums == [about["checksum"][name] for name in names]
                    cache.update(*(part.transpose(0, 1)[None] for part in parts), layer)
        path.unlink(missing_ok=True)
        path.with_suffix(".json").write_text(json.dumps({"reason": reason}))
        self.reasons.append(reason)
        return cache

    @torch.no_grad()
    def choices(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield a choice for each token, drawn greedily."""
        ids, cache = list(body["prompt"]), DynamicCache()
        opens = (body.get("kv_transfer_params") or {}).get("ragkv", {}).get("id")
        if opens and self.connector:
            cache = self.load(ids, opens, body["cache_salt"])
        for left in reversed(range(body["max_tokens"])):
            new = torch.tensor([ids[cache.get_seq_length() :]])
            out = self.model(new, use_cache=True, **cache_argument(self.model, cache))
            shares = torch.log_softmax(out.logits[0].float(), -1)
            token = int(shares[-1].argmax())
            choice: dict[str, Any] = {"index": 0, "text": "", "token_ids": [token]}
            choice["finish_reason"] = None if left else "length"
            if token in body.get("stop_token_ids", ()):
                choice["finish_reason"] = "stop"
            if body.get("logprobs") is not None:
                best = {*shares[-1].topk(body["logprobs"]).indices.tolist(), token}
                choice["logprobs"] = {
                    "tokens": [f"token_id:{token}"],
                    "token_logprobs": [float(shares[-1, token])],
                    "top_logprobs": [{f"token_id:{at}": float(shares[-1, at]) for at in best}],
                }
            if body.get("prompt_logprobs") is not None:
                rows = zip(shares[:-1], ids[1:], strict=True)
                told = [{str(at): {"logprob": float(row[at])}} for row, at in rows]
                choice["prompt_logprobs"] = [None, *told]
            ids.append(token)
            yield choice
            if choice["finish_reason"]:
                return


class _Handler(BaseHTTPRequestHandler):
    vllm: StandIn

    def log_message(self, *_: object) -> None:
        pass

    def _send(self, status: int, content: dict[str, Any]) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": "tiny", "max_model_len": self.vllm.positions}]})

    def do_POST(self) -> None:
        vllm = self.vllm
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        vllm.asked.append(body)
        if vllm.fails is not None:
            self._send(vllm.fails, {"error": {"message": "vLLM's own reason", "code": vllm.fails}})
        elif body.get("stream"):
            with suppress(BrokenPipeError, ConnectionResetError):
                self._stream(vllm, body)
                return
            vllm.aborted += 1
        else:
            told = {"ragkv": {"instance": vllm.instance, "dtype": "float32"}}
            given = {"kv_transfer_params": told} if vllm.connector else {}
            self._send(200, {"choices": list(vllm.choices(body)), **given})

    def _stream(self, vllm: StandIn, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for count, choice in enumerate(vllm.choices(body)):
            while not vllm.going.wait(0.02):
                self.wfile.write(b": waiting\n\n")
            if count == vllm.breaks_after:
                return
            self.wfile.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")


@contextmanager
def running(vllm: StandIn) -> Iterator[str]:
    """Serve it in a thread; yield its address."""
    vllm.going.set()
    handler = type("Handler", (_Handler,), {"vllm": vllm})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        vllm.going.set()
        server.shutdown()
        thread.join()
