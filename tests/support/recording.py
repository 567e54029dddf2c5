"""What stands in for CUDA graphs where there is no GPU: it calls the function again."""

from collections.abc import Callable

import torch

from ragkv.attend.recorder import Compute


class Recording:
    """Keeps functions, and calls them on the tensors that they were captured with.

    Attributes
    ----------
    captured
        Number of captures of all recorders.
    """

    captured = 0

    def __init__(self, device: torch.device) -> None:
        del device
        self._replays = False

    def capture(self, compute: Compute) -> tuple[Callable[[], object], torch.Tensor]:
        Recording.captured += 1
        out = compute()

        def replay() -> None:
            out.fill_(float("nan"))
            self._replays = True
            try:
                with torch.no_grad():
                    out.copy_(compute())
            finally:
                self._replays = False

        return replay, out

    def pause(self, work: Callable[[], object]) -> None:
        if self._replays:
            work()
