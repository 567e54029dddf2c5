"""vLLM's side: a KV connector that loads repaired KV as an external prefix.

It runs in vLLM's environment, which does not need ragkv (docs/vllm.md). ragkv writes the KV of a
prompt's first tokens to a folder and sends vLLM the prompt with a signed id. The connector loads
that KV into vLLM's blocks. If anything is wrong with it, vLLM computes the tokens itself.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import struct
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_ragkv.files import FORMAT, SUFFIX, default_folder, read_id, shared_secret

_LONGEST_HEADER = 1 << 24
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_log = logging.getLogger("vllm.ragkv")  # vLLM shows its own loggers

Rows = list[tuple[torch.Tensor, torch.Tensor]]
"""Each layer's keys and values, ``[rows, kv_heads, head_dim]``."""


class UnusableError(Exception):
    """A hand-over cannot be used. The message is the reason in ragkv's report."""


@dataclass
class _Use:
    """A request's use of a hand-over (in vLLM's scheduler)."""

    name: str = ""
    tokens: int = 0
    loaded: int = 0
    reason: str = ""
    blocks: frozenset[int] = frozenset()

    @property
    def settled(self) -> bool:
        return bool(self.loaded or self.reason)


@dataclass(frozen=True)
class _Load:
    """Rows ``start`` to ``stop`` of a hand-over for a request's ``blocks`` (in vLLM's worker)."""

    request: str
    name: str
    start: int
    stop: int
    blocks: list[int]


@dataclass
class _Loads(KVConnectorMetadata):
    loads: list[_Load] = field(default_factory=list)


