"""Stopping the work of a named thread between two layers."""

import threading
from functools import partial

from ragkv import RagKV
from ragkv.model.architecture import backbone_of


class Pause:
    """Records which threads compute which layers; stops one before a layer until let go.

    ``thread`` is how the stopped one's name begins. ``seen`` has ``(is that thread's, layer)`` for
    every layer in the order of computing.
    """

    def __init__(self, engine: RagKV, thread: str, layer: int = 2) -> None:
        self.layer, self.thread = layer, thread
        self.reached, self.go = threading.Event(), threading.Event()
        self.seen: list[tuple[bool, int]] = []
        for index, each in enumerate(backbone_of(engine.loaded.model).layers):
            each.register_forward_pre_hook(partial(self._before, index))

    def _before(self, index: int, *_: object) -> None:
        is_stopped = threading.current_thread().name.startswith(self.thread)
        if is_stopped and index == self.layer:
            self.reached.set()
            assert self.go.wait(30)
        self.seen.append((is_stopped, index))
