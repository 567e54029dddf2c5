"""What ragkv's connector needs of vLLM: a scheduler and a worker without a model."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

LAYERS, HEADS, DIM, BLOCK = 3, 2, 32, 32
_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_CACHES = "vllm.v1.kv_cache_interface"


class ConnectorBase:
    def __init__(self, vllm_config, role, kv_cache_config):
        self._vllm_config = vllm_config

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


@pytest.fixture
def connector_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return ``vllm_ragkv.connector``, imported with the stand-in."""
    for whole in (_BASE, _CACHES):
        for end in (at for at, char in enumerate(whole + ".") if char == "."):
            monkeypatch.setitem(sys.modules, whole[:end], ModuleType(whole[:end]))
    metadata = type("KVConnectorMetadata", (), {})
    vars(sys.modules[_BASE]).update(KVConnectorBase_V1=ConnectorBase, KVConnectorMetadata=metadata)
    vars(sys.modules[_CACHES]).update(FullAttentionSpec=FullAttentionSpec)
    monkeypatch.setitem(sys.modules, "vllm_ragkv.connector", ModuleType("to be imported"))
    del sys.modules["vllm_ragkv.connector"]
    return importlib.import_module("vllm_ragkv.connector")


class Backend:
    """An attention backend that keeps rows by slot."""

    def do_kv_cache_update(self, layer, key, value, kv_cache, slots):
        assert len(key) == len(value) == len(slots)
        layer.rows |= dict(zip(slots.tolist(), zip(key, value, strict=True), strict=True))


def layer(**changed: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"impl": Backend(), "kv_cache": torch.zeros(1), "rows": {}} | changed)


def vllm_config(folder, **changed: Any) -> SimpleNamespace:
    """Return vLLM's configuration; names of ``changed`` may be dotted with ``__``."""
    transfer = SimpleNamespace(
        kv_role="kv_consumer",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"folder": str(folder)},
    )
    layers = {f"model.layers.{number}.self_attn.attn": layer() for number in range(LAYERS)}
    config = SimpleNamespace(
        kv_transfer_config=transfer,
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
        count, first = -(-len(self.prompt_token_ids) // BLOCK), 100 * int(self.request_id)
        return ([first + number for number in reversed(range(count))],)

    def slots(self, start: int, stop: int) -> list[int]:
        blocks = self.get_block_ids()[0]
        return [blocks[at // BLOCK] * BLOCK + at % BLOCK for at in range(start, stop)]


class Engine:
    """Takes requests through both halves of a connector, in the order of vLLM's steps."""

    def __init__(self, module: ModuleType, config: Any, spec: Any = None, groups: int = 1) -> None:
        layers = config.compilation_config.static_forward_context
        spec = spec or FullAttentionSpec()
        group = SimpleNamespace(layer_names=list(layers)[::-1], kv_cache_spec=spec)
        caches = SimpleNamespace(kv_cache_groups=[group] * groups)
        self.layers = layers.values()
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
        _, received = self.worker.get_finished(set())
        invalid = self.worker.get_block_ids_with_load_errors()
        output = SimpleNamespace(finished_recving=received, invalid_block_ids=invalid)
        self.scheduler.update_connector_output(output)
        ended = {}
        for name in received:
            request, computed = self.waiting.pop(name)
            blocks = request.get_block_ids()[0]
            valid = [at * BLOCK for at, block in enumerate(blocks) if block in invalid]
            ended[name] = min([*valid, computed])
        return ended

    def run(self) -> dict[str, int]:
        """Run until no request waits; return the computed tokens of each."""
        ended = {}
        while self.waiting:
            ended |= self.step()
        return ended

    def load(self, request: Request, computed: int = 0) -> int:
        """Admit a request and run until it can be computed; return its computed tokens."""
        self.admit(request, computed)
        return self.run().get(request.request_id, computed)
