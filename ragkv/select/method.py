"""Methods: their fields, their rules' input, and the lookup by name."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ragkv.attend.forward import SubsetPass, observed_forward
from ragkv.attend.graphs import graphs_for
from ragkv.attend.observe import LayerCall, Observer, StopPass, attention_of_query
from ragkv.attend.sparse_rows import Sparse
from ragkv.config import Named, ReuseConfig, check_whole
from ragkv.config.checks import check_choice
from ragkv.errors import ConfigError, UnknownMethodError
from ragkv.model.loaded import ReusableModel
from ragkv.select import rules
from ragkv.select.auxiliary import Auxiliary
from ragkv.splice.buffer import BeforeWrite, SplicedCache
from ragkv.splice.layout import Layout

FloatArray = npt.NDArray[np.float32]
_REUSE = ("none", "prefix", "chunks")


class Scored(NamedTuple):
    """A rule's scores, and its own function to move the tokens that are not recomputed.

    Attributes
    ----------
    scores
        ``[cached]`` float32.
    mover
        Takes the sorted positions ``[rows]`` that the pass computes; returns the callback that
        moves the other rows of a layer.
    """

    scores: FloatArray
    mover: Callable[[npt.NDArray[np.int64]], BeforeWrite]


@dataclass(frozen=True, slots=True, eq=False)
class Scene:
    """A rule's input: the spliced prompt, and passes of the model over it.

    Attributes
    ----------
    layout
        Origin of every prompt token; ``layout.cached`` are the positions to score.
    text
        The prompt's text.
    loaded
        The primary model.
    cache
        The spliced cache, keys rotated: ``keys`` and ``values`` ``[layers, kv_heads, capacity,
        head_dim]``, or ``layer(index)``, which loads only that layer; row j is at position j.
    auxiliary
        Loads the auxiliary model on first use.
    """

    layout: Layout
    text: str
    loaded: ReusableModel
    cache: SplicedCache
    auxiliary: Callable[[], Auxiliary]

    @property
    def layers(self) -> int:
        """Number of the primary model's layers."""
        return self.loaded.architecture.layers

    def seeing_all(self, layers: Iterable[int]) -> list[int]:
        """Return the layers in which the last token sees the whole prompt; all if none does.

        In a layer with a sliding window, the query attends only to near tokens.
        """
        windows = self.loaded.architecture.windows
        given = list(layers)
        wide = [at for at in given if (windows[at] or len(self.layout)) >= len(self.layout)]
        return wide or given

    def observe(self, observer: Observer, *, rows: Literal["fresh", "all"] = "fresh") -> None:
        """Run rows through the primary model over the unrepaired cache.

        The computed rows stay in the cache, in the layers before the observer stopped the pass.

        Parameters
        ----------
        observer
            Called in every layer before its attention; can stop the pass.
        rows
            ``"fresh"``: the uncached tokens, including the query.
        """
        chosen = self.layout.fresh if rows == "fresh" else np.arange(len(self.layout))
        subset = SubsetPass(self.layout.ids, chosen, self.cache, observer=observer)
        observed_forward(self.loaded, subset)

    def attention_of_query(self, layers: Sequence[int], count: int) -> torch.Tensor:
        """Return the attention of the last ``count`` tokens in some layers, before any repair.

        Returns
        -------
        torch.Tensor
            ``[2, tokens]`` float32 on the model's device: sums over the layers of
            :func:`ragkv.attend.observe.attention_of_query`.
        """
        subset = SubsetPass(self.layout.ids, self.layout.fresh, self.cache)
        graphs = graphs_for(self.loaded)
        if graphs is not None:
            found = graphs.attention_of_query(self.loaded, subset, layers, count)
            if found is not None:
                return found
        paid = torch.zeros(2, len(self.layout), dtype=torch.float32, device=self.cache.device)

        def observe(call: LayerCall) -> None:
            if call.layer in layers:
                paid.add_(attention_of_query(call, count))
            if call.layer == layers[-1]:
                raise StopPass

        self.observe(observe)
        return paid


@dataclass(frozen=True, slots=True)
class Spread:
    """A token ``d`` positions away gets ``share * exp(-d / within)`` of a score added."""

    share: float
    within: float

    def __post_init__(self) -> None:
        if not (self.share >= 0 and self.within > 0):
            raise ConfigError("a spread's share must be at least 0, and within more than 0")


@dataclass(frozen=True, slots=True)
class CopyLookup:
    """The stale tokens to recompute while the answer is generated.

    For each occurrence of the last generated token in the prompt, these are its position and the
    ``tokens`` positions after it, if stale. An answer has a budget of ``rows`` of them, and as many
    more after every ``every`` tokens. A token with more than ``rare`` occurrences must match
    together with the one before it.
    """

    tokens: int
    rare: int
    rows: int
    every: int

    def __post_init__(self) -> None:
        least = {"tokens": 0, "rare": 0, "rows": 1, "every": 1}
        for name, number in least.items():
            if getattr(self, name) < number:
                raise ConfigError(f"a copy lookup's {name} must be at least {number}")


