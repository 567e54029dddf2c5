"""One client's way to a server: a relay that can be cut, held and slowed."""

import re
import socket
import threading
import time
from contextlib import suppress
from typing import Self


class Link:
    """Forwards TCP connections to a server of this machine.

    Parameters
    ----------
    url
        The store's; ``self.url`` is the same through this link.

    Attributes
    ----------
    delay
        Seconds that each piece from the server takes.
    sent
        Pieces that came from the client.
    """

    def __init__(self, url: str) -> None:
        self.delay = 0.0
        self.sent = 0
        self._passes = threading.Event()
        self._cut = False
        self._sockets: list[socket.socket] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        (port,) = re.findall(r"127\.0\.0\.1:(\d+)", url)
        self._target = int(port)
        self.url = url.replace(port, str(self._server.getsockname()[1]))
        self.heal()
        threading.Thread(target=self._accept, daemon=True).start()

    def heal(self) -> None:
        """Let everything through, what was held first."""
        self._cut = False
        self._passes.set()

    def hold(self) -> None:
        """Let nothing through, as where packets are lost: connections stand, and nothing comes."""
        self._passes.clear()

    def cut(self) -> None:
        """Close all connections, and new ones at once."""
        self._cut = True
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()
        self._passes.set()
        self._server.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._server.accept()
                try:
                    if self._cut:
                        raise ConnectionError
                    server = socket.create_connection(("127.0.0.1", self._target), 1)
                except OSError:
                    client.close()
                    continue
                server.settimeout(None)
                self._sockets += [client, server]
                for ends, answers in (((client, server), False), ((server, client), True)):
                    threading.Thread(target=self._carry, args=(*ends, answers), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        with suppress(OSError):
            while piece := source.recv(1 << 16):
                self.sent += not answers
                time.sleep(self.delay * answers)
                self._passes.wait()
                target.sendall(piece)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
