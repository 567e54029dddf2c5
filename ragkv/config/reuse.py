"""How chunks are reused."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Protocol, Self, runtime_checkable

from ragkv.config.checks import (
    Settings,
    check_bool,
    check_choice,
    check_known,
    check_number,
    check_removed,
    check_text,
    check_whole,
)
from ragkv.config.decode import DECODE_SETTINGS
from ragkv.errors import ConfigError

PROFILE_FORMAT = 1
"""Version of the profiles that ``ragkv calibrate`` writes."""


@dataclass(frozen=True, slots=True)
class Grouping:
    """Recompute whole windows instead of scattered tokens (CacheClip, arXiv 2510.10129v2).

    Parameters
    ----------
    window
        Length of a window in prompt tokens.
    threshold
        A window is recomputed whole if *more than* this many of its tokens were chosen, and
        otherwise only as a part of others. Windows slide by one token within a chunk. The highest
        scores are chosen, as many as their windows fit the recompute ratio: the share that is
        recomputed is never above it.
    """

    window: int = 8
    threshold: int = 5

    def __post_init__(self) -> None:
        check_whole("grouping window", self.window, 1, 4096)
        check_whole("grouping threshold", self.threshold, 0, self.window - 1)


@runtime_checkable
class Named(Protocol):
    """A method made of pieces: a :class:`ragkv.select.Method`."""

    @property
    def name(self) -> str:
        """What reports call it."""
        ...


@dataclass(frozen=True, slots=True)
class AutoRatio:
    """How ``recompute_ratio="auto"`` chooses, request by request.

    The smallest set of tokens with ``target`` of the query's attention to the cached tokens,
    but at least ``floor`` and at most ``ceiling`` of them. ``cachecraft`` reads ``alpha`` alone,
    the factor of each chunk's cache fix overhead.
    """

    target: float = 0.8
    floor: float = 0.05
    ceiling: float = 0.4
    alpha: float = 1.0

    def __post_init__(self) -> None:
        check_number("auto target", self.target, 0.0, 1.0)
        check_number("auto floor", self.floor, 0.0, 1.0)
        check_number("auto ceiling", self.ceiling, self.floor, 1.0)
        check_number("auto alpha", self.alpha, 0.0, 100.0)


@dataclass(frozen=True, slots=True)
class ReuseConfig(Settings):
    """How cached chunks are reused and how much of them is recomputed.

    Parameters
    ----------
    method
        Name of a method, see :func:`ragkv.select.method_names`; or a
        :class:`ragkv.select.Method` of your own.
    recompute_ratio
        Share of the cached chunk tokens that is recomputed, from 0 (plain reuse) to 1 (exactly
        full prefill). Uncached tokens are always computed and do not count. ``"auto"`` chooses
        for each request.
    auto
        How ``"auto"`` chooses.
    sink
        The text that chunks are encoded behind. ``"auto"`` is what the chat
        template puts before the first user text. The closer to the real
        prompt's head, the better.
    grouping
        Overrides the method's grouping; ``None`` keeps it.
    auxiliary_model
        Model that scores tokens for ``cacheclip``: a hub name or a folder.
        ``None`` is the embedded default, SmolLM2-135M-Instruct.
    on_miss
        ``"store"`` encodes named chunks that were not stored, after the answer; ``"skip"``
        does not.
    load
        ``"auto"`` computes a chunk where loading it would take longer, by the speeds measured in
        this process; the report counts it as a miss, ``slower``. Chunks in memory are always
        loaded. ``"always"`` loads everything.
    repair_ahead
        Whether the decoding steps also recompute the tokens that the answer is about to copy
        (``query`` alone does). Answers come closer to full prefill (mean KL 0.032 instead of
        0.066 at a ratio of 0.2), and a step takes 1.15 to 1.5 times as long on a CPU.
    contextual_versions
        Place versions of chunks where they suit a prompt better than the entry (``query`` and
        ``cachecraft`` alone). They are computed after an answer, behind the chunks that stood
        before them in the prompt. Of the operator's chunks: those of a document, and those that
        ``precompute`` was given with this setting on.
    seed
        Seed that a method of your own may draw with, ``scene.seed``.
    calibrated_for
        Fingerprint of the model that the ratio was calibrated for; other models are refused.
        ``None`` accepts all.
    """

    method: str | Named = "query"
    recompute_ratio: float | Literal["auto"] = 0.2
    auto: AutoRatio = AutoRatio()
    sink: str = "auto"
    grouping: Grouping | None = None
    auxiliary_model: str | None = None
    on_miss: Literal["store", "skip"] = "store"
    load: Literal["auto", "always"] = "auto"
    repair_ahead: bool = False
    contextual_versions: bool = False
    seed: int = 0
    calibrated_for: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.method, str | Named):
            raise ConfigError(f"method must be a name or a Method, not {self.method!r}")
        if self.recompute_ratio != "auto":
            check_number("recompute_ratio (or 'auto')", self.recompute_ratio, 0.0, 1.0)
        if not isinstance(self.auto, AutoRatio):
            raise ConfigError(f"auto must be an AutoRatio, not {self.auto!r}")
        check_text("sink", self.sink)
        if self.grouping is not None and not isinstance(self.grouping, Grouping):
            raise ConfigError(f"grouping must be a Grouping or None, not {self.grouping!r}")
        if self.auxiliary_model is not None:
            check_text("auxiliary_model", self.auxiliary_model)
        check_choice("on_miss", self.on_miss, ("store", "skip"))
        check_choice("load", self.load, ("auto", "always"))
        check_bool("repair_ahead", self.repair_ahead)
        check_bool("contextual_versions", self.contextual_versions)
        check_whole("seed", self.seed, 0, 2**63 - 1)
        if self.calibrated_for is not None:
            check_text("calibrated_for", self.calibrated_for)

    @classmethod
    def from_profile(cls, path: str | Path, **overrides: Any) -> Self:
        """Return the settings of a profile that ``ragkv calibrate`` wrote.

        They are for the profile's model alone; ``calibrated_for=None`` lifts that.
        ``overrides`` are other fields.

        Raises
        ------
        ConfigError
            The file cannot be read, is not such a profile, or an override is wrong.
        """
        try:
            config = cls(**_profile_fields(json.loads(Path(path).read_text(encoding="utf-8"))))
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(f"{path} is not a profile by `ragkv calibrate`: {error}") from error
        return config.override(**overrides)

    def override(self, **changes: Any) -> Self:
        """Return a copy with the given fields changed; unknown names raise ConfigError."""
        check_removed(changes)
        check_known("reuse setting", changes, [each.name for each in fields(self)], DECODE_SETTINGS)
        return replace(self, **changes)


def _profile_fields(profile: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of ReuseConfig that a profile sets."""
    if profile["format"] != PROFILE_FORMAT:
        raise ConfigError(
            f"a profile of format {profile['format']!r}, and this ragkv reads {PROFILE_FORMAT}: "
            "calibrate again"
        )
    check_text("fingerprint", profile["fingerprint"])
    grouping = profile["grouping"]
    return {
        "method": profile["method"],
        "recompute_ratio": profile["recompute_ratio"],
        "grouping": None if grouping is None else Grouping(**grouping),
        "auxiliary_model": profile["auxiliary_model"],
        "calibrated_for": profile["fingerprint"],
    }
