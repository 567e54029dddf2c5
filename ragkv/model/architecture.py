"""The shape of a model's caches, or the reason why they cannot be moved; a probe of its keys."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache

from ragkv.errors import UnsupportedModelError
from ragkv.model.calls import cache_argument, require_used
from ragkv.model.rotary import TURNS, RopeKind, RotaryTables, unrotate

VERIFIED = frozenset(
    {"llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt_oss", "phi3"}
)
"""Types of transformers' own models whose exactness the test suite verifies."""

FULL, SLIDING = "full_attention", "sliding_attention"
_NO_WINDOW = frozenset({"llama"})
"""Model types that attend to all keys, whatever their configuration says."""
_ONE_WINDOW = frozenset({"mistral", "phi3"})
"""Model types whose window applies to all layers, whatever their configuration says."""
_MEND = "Load it with on_unsupported='full' to serve it by ordinary full prefill."
_STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})


@dataclass(frozen=True, slots=True)
class Architecture:
    """The shape of a model's KV cache and the kinds of its layers.

    Attributes
    ----------
    layers, kv_heads, head_dim
        Shape of the cache: ``[layers, kv_heads, tokens, head_dim]``.
    windows
        Per layer: sliding window in tokens (a query sees this many keys, itself
        included), or None for full attention.
    rope_kinds
        Per layer: how its keys rotate.
    position_limit
        First position at which the rotary table changes (longrope), or None.
    """

    layers: int
    kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    rope_kinds: tuple[RopeKind, ...]
    position_limit: int | None = None

    @property
    def values_per_token(self) -> int:
        """Numbers in the keys and values of one token, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def is_beyond(self, tokens: int) -> bool:
        """Whether a sequence of this length uses the table after the limit."""
        return self.position_limit is not None and tokens > self.position_limit


def backbone_of(model: PreTrainedModel) -> Any:
    """Return the decoder stack under the language-model head."""
    return model.get_decoder()  # type: ignore[no-untyped-call]


def config_of(model: PreTrainedModel) -> PretrainedConfig:
    """Return the decoder stack's configuration, a part of a multimodal model's."""
    config: PretrainedConfig = getattr(backbone_of(model), "config", model.config)
    return config


def attention_of(layer: Any) -> Any:
    """Return a layer's attention module, or None."""
    return getattr(layer, "self_attn", None) or getattr(layer, "attention", None)  # GPT-NeoX


def is_verified(model: PreTrainedModel) -> bool:
    """Whether the test suite covers models of this family; others are probed at loading.

    Remote code is another family, whatever its model type.
    """
    backbone = backbone_of(model)
    parts = (model, backbone, *map(attention_of, backbone.layers[:1]))
    ours = all(type(part).__module__.startswith("transformers.models.") for part in parts)
    return ours and config_of(model).model_type in VERIFIED


def describe(model: PreTrainedModel) -> Architecture:
    """Read a model's architecture from its configuration and modules.

    Raises
    ------
    UnsupportedModelError
        Its caches cannot be moved exactly; the message names the mechanism.
    """
    config = config_of(model)
    _refuse_foreign_mechanisms(model, config)
    devices = sorted({str(part.device) for part in model.parameters()})
    if len(devices) > 1 or devices == ["meta"]:
        raise _unsupported(f"weights on {' and '.join(devices)}: load it on one device")
    backbone = backbone_of(model)
    kinds = _layer_kinds(config)
    window = _window(config)
    per_kind, limit = _rope(config)
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    if len(backbone.layers) != config.num_hidden_layers:
        raise _unsupported(f"{len(backbone.layers)} layers where its configuration says otherwise")
    return Architecture(
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=head_dim,
        windows=tuple(window if kind == SLIDING else None for kind in kinds),
        rope_kinds=tuple(RopeKind(kind if per_kind else "") for kind in kinds),
        position_limit=limit,
    )


def known_positions(config: PretrainedConfig) -> int | None:
    """Return the number of positions that a configuration declares, or None.

    ``yarn`` and ``linear`` stretch the rope by a factor, which is often not in
    ``max_position_embeddings`` (Qwen2.5 documents YaRN so).
    """
    known: int | None = getattr(config, "max_position_embeddings", None)
    rope: dict[str, Any] = dict(getattr(config, "rope_parameters", None) or {})
    if rope.get("rope_type") == "dynamic":  # grows with the prompt
        return None
    if known is None or rope.get("rope_type") not in ("yarn", "linear"):
        return known
    original = rope.get("original_max_position_embeddings") or known
    return max(known, int(original * (rope.get("factor") or 1.0)))


