"""Checks of settings; a wrong one is a ConfigError that names it."""

from __future__ import annotations

from collections.abc import Container

from ragkv.errors import ConfigError

_REMOVED = {"cache_implementation": "answers are decoded over ragkv's own cache: omit it"}
"""Settings of former versions, and what to do instead."""


def check_removed(names: Container[str]) -> None:
    """Raise ConfigError for a setting that is no more."""
    for name, instead in _REMOVED.items():
        if name in names:
            raise ConfigError(f"{name} is no setting of ragkv any more: {instead}")


def check_number(name: str, value: object, low: float, high: float) -> None:
    """Raise ConfigError unless the value is a number between ``low`` and ``high``."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} must be a number between {low:g} and {high:g}, not {value!r}")
    if not low <= value <= high:
        raise ConfigError(f"{name} must lie between {low:g} and {high:g}, not {value!r}")


def check_whole(name: str, value: object, low: float, high: float) -> None:
    """Raise ConfigError unless the value is a whole number between ``low`` and ``high``."""
    check_number(name, value, low, high)
    if not isinstance(value, int):
        raise ConfigError(f"{name} must be a whole number, not {value!r}")


def check_bool(name: str, value: object) -> None:
    """Raise ConfigError unless the value is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, not {value!r}")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise ConfigError unless the value is one of the choices."""
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {value!r}")


def check_text(name: str, value: object) -> None:
    """Raise ConfigError unless the value is a string."""
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be a string, not {type(value).__name__}")
