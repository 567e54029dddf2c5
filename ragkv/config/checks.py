"""Checks of settings; each raises a ConfigError that names the invalid setting."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from ragkv.errors import ConfigError

_SET_BY_RAGKV = frozenset(
    {
        *("conversation", "conversations", "messages", "tools", "tokenize", "tokenizer_kwargs"),
        *("add_generation_prompt", "continue_final_message", "chat_template", "return_dict"),
        *("return_tensors", "return_assistant_tokens_mask", "sanitize_control_tokens"),
        *("padding", "truncation", "max_length"),
    }
)
"""Arguments of rendering, which cannot be variables of a chat template."""


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


def checked_variables(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return variables of a chat template.

    Raises
    ------
    ConfigError
        They are not a dict, or contain a name that ragkv sets.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise ConfigError(f"chat_template_kwargs must be a dict of names, not {given!r:.80}")
    own = sorted(_SET_BY_RAGKV & given.keys())
    if own:
        raise ConfigError(
            f"chat_template_kwargs cannot have {', '.join(own)}, which ragkv sets: give messages, "
            "tools and settings as arguments of their own"
        )
    return dict(given)
