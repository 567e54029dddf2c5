"""Checks of settings; a wrong one is a ConfigError that names it."""

from __future__ import annotations

from collections.abc import Container, Iterable
from difflib import get_close_matches
from typing import Self

from ragkv.errors import ConfigError

_CONTINUE = (
    "keep the prompt's beginning and put new documents after the conversation, and it continues"
)
_REMOVED = {
    "auto": "omit it: recompute_ratio='auto' chooses by fixed shares (docs/settings.md)",
    "cache_implementation": "answers are decoded over ragkv's own cache: omit it",
    "contextual_versions": "versions of chunks are kept unless history=False",
    "costs": "omit it: entries are weighed by the FLOPs of computing them",
    "encrypt": "encrypt the disk below the store, the S3 bucket or the Redis server",
    "evict": "set disk_bytes: a store that has it evicts",
    "grouping": "give method= a Method with the grouping",
    "load": "omit it: a chunk is computed where loading it would take longer",
    "neighbours": "method='cachecraft' keeps versions of the chunks of former prompts",
    "policy": "omit it: what costs least to compute, and is seldom asked for, is evicted",
    "prefix_bytes": "history_bytes bounds former prompts, and versions as well",
    "prompt_lookup_num_tokens": "give drafts=True or drafts=False",
    "remember_turns": _CONTINUE,
    "repair_ahead": "what an answer copies is always repaired: omit it",
    "turns_expire_in": _CONTINUE,
    "version_bytes": "history_bytes bounds former prompts, and versions as well",
}
"""Settings of former versions, and what to do instead."""


def check_removed(names: Container[str], known: Container[str] = ()) -> None:
    """Raise ConfigError for a setting that is no more, unless a framework has it: ``known``."""
    for name, instead in _REMOVED.items():
        if name in names and name not in known:
            raise ConfigError(f"{name} is no setting of ragkv any more: {instead}")


class Settings:
    """Base of the settings' classes: a setting that is no more is a ConfigError."""

    __slots__ = ()

    def __new__(cls, *_: object, **given: object) -> Self:  # noqa: D102  __init__ has the fields
        check_removed(given)
        return object.__new__(cls)


def check_known(
    kind: str, given: Iterable[str], known: Iterable[str], others: Iterable[str] = ()
) -> None:
    """Raise ConfigError for names that are no setting, with the nearest one.

    Parameters
    ----------
    kind
        What the settings are called.
    others
        Settings of another kind, which may be meant.
    """
    known, others = sorted(set(known)), sorted(others)
    unknown = sorted(set(given) - set(known))
    if not unknown:
        return
    names = [each for each in (*known, *others) if each not in unknown]
    near = [each for name in unknown for each in _nearest(name, names)]
    guess = f"did you mean {', '.join(near)}? " if near else ""
    raise ConfigError(
        f"unknown {kind} {', '.join(unknown)}: no argument has that name; {guess}{kind}s are "
        f"{', '.join(known)}{', and others of a call ' if others else ''}{', '.join(others)}"
    )


def _nearest(name: str, names: list[str]) -> list[str]:
    """Return the one that has the name's words, or nearly is the name; or none."""
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
