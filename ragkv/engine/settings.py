"""Checks of an engine's settings, most of them before its model is loaded: that takes minutes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from ragkv.config import DecodeConfig, ReuseConfig, StoreConfig
from ragkv.config.checks import check_number, check_text, check_whole
from ragkv.config.extensions import extension
from ragkv.engine.plan import StepDecoder
from ragkv.errors import ConfigError
from ragkv.model.default_model import model_gguf
from ragkv.model.fingerprint import Fingerprint
from ragkv.model.folders import check_place
from ragkv.model.load import check_device
from ragkv.model.loaded import LoadedModel, require_reusable
from ragkv.model.memory import budget_of
from ragkv.select import method_of
from ragkv.store.tiers.tier import MemoryTier


def check_calibration(config: ReuseConfig, name: str, fingerprint: Fingerprint) -> None:
    """Refuse a ratio that was calibrated for another model.

    Raises
    ------
    ConfigError
        ``calibrated_for`` is not the model's fingerprint.
    """
    if config.calibrated_for not in (None, fingerprint.digest):
        raise ConfigError(
            f"recompute_ratio {config.recompute_ratio} was calibrated for another model or dtype "
            f"than {name} in {fingerprint.dtype}: run `ragkv calibrate` for this one, or give "
            "calibrated_for=None to take the ratio all the same"
        )


def local_decoder(decoder: object) -> Callable[[LoadedModel], StepDecoder | None]:
    """Return what opens a library over a model from a GGUF file; it gives None unless named.

    It raises ConfigError for a model from elsewhere, and the library's own errors.

    Raises
    ------
    ConfigError
        There is no library of this name.
    MissingDependencyError
        Its package is not installed or cannot be loaded.
    """
    if not isinstance(decoder, str):
        return lambda _: None
    if decoder != "llama.cpp":
        raise ConfigError(f"decoder must be 'llama.cpp' or an object, not {decoder!r}")
    open_library = extension("llamacpp", "ragkv-llamacpp")

    def open_over(loaded: LoadedModel) -> StepDecoder:
        file = model_gguf(loaded.name)
        if file is None:
            raise ConfigError(f"decoder='llama.cpp' needs a GGUF file, which {loaded.name} is not")
        found: StepDecoder = open_library(require_reusable(loaded), file)
        return found

    return open_over


def tier_bytes(settings: StoreConfig, tiers: Iterable[MemoryTier], device: torch.device) -> int:
    """Return the bytes of the store's tiers and the history that share memory with the model."""
    if device.type != "cpu":
        return sum(tier.budget for tier in tiers if tier.device.type == device.type)
    return budget_of(settings.memory_bytes) + budget_of(settings.history_bytes)


def check_settings(
    reuse: ReuseConfig | None = None,
    overrides: dict[str, Any] | None = None,
    *,
    store: str | Path | StoreConfig | None = None,
    namespace: str = "default",
    decode: dict[str, Any] | None = None,
    model: object = None,
    device: str | torch.device | None = None,
    max_running: int | None = None,
    kv_bytes: int | None = None,
) -> StoreConfig:
    """Return the store's settings.

    Parameters
    ----------
    overrides
        Fields of ReuseConfig, on top of ``reuse``.
    decode
        Arguments of :meth:`ragkv.RagKV.generate`.

    Raises
    ------
    ConfigError, UnknownMethodError
        A setting is invalid.
    ModelNotFoundError
        The folder of the model, or of the auxiliary model, does not exist.
    """
    reuse = ReuseConfig() if reuse is None else reuse
    if not isinstance(reuse, ReuseConfig):
        raise ConfigError(f"reuse must be a ReuseConfig, not {reuse!r}")
    check_text("namespace", namespace)
    if max_running is not None:
        check_whole("max_running", max_running, 1, 4096)
    if kv_bytes is not None:
        check_number("kv_bytes", kv_bytes, 1, 2**60)
    known = DecodeConfig.__dataclass_fields__
    given = {} if decode is None else decode
    DecodeConfig(**{name: given[name] for name in known.keys() & given.keys()})
    rest = {name: given[name] for name in given.keys() - known.keys()}
    config = reuse.override(**{**rest, **(overrides or {})})
    method_of(config)
    check_device(device)
    for name in (model, config.auxiliary_model):
        if isinstance(name, str | Path) and name:
            check_place(name)
    return store if isinstance(store, StoreConfig) else StoreConfig(store)
