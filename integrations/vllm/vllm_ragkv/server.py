"""A running vLLM: its process, its KV type, and whether it has the same model."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ragkv.attend.forward import SubsetPass, subset_forward
from ragkv.client.connection import Connection
from ragkv.client.remote import address_of
from ragkv.errors import ConfigError, ServerError
from ragkv.model.linear import arithmetic_of
from ragkv.model.loaded import ReusableModel
from ragkv.model.lock import lock_of
from ragkv.splice.buffer import SplicedCache
from vllm_ragkv.handover import HandOverFolder

COMPLETIONS = "/v1/completions"
ID = "token_id:"
_TIMEOUT_S = 60.0
_TOLERANCE, _ROUNDED_TOLERANCE = 0.02, 0.2
"""Nats between log-probabilities of one model: both in float32, or one of them rounded."""
_TEXT = (
    "The water of a river comes from rain and melting snow. It runs downhill, and where two "
    "rivers meet, the larger one keeps its name. In 1858 a map showed 27 of them; today we know "
    "that def area(width, height): return width * height is Python, and that Paris lies on the"
)
_START = "start it with ragkv's connector, and give both the same folder (docs/vllm.md)"


class VllmServer:
    """Requests to one vLLM, and hand-overs to it.

    ``instance`` names the running process: empty before :meth:`connect`, different after a
    restart. ``dtype`` is that of its keys and values.
    """

    def __init__(self, url: str, folder: HandOverFolder, api_key: str | None = None) -> None:
        self.url = address_of(url)
        self.folder = folder
        self.connection = Connection(self.url, api_key, _TIMEOUT_S, 0, program="vllm serve")
        self.instance, self.dtype, self.positions = "", "", 0

    def close(self) -> None:
        """End its answers; later requests raise ClosedError."""
        self.connection.close()

    def connect(self, loaded: ReusableModel) -> None:
        """Check that it runs with the connector and the same model; ServerError if not."""
        with lock_of(loaded.model), loaded.without_autocast():
            if not self.instance:
                try:
                    self.instance = self._compared(loaded)
                except (TimeoutError, ConfigError) as error:
                    raise ServerError(str(error)) from error

    def _compared(self, loaded: ReusableModel) -> str:
        """Compare the log-probabilities of a text, then of a token behind handed-over rows."""
        found = loaded.tokenizer(_TEXT, add_special_tokens=False)["input_ids"]
        ids, every = np.asarray(found, dtype=np.int32), np.arange(len(found))
        cache = SplicedCache(loaded, len(ids), spare=0)
        logits = subset_forward(loaded, SubsetPass(ids, every, cache, keep=len(ids)))
        own = torch.log_softmax(logits, -1).cpu()
        answer = self._call(ids, "ragkv", {}, prompt_logprobs=0)
        vllm = (answer.get("kv_transfer_params") or {}).get("ragkv")
        if vllm is None:
            raise ServerError(f"{self.url} is not a vLLM with ragkv's connector: {_START}")
        models = self.connection.call(self.connection.request("get", "/v1/models"))
        (served,) = models["data"][:1]
        self.dtype, self.positions = vllm["dtype"], int(served["max_model_len"])
        exact = self.dtype == arithmetic_of(loaded.model) == "float32"
        most = _TOLERANCE if exact else _ROUNDED_TOLERANCE
        given = answer["choices"][0]["prompt_logprobs"][1:]
        theirs = [each[str(token)]["logprob"] for token, each in zip(ids[1:], given, strict=True)]
        self._refuse_others(own[every[:-1], ids[1:]], theirs, most, f"a text of {loaded.name}")
        opens = self.folder.write(ids[:-1], cache.keys, cache.values, self.dtype, vllm["instance"])
        try:
            fields = {"logprobs": 0, "return_tokens_as_token_ids": True}
            answer = self._call(ids, opens, {"id": opens}, **fields)
        finally:
            why = self.folder.take_outcome(opens)
        if why:
            raise ServerError(f"{self.url} does not load from {self.folder.path} ({why}): {_START}")
        drawn = answer["choices"][0]["logprobs"]
        token = int(drawn["tokens"][0].removeprefix(ID))
        behind = f"a token behind rows of {loaded.name}"
        self._refuse_others(own[-1:, token], drawn["token_logprobs"], most, behind)
        return str(vllm["instance"])

    def _call(self, ids: Any, salt: str, params: dict[str, str], **fields: Any) -> dict[str, Any]:
        transfer = {"cache_salt": salt, "kv_transfer_params": {"ragkv": params}}
        body = {"prompt": ids.tolist(), "max_tokens": 1, "temperature": 0, **transfer, **fields}
        return self.connection.call(self.connection.request("post", COMPLETIONS, body))

    def _refuse_others(self, own: torch.Tensor, given: list[float], most: float, of: str) -> None:
        """Refuse log-probabilities ``[tokens]`` of a different model."""
        theirs = torch.tensor(given)
        apart = float((own - theirs).abs().mean())
        if not apart <= most:
            raise ServerError(
                f"{self.url} serves a different model or KV type: the log-probability of "
                f"{of} is {float(theirs.mean()):.3f} there and {float(own.mean()):.3f} here, "
                f"{apart:.3f} apart on average instead of at most {most}"
            )
