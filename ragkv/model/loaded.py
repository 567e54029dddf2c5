"""A loaded model, with or without reuse of its chunks' caches, and the FLOPs of its prefill."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ragkv.errors import ConfigError, UnsupportedModelError
from ragkv.model.architecture import Architecture, backbone_of, config_of, known_positions
from ragkv.model.fingerprint import Fingerprint
from ragkv.model.rotary import RotaryTables
from ragkv.model.streams import wait_for, without_plans
from ragkv.model.workspace import Workspace


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LoadedModel:
    """A language model with its tokenizer.

    Attributes
    ----------
    name
        Hub name, folder, or class name of a model without one.
    unsupported
        Why chunk caches cannot be reused; empty for a :class:`ReusableModel`.
    workspace
        Memory of the requests' keys and values, one request at a time.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    unsupported: str = ""
    workspace: Workspace = field(default_factory=Workspace)

    @property
    def device(self) -> torch.device:
        """The device of the model's input."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of keys and values."""
        return self.model.dtype

    @property
    def positions(self) -> int | None:
        """Number of positions that the configuration declares, or None."""
        return known_positions(config_of(self.model))

    def without_embedding(self, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Return the tokens in ``ids`` without an embedding."""
        embedding = self.model.get_input_embeddings()
        known = int(getattr(embedding, "num_embeddings", config_of(self.model).vocab_size))
        return ids[(ids < 0) | (ids >= known)]

    def require_embedded(self, ids: npt.NDArray[np.int32], what: str) -> None:
        """Refuse tokens without an embedding; the message calls their text ``what``.

        Raises
        ------
        ConfigError
            There is one. The message has the first.
        """
        unknown = self.without_embedding(ids)
        if not len(unknown):
            return
        token = int(unknown[0])
        named = 0 <= token < len(self.tokenizer)
        name = f" {self.tokenizer.convert_ids_to_tokens(token)!r}" if named else ""
        raise ConfigError(
            f"{what} has the token{name} with the id {token}, and the model has no embedding for "
            "it: remove the token, or use the model's own tokenizer"
        )

    def wait(self) -> None:
        """Wait until the device has finished the current stream's work."""
        wait_for(self.device)

    @contextmanager
    def without_autocast(self) -> Iterator[None]:
        """Compute in the model's own dtype in the block, and on a GPU without cuDNN."""
        with torch.autocast(self.device.type, enabled=False), without_plans(self.device):
            yield


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ReusableModel(LoadedModel):
    """A model whose chunk caches can be moved exactly.

    Attributes
    ----------
    architecture
        Shape of the cache and kinds of its layers.
    rotary
        The model's rotary tables.
    fingerprint
        Digest of everything that caches depend on, taken when the weights had ``state``.
    state
        See :func:`ragkv.model.fingerprint.state_of`.
    """

    architecture: Architecture
    rotary: RotaryTables
    fingerprint: Fingerprint
    state: tuple[object, ...]


def require_reusable(loaded: LoadedModel) -> ReusableModel:
    """Return the model itself.

    Raises
    ------
    UnsupportedModelError
        Its chunk caches cannot be reused.
    """
    if not isinstance(loaded, ReusableModel):
        raise UnsupportedModelError(loaded.unsupported)
    return loaded


def prefill_flops_of(loaded: ReusableModel) -> Callable[[int, int], float]:
    """Return a function for the FLOPs of computing ``new`` tokens after ``cached`` ones.

    In a mixture of experts, only a token's active experts count.
    """
    model, shape = loaded.model, loaded.architecture
    config = config_of(model)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    active = getattr(config, "num_experts_per_tok", None) or 1
    share = active / experts if experts else 1.0
    weights = sum(
        weight.numel() * (share if ".experts." in name else 1.0)
        for name, weight in backbone_of(model).layers.named_parameters()
    )
    heads = getattr(config, "num_attention_heads", shape.kv_heads)
    return partial(prefill_flops, weights, heads * shape.head_dim, shape.windows)


def prefill_flops(
    weights: float, width: int, windows: Sequence[int | None], cached: int, new: int
) -> float:
    """Return the FLOPs of computing ``new`` tokens after ``cached`` ones.

    Parameters
    ----------
    weights
        Number of weights of all layers that each token is multiplied by.
    width
        Number of query heads times their dimension.
    windows
        The sliding window of each layer in tokens, or None.
    """
    pairs = 0  # of a query and a key that it attends to
    for window in windows:
        inside = new if window is None else min(new, max(0, window - cached))
        pairs += inside * cached + inside * (inside + 1) // 2 + (new - inside) * (window or 0)
    return 2.0 * weights * new + 4.0 * width * pairs
