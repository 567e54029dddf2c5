"""The server's settings."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ragkv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Where a server listens, whom it serves and how many at once.

    How chunks are reused unless a request says otherwise is each engine's own ``reuse``.

    Parameters
    ----------
    host, port
        Address to listen on; port 0 takes a free one.
    namespace
        Whose chunks are served where there are no keys.
    keys
        Namespaces by key. A request names one in ``Authorization: Bearer KEY`` and sees that
        namespace alone. Without keys nobody needs one.
    allow_anonymous
        Listen on other addresses than the machine's own without keys.
    model_name
        What clients call the model, besides ``default``. None is its hub name, or the name of
        its folder.
    timeout
        Seconds from a request to the end of its answer.
    drain_timeout
        Seconds that running answers may take to end after a SIGTERM.
    max_running
        Answers that the engine generates at once.
    max_waiting
        Answers that may wait besides; a request beyond both is refused with 503.
    reports
        Whether clients may have the whole report of an answer.
    cors_origins
        Origins whose pages may send requests from a browser, such as ``http://localhost:5173``;
        ``*`` is any.

    Raises
    ------
    ConfigError
        A number is not positive, an origin has another form, or the address is open to others
        and there are no keys.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    namespace: str = "default"
    keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    allow_anonymous: bool = False
    model_name: str | None = None
    timeout: float = 600.0
    drain_timeout: float = 60.0
    max_running: int = 16
    max_waiting: int = 64
    reports: bool = True
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
                    f"a CORS origin is * or as a browser sends it, http://localhost:5173 (no path, "
                    f"no slash at its end), not {origin!r}"
                )
        if not (self.keys or self.allow_anonymous or _is_loopback(self.host)):
            raise ConfigError(
                f"host {self.host} lets other machines in, and nobody needs a key: give "
                "--api-key-file, or --allow-anonymous if everybody may ask and read the chunks"
            )

    @property
    def namespaces(self) -> frozenset[str]:
        """Those that are served."""
        return frozenset(self.keys.values()) or frozenset({self.namespace})


_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s?#@]+")
_POSITIVE = ("timeout", "drain_timeout", "max_running")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
