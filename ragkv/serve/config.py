"""The server's settings."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ragkv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """A server's address, keys and limits; each engine's ``reuse`` is its default.

    Parameters
    ----------
    host, port
        Address to listen on; port 0 takes a free one.
    namespace
        The served namespace if there are no keys.
    keys
        Namespaces by key. A request sends ``Authorization: Bearer KEY`` and sees only that
        namespace. Without keys every request is served.
    allow_anonymous
        Listen without keys on addresses that other machines reach.
    model_name
        The model's name for clients, besides ``default``. None is its hub name, or the name of
        its folder.
    timeout
        Seconds from a request to the end of its answer.
    drain_timeout
        Seconds for running answers to end after SIGTERM.
    max_waiting
        Most waiting answers, in addition to the engine's ``max_running``; further requests are
        refused with 503.
    cors_origins
        Origins of pages that can send requests from a browser, such as ``http://localhost:5173``;
        ``*`` is any.

    Raises
    ------
    ConfigError
        A number is not positive, an origin is malformed, or the address accepts other machines
        without keys.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    namespace: str = "default"
    keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    allow_anonymous: bool = False
    model_name: str | None = None
    timeout: float = 600.0
    drain_timeout: float = 60.0
    max_waiting: int = 64
    cors_origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.port < 1 << 16:
            raise ConfigError(f"port must lie between 0 and 65535, not {self.port}")
        if self.max_waiting < 0:
            raise ConfigError(f"max_waiting must be 0 or more, not {self.max_waiting}")
        for name in _POSITIVE:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be more than 0, not {getattr(self, name)}")
        for origin in self.cors_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    "a CORS origin must be * or have the form http://localhost:5173, without a "
                    f"path or trailing slash, not {origin!r}"
                )
        if not (self.keys or self.allow_anonymous or _is_loopback(self.host)):
            raise ConfigError(
                f"host {self.host} accepts other machines, and no key is required: give "
                "--api-key-file, or --allow-anonymous to serve without keys"
            )

    @property
    def namespaces(self) -> frozenset[str]:
        """The served namespaces."""
        return frozenset(self.keys.values()) or frozenset({self.namespace})


_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s?#@]+")
_POSITIVE = ("timeout", "drain_timeout")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