class RagKVConnector(KVConnectorBase_V1):
    """Loads hand-overs of ragkv, asynchronously, through the layers' own cache update.

    vLLM makes one in its scheduler, which decides, and one in its worker, which loads.
    ``kv_connector_extra_config`` can name the ``folder`` (default: ``/dev/shm/ragkv-<uid>``).

    Raises
    ------
    ValueError
        vLLM runs with something that hand-overs do not support (docs/vllm.md).
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _refuse(_unsupported(vllm_config, kv_cache_config.kv_cache_groups))
        (group,) = kv_cache_config.kv_cache_groups
        self._names, self._spec = group.layer_names, group.kv_cache_spec
        self._shape = {
            "layers": len(self._names),
            "kv_heads": self._spec.num_kv_heads,
            "head_dim": self._spec.head_size,
            "dtype": _DTYPES[self._spec.dtype],
        }
        folder = vllm_config.kv_transfer_config.kv_connector_extra_config.get("folder")
        self._folder = Path(folder) if folder else default_folder()
        self._secret = shared_secret(self._folder)
        self._instance = secrets.token_hex(16)
        self._uses: dict[str, _Use] = {}
        self._new: list[_Load] = []
        self._layers: list[Any] = []
        self._reader = ThreadPoolExecutor(1, "ragkv")
        self._reading: deque[tuple[_Load, Future[Rows]]] = deque()
        self._finished: set[str] = set()
        self._failed: set[int] = set()

    # In the scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        """Return how many tokens after the computed ones a hand-over has, and whether any."""
        identity = (_ours(request) or {}).get("id")
        if identity is None:
            return 0, False
        use = self._uses.get(request.request_id)
        if use is None:
            use = self._uses[request.request_id] = _Use()
            try:
                self._accept(use, request, str(identity))
            except UnusableError as refused:
                self._settle(use, reason=str(refused))
        if not use.settled and num_computed_tokens >= use.tokens:
            self._settle(use, loaded=use.tokens)
        return (0, False) if use.settled else (use.tokens - num_computed_tokens, True)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note the blocks that vLLM has set aside for a hand-over's rows."""
        use = self._uses.get(request.request_id)
        if use is None or not num_external_tokens:
            return
        start, ids = use.tokens - num_external_tokens, blocks.get_block_ids()[0]
        use.blocks = frozenset(ids[start // self._spec.block_size :])
        self._new.append(_Load(request.request_id, use.name, start, use.tokens, ids))

    def build_connector_meta(self, scheduler_output: Any) -> _Loads:
        """Return the new loads for the worker."""
        loads, self._new = self._new, []
        return _Loads(loads)

    def update_connector_output(self, connector_output: Any) -> None:
        """Record the hand-overs that the worker loaded, or failed to load."""
        for request in connector_output.finished_recving or ():
            use = self._uses.get(request)
            if use is None:  # cancelled meanwhile
                continue
            if use.blocks.isdisjoint(connector_output.invalid_block_ids):
                self._settle(use, loaded=use.tokens)
            else:
                self._settle(use, reason="torn" if self._path(use).exists() else "gone")

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, Any]:
        """Return the outcome of the hand-over, for answers that are not streamed."""
        use = self._uses.pop(request.request_id, None) or _Use()
        if use.name and not use.settled:
            self._settle(use, reason="cancelled")
        if _ours(request) is None:
            return False, None
        about = {**self._outcome(use), **self._shape, "folder": str(self._folder)}
        return False, {"ragkv": about}

    def _accept(self, use: _Use, request: Any, identity: str) -> None:
        """Check everything about a hand-over but its rows.

        Raises
        ------
        UnusableError
            It must not be loaded.
        """
        prompt = request.prompt_token_ids or []
        try:
            use.name, expires, tokens = read_id(self._secret, identity, prompt)
        except (ValueError, struct.error):
            raise UnusableError("signature") from None
        use.tokens = min(tokens, len(prompt) - 1)  # vLLM computes one
        _reject(
            salt=request.cache_salt != identity,  # other prompts would get these blocks
            prompt=bool(request.mm_features or request.skip_reading_prefix_cache or use.tokens < 1),
            expired=expires < time.time(),
        )
        try:
            with self._path(use).open("rb") as file:
                _, about, _ = _read_header(file)
        except FileNotFoundError:
            raise UnusableError("gone") from None
        except (OSError, ValueError, KeyError, TypeError, struct.error):
            raise UnusableError("torn") from None
        wrong = {name for name, value in self._shape.items() if about.get(name) != value}
        _reject(
            format=about.get("format") != FORMAT,
            instance=about.get("instance") != self._instance,
            torn=about.get("tokens") != tokens,
            shape=bool(wrong - {"dtype"}),
            dtype="dtype" in wrong,
        )

    def _settle(self, use: _Use, loaded: int = 0, reason: str = "") -> None:
        """Report a hand-over's outcome to ragkv; delete it unless another request waits for it."""
        use.loaded, use.reason = loaded, reason
        if reason:
            _log.warning("ragkv's KV of %d tokens is not used: %s", use.tokens, reason)
        if not use.name:
            return
        with suppress(OSError):
            if not any(each.name == use.name and not each.settled for each in self._uses.values()):
                self._path(use).unlink(missing_ok=True)
            draft = self._folder / f"{use.name}.{secrets.token_hex(4)}.draft"
            draft.write_text(json.dumps(self._outcome(use)), "utf-8")
            draft.replace(self._folder / f"{use.name}.json")

    def _outcome(self, use: _Use) -> dict[str, Any]:
        known = {"format": FORMAT, "instance": self._instance}
        return {**known, "loaded": use.loaded, "reason": use.reason}

    def _path(self, named: _Use | _Load) -> Path:
        return self._folder / f"{named.name}{SUFFIX}"

    # In the worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Find the model's layers, in its order."""
        known = self._vllm_config.compilation_config.static_forward_context
        numbered = {int(re.sub(r"\D", "", name) or -1): known[name] for name in self._names}
        self._layers = [numbered[number] for number in sorted(numbered)]
        whole = range(self._vllm_config.model_config.hf_text_config.num_hidden_layers)
        writable = [hasattr(layer.impl, "do_kv_cache_update") for layer in self._layers]
        _refuse(
            {
                "layers that share a KV cache or have none": sorted(numbered) != list(whole),
                "attention backends without do_kv_cache_update": not all(writable),
            }
        )

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Read new hand-overs in the background, and write them into the blocks."""
        for load in self._get_connector_metadata().loads:
            self._reading.append((load, self._reader.submit(self._read, load)))
        while self._reading and self._reading[0][1].done():
            load, rows = self._reading.popleft()
            try:
                self._write(load, rows.result())
            except Exception as error:  # noqa: BLE001  raising would end vLLM
                _log.warning("ragkv's KV cannot be loaded: %r", error)
                self._failed.update(load.blocks[load.start // self._spec.block_size :])
            self._finished.add(load.request)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str]]:
        """Return the requests whose loads have ended, well or not."""
        finished, self._finished = self._finished, set()
        return None, finished

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that vLLM has to compute after all."""
        failed, self._failed = self._failed, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for nothing: vLLM computes a request once its load has ended."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Save nothing: ragkv computes its entries itself."""

    def wait_for_save(self) -> None:
        """Wait for nothing."""

    def _read(self, load: _Load) -> Rows:
        """Read a hand-over and compare every tensor with its checksum."""
        with self._path(load).open("rb") as file:
            header, about, offset = _read_header(file)
            shape = about["tokens"], self._spec.num_kv_heads, self._spec.head_size

            def read(name: str) -> torch.Tensor:
                whole = torch.empty(shape, dtype=self._spec.dtype)
                begin, end = header[name]["data_offsets"]
                file.seek(offset + begin)
                buffer: Any = whole.view(torch.uint8).numpy()
                complete = file.readinto(buffer) == end - begin
                checksum = whole.view(torch.int64).sum().item()
                _reject(torn=not complete or checksum != about["checksum"][name])
                return whole[load.start : load.stop]

            return [(read(f"key.{i}"), read(f"value.{i}")) for i in range(len(self._names))]

    def _write(self, load: _Load, rows: Rows) -> None:
        size = self._spec.block_size
        positions = torch.arange(load.start, load.stop)
        slots = torch.tensor(load.blocks)[positions // size] * size + positions % size
        for layer, (key, value) in zip(self._layers, rows, strict=True):
            cache = layer.kv_cache
            device = cache.device
            layer.impl.do_kv_cache_update(
                layer, key.to(device), value.to(device), cache, slots.to(device)
            )


def _ours(request: Any) -> dict[str, Any] | None:
    """Return a request's fields for this connector."""
    ours = (request.kv_transfer_params or {}).get("ragkv")
    return ours if isinstance(ours, dict) else None


def _reject(**reasons: bool) -> None:
    for reason, found in reasons.items():
        if found:
            raise UnusableError(reason)


def _unsupported(config: Any, groups: list[Any]) -> dict[str, bool]:
    spec = groups[0].kv_cache_spec if groups else None
    head_dim = getattr(spec, "head_size", None)
    windows = [getattr(spec, name, None) for name in ("sliding_window", "attention_chunk_size")]
    transfer = config.kv_transfer_config
    return {
        "kv_role other than kv_consumer": transfer.kv_role != "kv_consumer",
        "kv_load_failure_policy other than recompute": (
            transfer.kv_load_failure_policy != "recompute"
        ),
        "parallelism of any kind": config.parallel_config.world_size_across_dp > 1,
        "LoRA": config.lora_config is not None,
        "speculative decoding": config.speculative_config is not None,
        "several KV cache groups (a hybrid model)": len(groups) != 1,
        f"a KV cache of {type(spec).__name__}": type(spec) is not FullAttentionSpec,
        "sliding-window or chunked attention": any(windows),
        "values of another size than keys": getattr(spec, "head_size_v", head_dim) != head_dim,
        "a quantised KV cache": getattr(spec, "dtype", None) not in _DTYPES,
    }


def _refuse(unsupported: dict[str, bool]) -> None:
    if found := [name for name, there in unsupported.items() if there]:
        raise ValueError(f"ragkv's connector does not support {', '.join(found)} (docs/vllm.md)")


def _read_header(file: BinaryIO) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Return a safetensors file's header, ragkv's fields in it, and the tensors' first byte."""
    (length,) = struct.unpack("<Q", file.read(8))
    header = json.loads(file.read(min(length, _LONGEST_HEADER)))
    return header, dict(json.loads(header["__metadata__"]["ragkv"])), 8 + length