@dataclass(frozen=True, slots=True)
class Grouping:
    """Recompute whole windows instead of scattered tokens (CacheClip, arXiv 2510.10129v2).

    Parameters
    ----------
    window
        Length of a window in prompt tokens.
    threshold
        A window is recomputed if *more than* this many of its tokens were chosen. Windows slide by
        one token within a chunk. As many of the highest scores are chosen as their windows fit the
        recompute ratio, which the recomputed share never exceeds.
    """

    window: int = 8
    threshold: int = 5

    def __post_init__(self) -> None:
        check_whole("grouping window", self.window, 1, 4096)
        check_whole("grouping threshold", self.threshold, 0, self.window - 1)


@dataclass(frozen=True, slots=True)
class Method:
    """A named way of reusing chunks, with its paper's defaults.

    ``ReuseConfig.method`` and a call's ``method=`` take such an object in place of a name.

    Parameters
    ----------
    name
        The name in reports; for a rule in ``rules/``, the file's name.
    score
        Returns ``[cached]`` float32, higher is recomputed first, in the order of
        ``scene.layout.cached``, or a :class:`Scored`. None recomputes nothing below ratio 1.
    auto
        The meaning of the scores for ``recompute_ratio="auto"``; None does not support it.
        ``"attention"``: shares of the query's attention, of which the chosen tokens cover
        :data:`ragkv.select.choose.TARGET`. ``"overhead"``: minus the alpha from which on
        Cache-Craft recomputes a token.
    spread
        The share of neighbours' scores that is added to a token's, or None.
    reuse
        The reused rows: ``none``, an ordinary prefill; ``prefix``, an exact prefix of the prompt;
        ``chunks``, the entries of all known chunks and, unless ``ReuseConfig.history`` is off, rows
        of prompts that begin with the same tokens (:mod:`ragkv.history`) and contextual versions of
        the chunks (:mod:`ragkv.store.version`).
    grouping
        Windows that are recomputed whole, or None.
    auxiliary
        Whether ingestion also encodes the chunks for the auxiliary model.
    drift
        Whether tokens that are not recomputed are moved by the expected drift of their chunk
        (:mod:`ragkv.recompute.drift`).
    sparse
        Sparse attention of recomputed tokens in the upper layers, on a CPU; None: full. On a GPU,
        where attention is a small part of a pass, it is always full.
    lookup
        Repair of tokens that the answer is about to copy (:mod:`ragkv.recompute.copy_repair`), or
        None.
    """

    name: str
    score: Callable[[Scene], FloatArray | Scored] | None = None
    auto: Literal["attention", "overhead"] | None = None
    spread: Spread | None = None
    reuse: Literal["none", "prefix", "chunks"] = "chunks"
    grouping: Grouping | None = None
    auxiliary: bool = False
    drift: bool = False
    sparse: Sparse | None = None
    lookup: CopyLookup | None = None

    @property
    def uses_chunks(self) -> bool:
        """Whether chunks are reused anywhere in the prompt."""
        return self.reuse not in ("none", "prefix")

    def __post_init__(self) -> None:
        if self.auto is not None:
            check_choice("a method's auto", self.auto, ("attention", "overhead"))
        check_choice("a method's reuse", self.reuse, _REUSE)


_WITHOUT_SCORES = {
    # Ordinary prefill of the whole prompt: the reference for quality.
    "full": Method("full", reuse="none"),
    # Reuse of only an exact token prefix, as in vLLM and SGLang: the sink and, directly behind it,
    # the prompt's first chunk.
    "prefix": Method("prefix", reuse="prefix"),
    # Chunks behind the shared sink, re-positioned, nothing recomputed: CacheClip, arXiv 2510.10129,
    # section 3.
    "reuse": Method("reuse"),
}
"""The methods that recompute no row; the others are modules of ``rules/``."""


def method_of(config: ReuseConfig) -> Method:
    """Return the method that a configuration names.

    Raises
    ------
    UnknownMethodError
        There is no such method.
    ConfigError
        The ratio is ``"auto"``, which the method does not support.
    """
    method = get_method(config.method)
    if config.recompute_ratio == "auto" and method.auto is None:
        raise ConfigError(
            "recompute_ratio='auto' needs a method that scores by the query's attention, such as "
            f"'query', or 'cachecraft'; {method.name!r} does not"
        )
    return method


@cache
def method_names() -> tuple[str, ...]:
    """Return the names of all methods, sorted."""
    modules = (module.name for module in pkgutil.iter_modules(rules.__path__))
    return tuple(sorted((*_WITHOUT_SCORES, *modules)))


def get_method(name: str | Named) -> Method:
    """Return the method of that name; a :class:`Method` is returned as it is.

    Raises
    ------
    UnknownMethodError
        There is no such method; the message lists the known ones.
    """
    if isinstance(name, Method):
        return name
    if name not in method_names():
        raise UnknownMethodError(
            f"no method {name!r}; known: {', '.join(method_names())}. Other baselines are Method "
            "objects in ragkv_bench.methods: give the object"
        )
    if name in _WITHOUT_SCORES:
        return _WITHOUT_SCORES[name]
    method = importlib.import_module(f"{rules.__name__}.{name}").METHOD
    if not isinstance(method, Method):
        raise TypeError(f"ragkv/select/rules/{name}.py must define METHOD, a Method")
    return method
