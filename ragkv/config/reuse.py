"""Settings of reuse."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Protocol, Self, TypedDict, runtime_checkable

from ragkv.config.checks import (
    check_bool,
    check_choice,
    check_known,
    check_number,
    check_text,
)
from ragkv.config.decode import DECODE_SETTINGS, DecodeOptions
from ragkv.errors import ConfigError

PROFILE_FORMAT = 2
"""Format version of the profiles of ``ragkv calibrate``."""


@runtime_checkable
class Named(Protocol):
    """A method object: a :class:`ragkv.select.Method`."""

    @property
    def name(self) -> str:
        """The name in reports."""
        ...


@dataclass(frozen=True, slots=True)
class ReuseConfig:
    """Settings of reuse: the method, the share to recompute, the sink.

    Parameters
    ----------
    method
        Name of a method (:func:`ragkv.select.method_names`), or a :class:`ragkv.select.Method`.
    recompute_ratio
        Share of the cached chunk tokens to recompute, from 0 (plain reuse) to 1 (full prefill).
        Uncached tokens are always computed and do not count. ``"auto"`` chooses the ratio for
        each request.
    sink
        The text that chunks are encoded behind, ideally the head of the prompts. ``"auto"`` is the
        chat template's text before the first user message.
    auxiliary_model
        Model that scores tokens for ``cacheclip``: a hub name or a folder.
        ``None`` is the embedded default, SmolLM2-135M-Instruct.
    on_miss
        ``"store"`` encodes named chunks that are not stored after the answer; ``"skip"`` does
        not.
    history
        Whether a prompt reuses rows of earlier prompts and versions of chunks, and keeps its own
        rows.
    calibrated_for
        Fingerprint of the model that the ratio was calibrated for. Other models are refused;
        ``None`` accepts any.
    """

    method: str | Named = "query"
    recompute_ratio: float | Literal["auto"] = 0.2
    sink: str = "auto"
    auxiliary_model: str | None = None
    on_miss: Literal["store", "skip"] = "store"
    history: bool = True
    calibrated_for: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.method, str | Named):
            raise ConfigError(f"method must be a name or a Method, not {self.method!r}")
        if self.recompute_ratio != "auto":
            check_number("recompute_ratio (or 'auto')", self.recompute_ratio, 0.0, 1.0)
        check_text("sink", self.sink)
        if self.auxiliary_model is not None:
            check_text("auxiliary_model", self.auxiliary_model)
        check_choice("on_miss", self.on_miss, ("store", "skip"))
        check_bool("history", self.history)
        if self.calibrated_for is not None:
            check_text("calibrated_for", self.calibrated_for)

    @classmethod
    def from_profile(cls, path: str | Path, **overrides: Any) -> Self:
        """Return the settings of a profile of ``ragkv calibrate``.

        They apply to the profile's model only, unless ``calibrated_for=None`` is given.
        ``overrides`` replace fields.

        Raises
        ------
        ConfigError
            The file cannot be read or is not a profile, or an override is invalid.
        """
        try:
            config = cls(**_profile_fields(json.loads(Path(path).read_text("utf-8-sig"))))
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(f"{path} is not a profile by `ragkv calibrate`: {error}") from error
        return config.override(**overrides)

    def override(self, **changes: Any) -> Self:
        """Return a copy with the given fields changed; unknown names raise ConfigError."""
        check_known("reuse setting", changes, [each.name for each in fields(self)], DECODE_SETTINGS)
        return replace(self, **changes)


def _profile_fields(profile: dict[str, Any]) -> dict[str, Any]:
    """Return a profile's fields of ReuseConfig."""
    if profile["format"] != PROFILE_FORMAT:
        raise ConfigError(
            f"the profile has format {profile['format']!r}, this ragkv reads {PROFILE_FORMAT}: "
            "calibrate again"
        )
    check_text("fingerprint", profile["fingerprint"])
    return {
        "method": profile["method"],
        "recompute_ratio": profile["recompute_ratio"],
        "auxiliary_model": profile["auxiliary_model"],
        "calibrated_for": profile["fingerprint"],
    }


class ReuseOptions(TypedDict, total=False):
    """Fields of :class:`ragkv.ReuseConfig`, for one call."""

    method: str | Named
    recompute_ratio: float | Literal["auto"]
    sink: str
    auxiliary_model: str | None
    on_miss: Literal["store", "skip"]
    history: bool
    calibrated_for: str | None


class AnswerOptions(DecodeOptions, ReuseOptions, total=False):
    """Arguments of an answer: fields of both, and those of its prompt."""

    chat_template_kwargs: Mapping[str, Any] | None
    retrieved: Sequence[str]
