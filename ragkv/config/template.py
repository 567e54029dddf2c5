"""Variables of chat templates."""

from __future__ import annotations

from collections.abc import Mapping
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