def _window(config: PretrainedConfig) -> int | None:
    """Return the window of sliding layers, or None."""
    window: int | None = getattr(config, "sliding_window", None)
    if config.model_type in _NO_WINDOW:
        if window is not None and window < config.max_position_embeddings:
            raise _unsupported(
                f"a window of {window} tokens in its configuration, which its attention ignores "
                "and transformers' cache obeys (set config.sliding_window = None)"
            )
        return None
    off = getattr(config, "use_sliding_window", True) is False
    return None if off and config.model_type not in _ONE_WINDOW else window


def _layer_kinds(config: PretrainedConfig) -> tuple[str, ...]:
    """Return full or sliding attention for each layer."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None or config.model_type in _NO_WINDOW | _ONE_WINDOW:
        return (FULL if _window(config) is None else SLIDING,) * int(config.num_hidden_layers)
    foreign = sorted(set(kinds) - {FULL, SLIDING})
    if foreign:
        raise _unsupported(f"layers of type {', '.join(foreign)}")
    return tuple(kinds)


def _rope(config: PretrainedConfig) -> tuple[bool, int | None]:
    """Return whether tables differ by layer kind, and the position where they change."""
    parameters: dict[str, Any] = dict(getattr(config, "rope_parameters", None) or {})
    per_kind = bool(parameters) and set(parameters) <= {FULL, SLIDING}
    tables: Iterable[dict[str, Any]] = parameters.values() if per_kind else (parameters,)
    limit = None
    for table in tables:
        kind = (table or {}).get("rope_type", "default")
        if kind == "dynamic":
            raise _unsupported("dynamic NTK rope, whose table changes with the prompt's length")
        if kind == "longrope":
            limit = table.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
        elif kind not in _STATIC_ROPE:
            raise _unsupported(f"rope type {kind!r}")
    return per_kind, limit


def _refuse_foreign_mechanisms(model: PreTrainedModel, config: PretrainedConfig) -> None:
    """Raise for mechanisms that the rotation and the subset pass do not reproduce."""
    if getattr(config, "is_encoder_decoder", False):
        raise _unsupported("an encoder and a decoder")
    if getattr(config, "kv_lora_rank", None):
        raise _unsupported("latent attention (MLA), whose cache is not keys and values")
    if getattr(config, "alibi", False) or getattr(config, "position_embedding_type", "") == "alibi":
        raise _unsupported("ALiBi positions, which are not in the keys")
    backbone = backbone_of(model)
    layers = getattr(backbone, "layers", None)
    if layers is None or not hasattr(backbone, "rotary_emb"):
        kind = type(backbone).__name__
        raise _unsupported(f"a {kind} without rotary positions (ALiBi, learned or recurrent)")
    if any(attention_of(layer) is None for layer in layers):
        raise _unsupported("layers without attention (recurrent or convolutional)")
    if getattr(config, "num_kv_shared_layers", 0):
        raise _unsupported("layers that share one another's keys and values")
    if getattr(config, "use_bidirectional_attention", False) or not getattr(
        config, "is_causal", True
    ):
        raise _unsupported("attention that is not causal")


def _unsupported(mechanism: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"This model has {mechanism}: ragkv cannot reuse it. {_MEND}")


_STARTS = (0, 37, 150)
"""First positions of the tokens of a probe."""
_PROBE_IDS = range(40, 56)


class KeyProbe:
    """Each layer's keys of the same tokens at several positions.

    Rotary attention depends only on differences of positions, so these keys differ only in their
    rotation.
    """

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel) -> None:
        ids = torch.tensor([list(_PROBE_IDS)], device=model.device)
        self._places = [
            torch.arange(first, first + len(_PROBE_IDS), device=model.device) for first in _STARTS
        ]
        self._keys: list[list[torch.Tensor]] = []
        for positions in self._places:
            cache = DynamicCache()
            given = cache_argument(model, cache)
            model(ids, position_ids=positions[None], use_cache=True, **given)
            require_used(cache.get_seq_length(), len(_PROBE_IDS), "rows in the cache")
            layers: list[Any] = cache.layers
            self._keys.append([layer.keys for layer in layers])

    def distance(self, layer: int, kind: RopeKind, rotary: RotaryTables) -> float:
        """Return the largest difference of a layer's unrotated keys, in standard deviations."""
        first, *others = (
            unrotate(keys[layer], rotary.at(kind, positions)).float()
            for keys, positions in zip(self._keys, self._places, strict=True)
        )
        return max(float((other - first).abs().max() / first.std()) for other in others)


def probe_rope_kinds(
    model: PreTrainedModel, architecture: Architecture, rotary: RotaryTables
) -> tuple[RopeKind, ...]:
    """Return for each layer the kind of rotation with the least :meth:`KeyProbe.distance`.

    :func:`ragkv.engine.verify.check_model` checks that it is small enough.
    """
    probe = KeyProbe(model)
    return tuple(
        min(
            (RopeKind(kind.table, turn) for turn in TURNS),
            key=lambda tried: probe.distance(layer, tried, rotary),
        )
        for layer, kind in enumerate(architecture.rope_kinds)
    )
