"""Stopping a speculation, or other work of a named thread, between two layers."""

from __future__ import annotations

import threading
from functools import partial

from ragkv import RagKV
from ragkv.model.architecture import backbone_of

THREAD = "ragkv-speculation"


class Pause:
    """Records which threads compute which layers; stops a speculation before one until let go.

    ``seen`` has ``(is a speculation's, layer)`` for every layer in the order of computing.
    ``thread``: how the name of the speculation's thread begins.
    """

    def __init__(self, engine: RagKV, layer: int = 2, thread: str = THREAD) -> None:
        self.layer, self.thread = layer, thread
        self.reached, self.go = threading.Event(), threading.Event()
        self.seen: list[tuple[bool, int]] = []
        for index, each in enumerate(backbone_of(engine.model).layers):
            each.register_forward_pre_hook(partial(self._before, index))

    def _before(self, index: int, *_: object) -> None:
        speculates = threading.current_thread().name.startswith(self.thread)
        if speculates and index == self.layer:
            self.reached.set()
            assert self.go.wait(30)
        self.seen.append((speculates, index))


def speculating_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == THREAD]
