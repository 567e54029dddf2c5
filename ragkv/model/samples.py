"""A checksum of a few bytes of every weight, cheap enough for each request."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, starmap

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from transformers import PreTrainedModel

_WHOLE = 1 << 15
"""Weights of at most this many bytes are read whole."""
_RUNS, _RUN = 16, 64
"""Number of evenly spread runs of a larger weight, and bytes of each."""


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Views of the sampled bytes of a model's weights.

    Attributes
    ----------
    on_host
        Views of ``[bytes]`` and of ``[runs, bytes]``.
    on_devices
        The same, as tensors by device.
    """

    on_host: tuple[Sequence[npt.NDArray[np.uint8]], Sequence[npt.NDArray[np.uint8]]]
    on_devices: Sequence[tuple[list[torch.Tensor], list[torch.Tensor]]]

    @property
    def checksum(self) -> int:
        """Checksum of the current bytes."""
        read = [np.concatenate(views) for views in self.on_host if views]
        for views in self.on_devices:
            joined = [torch.cat(parts).flatten() for parts in views if parts]
            read.append(torch.cat(joined).cpu().numpy())
        total = xxhash.xxh3_64()
        for part in read:
            total.update(part.data)
        return total.intdigest()


_samples: weakref.WeakKeyDictionary[PreTrainedModel, tuple[object, Samples]] = (
    weakref.WeakKeyDictionary()
)


def checksum_of(model: PreTrainedModel, weights: Sequence[torch.Tensor], places: object) -> int:
    """Return the checksum of a model's weights.

    Parameters
    ----------
    places
        The weights' addresses: the views of the last call are used again if it is equal.
    """
    known = _samples.get(model)
    if known is None or known[0] != places:
        known = _samples[model] = places, _samples_of(weights)
    return known[1].checksum


@torch.no_grad()
def _samples_of(weights: Iterable[torch.Tensor]) -> Samples:
    on_devices: dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for plain in chain.from_iterable(map(_plain, weights)):
        raw = _sampled(plain)
        whole, runs = on_devices.setdefault(raw.device, ([], []))
        (whole if raw.ndim == 1 else runs).append(raw)
    whole, runs = on_devices.pop(torch.device("cpu"), ([], []))
    on_host = [raw.numpy() for raw in whole], [raw.numpy() for raw in runs]
    return Samples(on_host, tuple(on_devices.values()))


def _plain(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a weight, or the weights inside a wrapper such as torchao's."""
    parts = getattr(weight, "__tensor_flatten__", None)
    if parts is not None:
        for name in parts()[0]:
            yield from _plain(getattr(weight, name))
    elif weight.numel() and weight.device.type != "meta":
        yield weight.detach()


def _sampled(weight: torch.Tensor) -> torch.Tensor:
    """Return a view ``[bytes]`` or ``[runs, bytes]`` uint8 of a weight's memory."""
    span = 1 + sum(starmap(_reach, zip(weight.shape, weight.stride(), strict=True)))
    raw = weight.as_strided((span,), (1,)).view(torch.uint8)
    if len(raw) <= _WHOLE:
        return raw
    step, first = divmod(len(raw) - _RUN, _RUNS - 1)  # the last run ends with the weight
    return raw[first:].as_strided((_RUNS, _RUN), (step, 1))


def _reach(size: int, stride: int) -> int:
    return (size - 1) * stride
