"""Checks of settings; each raises a ConfigError that names the invalid setting."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from ragkv.errors import ConfigError


def check_known(
    kind: str, given: Iterable[str], known: Iterable[str], others: Iterable[str] = ()
) -> None:
    """Raise ConfigError for unknown names, with the closest known one.

    Parameters
    ----------
    kind
        The kind of setting in the message.
    others
        Settings of a different kind, for the hint.
    """
    known, others = sorted(set(known)), sorted(others)
    unknown = sorted(set(given) - set(known))
    if not unknown:
        return
    names = [each for each in (*known, *others) if each not in unknown]
    near = [each for name in unknown for each in _nearest(name, names)]
    guess = f"did you mean {', '.join(near)}? " if near else ""
    raise ConfigError(
        f"unknown {kind} {', '.join(unknown)}: {guess}{kind}s are {', '.join(known)}"
        f"{'; further arguments of a call are ' if others else ''}{', '.join(others)}"
    )


def _nearest(name: str, names: list[str]) -> list[str]:
    """Return the known name with the same words, or the most similar one, if any."""
    words = set(name.split("_"))
    whole = [each for each in names if words <= set(each.split("_"))]
    whole.sort(key=lambda each: not each.startswith(name))
    return whole[:1] or get_close_matches(name, names, 1)


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
