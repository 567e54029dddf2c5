"""What ragkv's connector needs of vLLM: a scheduler and a worker without a model."""

from __future__ import annotations

import enum
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

LAYERS, HEADS, DIM, BLOCK = 3, 2, 32, 32


class ConnectorBase:
    def __init__(self, vllm_config, role, kv_cache_config):
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._bound: Any = None

    def bind_connector_metadata(self, metadata):
        self._bound = metadata

    def _get_connector_metadata(self):
        return self._bound


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec:
    block_size: int = BLOCK
    num_kv_heads: int = HEADS
    head_size: int = DIM
    head_size_v: int = DIM
    dtype: torch.dtype = torch.float32
    sliding_window: int | None = None
    attention_chunk_size: int | None = None


class MLAAttentionSpec(FullAttentionSpec):
    pass


def stand_in_modules() -> dict[str, ModuleType]:
    """Return vLLM's modules that the connector imports."""
    base, cache = "vllm.distributed.kv_transfer.kv_connector.v1.base", "vllm.v1.kv_cache_interface"
    parts = base.split(".")
    names = [".".join(parts[:count]) for count in range(1, len(parts))]
    modules = {name: ModuleType(name) for name in [*names, base, "vllm.v1", cache]}
    vars(modules[base]).update(
        KVConnectorBase_V1=ConnectorBase,
        KVConnectorMetadata=type("KVConnectorMetadata", (), {}),
        KVConnectorRole=enum.Enum("KVConnectorRole", "SCHEDULER WORKER"),
    )
    vars(modules[cache]).update(FullAttentionSpec=FullAttentionSpec)
    return modules


@pytest.fixture
def connector_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Return ``ragkv.vllm.connector``, imported with the stand-in."""
    for name, module in stand_in_modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "ragkv.vllm.connector", raising=False)
    yield importlib.import_module("ragkv.vllm.connector")
    sys.modules.pop("ragkv.vllm.connector", None)


class Backend:
    """An attention backend that keeps rows by slot."""

    def do_kv_cache_update(self, layer, key, value, kv_cache, slots):
        assert len(key) == len(value) == len(slots)
        for slot, k, v in zip(slots.tolist(), key, value, strict=True):
            layer.rows[slot] = (k, v)


class ReadingBackend:
    """An attention backend that writes inside of its forward pass."""


def vllm_config(folder: Path, **changed: Any) -> SimpleNamespace:
    """Return vLLM's configuration; names of ``changed`` may be dotted with ``__``."""
    layers = {
        f"model.layers.{number}.self_attn.attn": SimpleNamespace(
            impl=Backend(), kv_cache=torch.zeros(1), rows={}
        )
        for number in range(LAYERS)
    }
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_role="kv_consumer",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"folder": str(folder)},
        ),
        parallel_config=SimpleNamespace(world_size_across_dp=1),
        lora_config=None,
        speculative_config=None,
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=LAYERS)),
        compilation_config=SimpleNamespace(static_forward_context=layers),
    )
    for name, value in changed.items():
        part, _, last = name.rpartition("__")
        setattr(getattr(config, part) if part else config, last, value)
    return config


def cache_config(config: Any, spec: Any = None, groups: int = 1) -> SimpleNamespace:
    names = list(config.compilation_config.static_forward_context)[::-1]
    group = SimpleNamespace(layer_names=names, kv_cache_spec=spec or FullAttentionSpec())
    return SimpleNamespace(kv_cache_groups=[group] * groups)


@dataclass
class Request:
    """What the connector reads of one of vLLM's requests."""

    request_id: str
    prompt_token_ids: list[int]
    kv_transfer_params: dict[str, Any] | None = None
    cache_salt: str | None = None
    mm_features: list[Any] = field(default_factory=list)
    skip_reading_prefix_cache: bool = False

    def get_block_ids(self) -> tuple[list[int]]:
        """Return its blocks, out of order as those of a full pool are."""
        count = -(-len(self.prompt_token_ids) // BLOCK)
        base = 100 * int(self.request_id)
        return ([base + number for number in reversed(range(count))],)


class Engine:
    """Takes requests through both halves of a connector, in the order of vLLM's steps."""

    def __init__(self, module: ModuleType, config: Any, spec: Any = None) -> None:
        caches = cache_config(config, spec)
        self.layers = config.compilation_config.static_forward_context.values()
        self.scheduler = module.RagKVConnector(config, "scheduler", caches)
        self.worker = module.RagKVConnector(config, "worker", caches)
        self.worker.register_kv_caches({})
        self.waiting: dict[str, tuple[Request, int]] = {}

    def admit(self, request: Request, computed: int = 0) -> int:
        """Schedule a request; return the tokens it waits for."""
        more, asynchronous = self.scheduler.get_num_new_matched_tokens(request, computed)
        assert asynchronous == (more > 0)
        assert not more or computed + more < len(request.prompt_token_ids)
        self.scheduler.update_state_after_alloc(request, request, more)
        if more:
            self.waiting[request.request_id] = (request, computed + more)
        return more

    def step(self) -> dict[str, int]:
        """Run a step; return the computed tokens of each request whose load has ended."""
        self.worker.bind_connector_metadata(self.scheduler.build_connector_meta(None))
        self.worker.start_load_kv(None)
        sent, received = self.worker.get_finished(set())
        assert not sent
        output = SimpleNamespace(
            finished_recving=received,
            invalid_block_ids=self.worker.get_block_ids_with_load_errors(),
        )
        self.scheduler.update_connector_output(output)
        ended = {name: self.waiting.pop(name) for name in received if name in self.waiting}
        return {
            name: next(
                (
                    index * BLOCK
                    for index, block in enumerate(request.get_block_ids()[0])
                    if block in output.invalid_block_ids
                ),
                computed,
            )
            for name, (request, computed) in ended.items()
        }

    def load(self, request: Request, computed: int = 0) -> int:
        """Admit a request and run until it can be computed; return its computed tokens."""
        if not self.admit(request, computed):
            return computed
        while True:
            ended = self.step()
            if request.request_id in ended:
                return ended[request.request_id]

    def rows(self, request: Request, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the first rows of a request in each layer's cache."""
        blocks = request.get_block_ids()[0]
        slots = [blocks[at // BLOCK] * BLOCK + at % BLOCK for at in range(count)]
        return [
            (
                torch.stack([layer.rows[slot][0] for slot in slots]),
                torch.stack([layer.rows[slot][1] for slot in slots]),
            )
            for layer in self.layers
        ]
