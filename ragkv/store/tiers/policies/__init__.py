"""Which entry leaves a full tier first: one policy a file, named like its file."""

from __future__ import annotations

import importlib
import pkgutil

from ragkv.errors import ConfigError
from ragkv.store.tiers.policies.base import Policy

__all__ = ["Policy", "make_policy", "policy_names"]


def policy_names() -> tuple[str, ...]:
    """Return the names of all policies, in alphabetical order."""
    names = (module.name for module in pkgutil.iter_modules(__path__))
    return tuple(sorted(name for name in names if name != "base"))


def make_policy(name: str) -> Policy:
    """Return a new policy of that name.

    Raises
    ------
    ConfigError
        There is no such policy; the message lists those that there are.
    """
    if name not in policy_names():
        raise ConfigError(f"no eviction policy {name!r}; known: {', '.join(policy_names())}")
    policy = importlib.import_module(f"{__name__}.{name}").POLICY()
    if not isinstance(policy, Policy):
        raise TypeError(f"ragkv/store/policies/{name}.py must define POLICY, a Policy class")
    return policy
