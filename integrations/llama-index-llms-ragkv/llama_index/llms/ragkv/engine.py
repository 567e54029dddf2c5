"""The specification of an engine, from which another process can make the same one."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from llama_index.core.bridge.pydantic import SecretStr

from ragkv import RagKV, ReuseConfig, StoreConfig
from ragkv.answer.engine import Engine
from ragkv.config import MEMORY
from ragkv.engine.settings import check_settings
from ragkv.errors import ConfigError
from ragkv.model.load import pretrained

_LOADING = threading.Lock()
_OF_SERVERS = ("api_base", "api_key", "timeout", "max_retries")
_OF_MODELS = (
    *("model", "tokenizer", "tokenizer_name", "device_map", "model_kwargs", "tokenizer_kwargs"),
    *("store", "on_unsupported"),
)
_OF_BOTH = ("model_name", "namespace", "reuse")
_USUAL = {"device_map": "auto", "namespace": "default", "on_unsupported": "raise"}
LEFT_OUT = (
    *("kv", "reuse", "messages_to_prompt", "completion_to_prompt", "api_key", "namespace"),
    *(name for name in _OF_MODELS if name != "tokenizer_name"),
)
"""Arguments that ``to_dict`` does not write: no plain data, or with secrets, as a store's URL."""


@dataclass(eq=False)
class EngineSource:
    """A model's specification, and the engine once it is loaded.

    Only the specification is pickled: the engine is made again on first use.

    Attributes
    ----------
    model_name
        Hub name, folder or GGUF file; empty is the embedded default.
    model, tokenizer
        Loaded objects, used instead of the names. A tokenizer travels as it is, a
        model is loaded again by its name.
    device_map, model_kwargs, tokenizer_kwargs
        As in ``HuggingFaceLLM``; ``device_map="auto"`` without model_kwargs is the first
        CUDA device, or the CPU.
    is_shared
        Whether the engine was given; its settings then stay unchanged.
    api_base, timeout, max_retries
        The address of a server, used instead of a local model; its timeout in seconds, and
        the number of retries.
    api_key
        Its key, which is not pickled: another process takes the environment's.
    """

    model_name: str = ""
    tokenizer_name: str = ""
    model: Any = None
    tokenizer: Any = None
    device_map: Any = "auto"
    model_kwargs: dict[str, Any] = field(default_factory=dict)
    tokenizer_kwargs: dict[str, Any] = field(default_factory=dict)
    store: Any = None
    namespace: str = "default"
    reuse: ReuseConfig = field(default_factory=ReuseConfig)
    on_unsupported: Literal["raise", "full"] = "raise"
    engine: Engine | None = None
    is_shared: bool = False
    api_base: str | None = None
    api_key: SecretStr | None = None
    timeout: float | None = None
    max_retries: int | None = None

    @classmethod
    def of(cls, kv: Engine | None, given: Mapping[str, Any]) -> Self:
        """Return the source of an engine that is given, a server's, or one that is loaded.

        Parameters
        ----------
        given
            The arguments of an LLM that concern its engine.

        Raises
        ------
        ConfigError
            Arguments that exclude each other, or another namespace than the engine's.
        """
        fields = {name: given[name] for name in (*_OF_SERVERS, *_OF_MODELS, *_OF_BOTH)}
        if kv is not None:
            wrong = changed(fields, ("model", "tokenizer", "store", "reuse", *_OF_SERVERS))
            why = (
                "the engine that was given has its own {}: give recompute_ratio, method and sink "
                "instead, or no kv"
            )
        elif fields["api_base"] is None:
            wrong = changed(fields, _OF_SERVERS)
            why = "{}: only a server has that; give api_base=..."
        else:
            wrong = changed(fields, _OF_MODELS)
            why = (
                "{}: the model of api_base is the server's, and so is that; omit it, or omit "
                "api_base to load a model here"
            )
        if wrong:
            raise ConfigError(why.format(", ".join(wrong)))
        if isinstance(fields["api_key"], str):
            fields["api_key"] = SecretStr(fields["api_key"])
        given = {name: fields[name] for name in fields if fields[name] is not None}
        given["device_map"] = fields["device_map"]  # None is a value
        source = cls(engine=kv, is_shared=kv is not None, **given)
        namespace, own = source.namespace, source.get().namespace
        if namespace not in ("default", own):
            raise ConfigError(
                f"the engine that was given keeps namespace {own!r}, not {namespace!r}"
            )
        return source

    def get(self) -> Engine:
        """Return the engine, loading it on the first call."""
        if self.engine is None:
            with _LOADING:
                self.engine = self.engine or self._load()
        return self.engine

    def __deepcopy__(self, memo: dict[int, Any]) -> EngineSource:
        """Share the engine: a copied LLM uses the same model."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Return the specification without the engine.

        Raises
        ------
        ConfigError
            Another process could not load this model, or would not share its store.
        """
        if self.is_shared:
            raise ConfigError(
                "The LLM was given an engine (kv=...), which worker processes cannot make again. "
                "Give it the model's name and the store instead (model_name='...', store='...'), "
                "or run the pipeline without num_workers."
            )
        place = self.store.path if isinstance(self.store, StoreConfig) else self.store
        if place is not None and str(place) == MEMORY:
            raise ConfigError(
                "Worker processes cannot see a store in this process's memory. Give the LLM "
                "a folder (store='...'), or run the pipeline without num_workers."
            )
        name = self.model_name or str(getattr(self.model, "name_or_path", ""))
        if self.model is not None and not name:
            raise ConfigError(
                "The LLM holds a loaded model that has no name, so a worker process cannot load "
                "it. Save it and give its folder, too (model_name='...'), or run the "
                "pipeline without num_workers."
            )
        dtype = {} if self.model is None else {"dtype": self.model.dtype}
        kwargs = dtype | self.model_kwargs
        spec = replace(
            self, model_name=name, model=None, engine=None, api_key=None, model_kwargs=kwargs
        )
        return dict(spec.__dict__)

    def _load(self) -> Engine:
        if self.api_base is not None:
            from ragkv.client import TIMEOUT_S, RemoteRagKV

            return RemoteRagKV(
                self.api_base,
                None if self.api_key is None else self.api_key.get_secret_value(),
                timeout=self.timeout or TIMEOUT_S,
                max_retries=2 if self.max_retries is None else self.max_retries,
                model=self.model_name or None,
                reuse=self.reuse,
            )
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model, tokenizer = self.model, self.tokenizer
        device, is_one = _device(self.device_map)
        if model is None and (self.model_kwargs or not is_one):
            kwargs = {"device_map": self.device_map, **self.model_kwargs}
            model = pretrained(AutoModelForCausalLM, self.model_name or None, **kwargs)
        name = self.tokenizer_name or self.model_name or getattr(model, "name_or_path", "")
        is_needed = model is not None or self.tokenizer_name or self.tokenizer_kwargs
        if tokenizer is None and is_needed and (name or self.model is None):
            tokenizer = pretrained(AutoTokenizer, name or None, **self.tokenizer_kwargs)
        return RagKV(
            model if model is not None else self.model_name or None,
            tokenizer,
            store=self.store,
            reuse=self.reuse,
            namespace=self.namespace,
            device=device if model is None else None,
            on_unsupported=self.on_unsupported,
        )


def given_values(**values: Any) -> dict[str, Any]:
    """Return the values that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def one_device(device: str | None, device_map: Any) -> Any:
    """Return ``device`` as a device_map; raise ConfigError where another one was given, too."""
    if device is None:
        return device_map
    if device_map not in (None, "auto", device):
        raise ConfigError(f"device={device!r} and device_map={device_map!r}: give one of them")
    return device


def changed(given: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Return the names of the arguments that are not as they are by default."""
    return [name for name in names if given[name] not in (None, "", {}, _USUAL.get(name))]


def _device(device_map: Any) -> tuple[str | None, bool]:
    """Return the one device that a device_map means, and whether it means one."""
    import torch

    if device_map is None:
        return None, True
    if isinstance(device_map, dict) and list(device_map) == [""]:
        device_map = device_map[""]
    if device_map == "auto":
        return ("cuda" if torch.cuda.is_available() else None), True
    if isinstance(device_map, dict) or device_map in ("balanced", "balanced_low_0", "sequential"):
        return None, False
    check_settings(device=device_map)
    return str(torch.device(device_map)), True
