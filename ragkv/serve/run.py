"""The server: run the application until a signal."""

from __future__ import annotations

import socket
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from ragkv.serve.config import ServeConfig
from ragkv.serve.service import Service

_IDLE_S = 75
"""Idle connections stay open for longer than common proxies' 60 s."""
_LAST_WORDS_S = 5
"""Time to send the responses of ended answers."""


class DrainingServer(uvicorn.Server):
    """A server that finishes running answers before it stops.

    Parameters
    ----------
    on_ready
        Called with the address once the server listens.
    """

    def __init__(
        self,
        app: FastAPI,
        settings: ServeConfig,
        *,
        on_ready: Callable[[str], object] = lambda _: None,
        log_level: str = "warning",
    ) -> None:
        config = uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            log_level=log_level,
            timeout_graceful_shutdown=_LAST_WORDS_S,
            timeout_keep_alive=_IDLE_S,
            server_header=False,
            ws="none",
        )
        super().__init__(config)
        self._service: Service = app.state.service
        self._on_ready = on_ready
        self.address = ""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await super().startup(sockets)
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        self.address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._on_ready(self.address)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new requests with 503 until the running answers have ended; then close."""
        await self._service.gate.drain(self._service.settings.drain_timeout)
        await super().shutdown(sockets)
