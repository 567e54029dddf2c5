"""Load a model and decide whether its chunk caches can be reused."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ragkv.errors import (
    ConfigError,
    ModelInUseError,
    ModelNotFoundError,
    UnsupportedModelError,
    UnsupportedTokenizerError,
)
from ragkv.model.architecture import (
    Architecture,
    backbone_of,
    describe,
    is_verified,
    probe_rope_kinds,
)
from ragkv.model.default_model import DEFAULT_MODEL, model_gguf
from ragkv.model.fingerprint import fingerprint_of, state_of
from ragkv.model.folders import check_place, near
from ragkv.model.gguf import from_gguf
from ragkv.model.linear import keep_float32
from ragkv.model.loaded import LoadedModel, ReusableModel
from ragkv.model.lock import lock_of
from ragkv.model.memory import is_out_of_memory
from ragkv.model.rotary import RotaryTables

_log = logging.getLogger(__name__)


def load_model(
    model: str | Path | PreTrainedModel | LoadedModel | None,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    on_unsupported: Literal["raise", "full"] = "raise",
) -> LoadedModel:
    """Load ``model`` (hub name, folder, GGUF file, loaded model or None) and describe it.

    Raises
    ------
    ModelNotFoundError
        No such model on this machine.
    UnsupportedModelError
        Its caches cannot be reused exactly and ``on_unsupported`` is ``"raise"``.
    ConfigError
        Device or dtype cannot be used, or model or tokenizer are of another type.
    """
    if on_unsupported not in ("raise", "full"):
        raise ConfigError(f"on_unsupported must be 'raise' or 'full', not {on_unsupported!r}")
    if tokenizer is not None and not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ConfigError(
            f"tokenizer must be a transformers tokenizer, not {type(tokenizer).__name__}"
        )
    if isinstance(model, LoadedModel):
        _refuse_changes(model, tokenizer, device, dtype)
        return model
    check_device(device)
    given = _unwrapped(model)
    loaded, tokens, name = _resolve(given, tokenizer, dtype_of(dtype))
    other = dtype_of(dtype) if loaded is given else None  # a model loaded here has it already
    if device is not None:
        with lock_of(loaded):
            loaded.to(device)  # type: ignore[arg-type]
    loaded.train(mode=False)
    if dtype is not None:
        keep_float32(loaded)
    try:
        if not tokens.is_fast:
            raise UnsupportedTokenizerError(
                f"{type(tokens).__name__} cannot say which characters a token covers. Load the "
                "model's fast tokenizer, or use on_unsupported='full'."
            )
        architecture = describe(loaded)
        _cast(loaded, other)
        architecture = _with_probed_rope(loaded, architecture)
        fingerprint = fingerprint_of(loaded, tokens, architecture.rope_kinds)
    except UnsupportedModelError as reason:
        if on_unsupported == "raise":
            raise
        _cast(loaded, other)
        return without_reuse(loaded, tokens, name, str(reason))
    return ReusableModel(
        model=loaded,
        tokenizer=tokens,
        name=name,
        architecture=architecture,
        rotary=RotaryTables(backbone_of(loaded)),
        fingerprint=fingerprint,
        state=state_of(loaded),
    )


def _refuse_changes(
    loaded: LoadedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    device: str | torch.device | None,
    dtype: str | torch.dtype | None,
) -> None:
    """Raise ConfigError for a change of a model that others may already use."""
    check_device(device)
    place = loaded.device if device is None else torch.device(device)
    given = {
        "tokenizer": tokenizer is None or tokenizer is loaded.tokenizer,
        "device": place in (loaded.device, torch.device(loaded.device.type)),  # "cuda": any
        "dtype": dtype_of(dtype) in (None, loaded.dtype),
    }
    for name, same in given.items():
        if not same:
            raise ConfigError(
                f"{name} differs from that of the given LoadedModel: leave it out, or give the "
                "transformers model and its tokenizer"
            )


def _with_probed_rope(model: PreTrainedModel, architecture: Architecture) -> Architecture:
    """Return the architecture, for untested families with the probed kinds of rotation."""
    if is_verified(model):
        return architecture
    with lock_of(model), torch.autocast(model.device.type, enabled=False):
        try:
            kinds = probe_rope_kinds(model, architecture, RotaryTables(backbone_of(model)))
        except ModelInUseError:
            raise
        except Exception as error:  # the check that follows names the cause
            if is_out_of_memory(error):
                raise
            _log.info(
                "the rotation of keys in %s cannot be probed: %r", type(model).__name__, error
            )
            return architecture
    return replace(architecture, rope_kinds=kinds)


def without_reuse(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, reason: str
) -> LoadedModel:
    """Describe a model whose caches cannot be reused, and log a warning."""
    _log.warning("%s is served by full prefill: %s", name, reason)
    return LoadedModel(model=model, tokenizer=tokenizer, name=name, unsupported=reason)


def _resolve(
    model: str | Path | PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase | None,
    dtype: torch.dtype | None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str]:
    if model is None or str(model) == DEFAULT_MODEL:
        model = DEFAULT_MODEL
    if isinstance(model, str | Path):
        kwargs: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
        loaded = pretrained(AutoModelForCausalLM, model, **kwargs)
        return loaded, tokenizer or pretrained(AutoTokenizer, model), str(model)
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            "model must be a name, a folder, a GGUF file or a transformers model, not "
            f"{type(model).__name__}: give the transformers model in it, and its tokenizer"
        )
    if tokenizer is None:
        raise ConfigError("A loaded model needs its tokenizer: RagKV(model, tokenizer).")
    return model, tokenizer, str(model.config.name_or_path or type(model).__name__)


def _unwrapped(model: Any) -> Any:
    """Return the model in torch.compile's, DataParallel's or PEFT's wrapper, adapters included.

    Raises
    ------
    UnsupportedModelError
        PEFT puts virtual tokens before its prompts.
    """
    while isinstance(model, torch.nn.Module) and not isinstance(model, PreTrainedModel):
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            raise UnsupportedModelError(
                "this PEFT model puts virtual tokens before each prompt, which caches lack: give "
                "adapters that change weights, such as LoRA, or model.get_base_model()"
            )
        unwrap = getattr(model, "get_base_model", lambda: None)
        parts = (getattr(model, name, None) for name in ("_orig_mod", "module"))
        inner = next((part for part in parts if part is not None), None)
        inner = unwrap() if inner is None else inner
        if inner is None:
            break
        model = inner
    return model


def _cast(model: PreTrainedModel, dtype: torch.dtype | None) -> None:
    """Change a model's dtype as loading in that dtype would; None keeps it.

    ``to`` would also round buffers that are not in files: the rotary frequencies.
    """
    if dtype is None:
        return
    kept = [
        (part, name, part.get_buffer(name))
        for part in model.modules()
        for name in part._non_persistent_buffers_set  # noqa: SLF001  torch has no public name
    ]
    with lock_of(model):
        try:
            model.to(dtype)  # type: ignore[arg-type]
        except ValueError as error:  # quantised
            raise ConfigError(f"this model cannot be made {dtype}: {error}") from error
        for part, name, buffer in kept:
            setattr(part, name, buffer)


def pretrained(auto: Any, name: str | Path | None, **kwargs: Any) -> Any:
    """Return what a transformers ``Auto…`` class loads; None names the embedded model.

    Raises
    ------
    ModelNotFoundError
        Nothing can be loaded by this name.
    """
    name = DEFAULT_MODEL if name is None else name
    if (file := model_gguf(name)) is not None:
        return from_gguf(auto, file, **kwargs)
    needs_config = auto is not AutoTokenizer and not {"gguf_file", "subfolder"} & kwargs.keys()
    place = check_place(name, configured=needs_config) or name
    try:
        return auto.from_pretrained(str(place), **kwargs)
    except (OSError, ValueError, SafetensorError) as error:
        there = ""
        if not Path(place).is_dir():
            there = f" There is no folder of this name{near(Path(place))}"
        raise ModelNotFoundError(
            f"Cannot load {str(name)!r}: {error}.{there} Give a folder with a transformers model, "
            "a GGUF file, a hub name, a loaded model with its tokenizer, or nothing for the "
            "embedded one."
        ) from error


def check_device(device: str | torch.device | None) -> None:
    """Raise ConfigError for a device that torch does not know or cannot use here."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        raise ConfigError(
            f"device must be one that torch can use here, such as 'cpu', not {device!r}: {error}"
        ) from error


def dtype_of(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Return the dtype of that name; None stays None.

    Raises
    ------
    ConfigError
        There is no such dtype, or no model computes in it.
    """
    if dtype is None:
        return None
    found = dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigError(f"dtype must be one that models compute in: 'bfloat16', not {dtype!r}")
    return found
