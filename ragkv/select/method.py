"""What a method is, what its rule gets to see, and how methods are found by name."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from ragkv.attend.observe import Observer
from ragkv.attend.sparse import Sparse
from ragkv.config import Grouping, Named, ReuseConfig
from ragkv.errors import ConfigError, UnknownMethodError
from ragkv.select import rules
from ragkv.select.auxiliary import Auxiliary
from ragkv.splice.buffer import SplicedCache
from ragkv.splice.layout import Layout
from ragkv.splice.overlap import Parallel

FloatArray = npt.NDArray[np.float32]


class Probe(Protocol):
    """A pass through the primary model over the spliced, unrepaired cache."""

    def __call__(
        self,
        observer: Observer,
        *,
        rows: Literal["fresh", "all"] = "fresh",
        on_copy: bool = False,
    ) -> None:
        """Run rows; the observer is called in every layer before its attention.

        ``"fresh"`` are the tokens that are not cached, the query among them. What the
        pass computes stays in the cache, in the layers up to the one where the observer
        stops it, unless it runs on a copy.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Scene:
    """What a rule may look at when it scores the cached tokens.

    Attributes
    ----------
    layout
        The prompt's plan; ``layout.cached`` are the positions to score.
    text
        The prompt's text.
    layers
        Number of the primary model's layers.
    cache
        The spliced cache, keys rotated: ``keys`` and ``values`` ``[layers, kv_heads,
        capacity, head_dim]``, or ``layer(index)`` without waiting for the others; row j
        belongs to position j.
    probe
        Runs tokens through the primary model over the cache.
    auxiliary
        Loads the auxiliary model on first use.
    seed
        Seed for random choices.
    """

    layout: Layout
    text: str
    layers: int
    cache: SplicedCache
    probe: Probe
    auxiliary: Callable[[], Auxiliary]
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Spread:
    """A token ``d`` positions away gets ``share * exp(-d / within)`` of a score more."""

    share: float
    within: float

    def __post_init__(self) -> None:
        if not (self.share >= 0 and self.within > 0):
            raise ConfigError("a spread's share must be at least 0, and what it is within above 0")


@dataclass(frozen=True, slots=True)
class Lookup:
    """While the answer is drawn, tokens that it may copy are computed again.

    Those are the occurrences of the token just drawn in the prompt and the ``tokens`` behind
    each, as far as they are stale; ``at_most`` so many in one step. Where there are more than
    ``rare`` occurrences, the token before must be the same as well.
    """

    tokens: int
    at_most: int
    rare: int

    def __post_init__(self) -> None:
        if not (self.tokens >= 0 and self.at_most >= 1 and self.rare >= 0):
            raise ConfigError("a lookup's at_most must be at least 1, tokens and rare at least 0")


@dataclass(frozen=True, slots=True)
class Method:
    """A named way of reusing chunks, with its paper's defaults.

    Parameters
    ----------
    name
        As given in ``ReuseConfig.method``; equal to the rule's file name.
    source
        Where it comes from.
    score
        Returns ``[cached]`` float32, higher is recomputed first, in the order of
        ``scene.layout.cached``. None recomputes nothing below ratio 1.
    mass
        Whether scores are shares of the query's attention: ``recompute_ratio="auto"``
        can then stop at a target share.
    smoothing
        Scores are averaged over this many neighbouring positions (odd; 1 is none).
    spread
        What tokens get of their neighbours' scores beside their own, or None.
    heads
        Tokens at the head of every chunk after the first that come before all others.
    budget
        ``global``: the ratio is spent wherever scores are highest; ``chunk``: every
        chunk gets the same share.
    reuse
        ``chunks``: all known chunks; ``prefix``: only what is an exact prefix of the
        prompt; ``none``: nothing, an ordinary prefill.
    sink
        Whether chunks are encoded behind the shared sink.
    grouping
        Windows that are recomputed whole, or None.
    auxiliary
        Whether ingestion encodes the chunks for the auxiliary model too.
    drift
        What stays unrepaired is moved by what its chunk's recomputed tokens let expect
        (:mod:`ragkv.recompute.drift`).
    sparse
        What recomputed tokens attend to in the upper layers, on a CPU; None: all before
        them. On a GPU, where attention is a small part of a pass, they see all.
    lookup
        Repair of what the answer is about to copy (:mod:`ragkv.recompute.copy_repair`), or None.
    parallel
        All chunks begin at one position, and none sees another: how much attention they
        get. Nothing is recomputed below ratio 1. None places them one behind the other.
    """

    name: str
    source: str
    score: Callable[[Scene], FloatArray] | None = None
    mass: bool = False
    smoothing: int = 1
    spread: Spread | None = None
    heads: int = 0
    budget: Literal["global", "chunk"] = "global"
    reuse: Literal["chunks", "prefix", "none"] = "chunks"
    sink: bool = True
    grouping: Grouping | None = None
    auxiliary: bool = False
    drift: bool = False
    sparse: Sparse | None = None
    lookup: Lookup | None = None
    parallel: Parallel | None = None

    @property
    def pieces(self) -> dict[str, object]:
        """All fields, plain: the rule is named by its module and name."""
        rule = self.score
        named = rule and f"{rule.__module__}.{getattr(rule, '__qualname__', type(rule).__name__)}"
        return {**{item.name: getattr(self, item.name) for item in fields(self)}, "score": named}

    def __post_init__(self) -> None:
        if self.parallel is not None and self.score is not None:
            raise ConfigError(
                "chunks in parallel do not see each other, so computing their tokens again "
                "changes nothing: leave out score or parallel"
            )


def method_of(config: ReuseConfig) -> Method:
    """Return the method that a configuration names.

    Raises
    ------
    UnknownMethodError
        There is no such method.
    ConfigError
        The ratio is ``"auto"`` and the method's scores are not shares of attention.
    """
    method = get_method(config.method)
    if config.recompute_ratio == "auto" and not method.mass:
        raise ConfigError(
            "recompute_ratio='auto' needs a method that looks at the query's attention, such as "
            f"'query'; {method.name!r} does not"
        )
    return method


@cache
def method_names() -> tuple[str, ...]:
    """Return the names of all methods, in alphabetical order."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(rules.__path__)))


def get_method(name: str | Named) -> Method:
    """Return the method of that name; a :class:`Method` is returned as it is.

    Raises
    ------
    UnknownMethodError
        There is no such method; the message lists those that there are.
    """
    if isinstance(name, Method):
        return name
    if name not in method_names():
        raise UnknownMethodError(f"no method {name!r}; known: {', '.join(method_names())}")
    method = importlib.import_module(f"{rules.__name__}.{name}").METHOD
    if not isinstance(method, Method):
        raise TypeError(f"ragkv/select/rules/{name}.py must define METHOD, a Method")
    return method
