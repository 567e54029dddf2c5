"""Answers whose steps llama.cpp computes, behind rows that ragkv repaired."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from llamacpp_ragkv.blob import render
from llamacpp_ragkv.library import Context, Cyllama, Library
from llamacpp_ragkv.probe import RowOrder, probe
from ragkv.decode.steps import Steps, Take
from ragkv.model.gguf import parts_of
from ragkv.model.loaded import ReusableModel
from ragkv.prompt.tokens import IntArray
from ragkv.splice.buffer import SplicedCache

_FIRST_ROOM, _MULTIPLE = 512, 256
"""Free tokens of a new context, which grows by copying; contexts' sizes are multiples."""


class LlamaCppDecoder:
    """llama.cpp in this process, over the GGUF file of a model that ragkv has loaded.

    All its calls are in one thread, without torch's products: both in one thread can end the
    process on CPUs with AMX. Steps of several answers alternate.

    Parameters
    ----------
    library
        Loads the file, for a number of threads.

    Raises
    ------
    MissingDependencyError, ModelNotFoundError
        As :class:`Cyllama`.
    UnsupportedModelError
        The rows of this model cannot be handed over.
    """

    def __init__(
        self,
        loaded: ReusableModel,
        file: Path,
        library: Callable[[Path, int], Library] = Cyllama,
    ) -> None:
        self._loaded = loaded
        self._idle: Context | None = None
        self._thread = ThreadPoolExecutor(1, "llama.cpp")
        try:
            self._library: Library = self.call(library, parts_of(file)[0], torch.get_num_threads())
            self._order = RowOrder(loaded, self._library.architecture)
            self._format = probe(self._order, self._library, self.call)
        except BaseException:
            self._thread.shutdown()
            raise

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in llama.cpp's thread."""
        return self._thread.submit(function, *arguments).result()

    def steps(
        self,
        ids: IntArray,
        cache: SplicedCache,
        logits: torch.Tensor,
        *,
        room: int,
        prefilled: Callable[[], object],
    ) -> LlamaCppSteps:
        """See :class:`ragkv.engine.plan.StepDecoder`."""
        most = len(ids) + min(room, _FIRST_ROOM)
        return LlamaCppSteps(self, most, self._loaded, ids, cache, logits, prefilled=prefilled)

    def begin(self, cache: SplicedCache, tokens: int, room: int) -> Context:
        """Return memory for ``room`` tokens with the rows of the first ``tokens``.

        It goes back by :meth:`end`.
        """
        rows = self._order.rows(0, cache.keys[:, :, :tokens], cache.values[:, :, :tokens])
        context: Context = self.call(self._restored, render(self._format, rows), room)
        return context

    def step(
        self, context: Context, tokens: Sequence[int], begin: int
    ) -> tuple[Context, torch.Tensor]:
        """Compute tokens from a position on, in place of later rows; in llama.cpp's thread.

        Returns
        -------
        context, logits
            The same context, or a larger one with its rows; ``[tokens, vocab]`` float32.
        """
        room = begin + len(tokens)
        if room > context.room:
            larger = self._restored(context.state(), max(room, 2 * context.room))
            self.end(context)
            context = larger
        context.remove(begin)
        return context, torch.from_numpy(context.decode(tokens, begin))

    def _restored(self, blob: bytes, room: int) -> Context:
        context = self._context(room)
        try:
            context.restore(blob)
        except BaseException:
            self.end(context)
            raise
        return context

    def _context(self, room: int) -> Context:
        idle = self._idle
        if idle is not None and idle.room >= room:
            self._idle = None
            return idle
        return self._library.open(-(-room // _MULTIPLE) * _MULTIPLE)

    def end(self, context: Context) -> None:
        """Take an answer's memory back, in llama.cpp's thread: the larger of two stays."""
        context.remove(0)
        smaller = self._idle
        if smaller is None or smaller.room <= context.room:
            self._idle = context
        else:
            smaller = context
        if smaller is not None:
            smaller.close()

    def close(self) -> None:
        """Release llama.cpp's memory."""
        self.call(self._close)
        self._thread.shutdown()

    def _close(self) -> None:
        if self._idle is not None:
            self._idle.close()
        self._library.close()


class LlamaCppSteps(Steps):
    """Steps of one answer; the logits of its first token are ragkv's.

    Rows are not repaired while decoding, and steps read all rows.
    """

    draft_costs = (1.0, 0.6)
    """In steps over a single token, by docs/log.md."""

    def __init__(self, decoder: LlamaCppDecoder, room: int, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._decoder, self._room = decoder, room

    @property
    def answers(self) -> int:
        """1: steps of several answers are not computed together."""
        return 1

    @torch.no_grad()
    def run(self, take: Take) -> None:
        """See :meth:`ragkv.decode.steps.Steps.run`."""
        tokens = len(self.history)
        draft = take(self._logits[None])
        self._prefilled()
        if draft is None:
            return
        decoder = self._decoder
        context = decoder.begin(self._cache, tokens, self._room)
        try:
            while draft is not None:
                last = len(self.history) - 1
                fed = [int(self.history.ids[last]), *draft]
                context, logits = decoder.call(decoder.step, context, fed, last)
                draft = take(logits)
        finally:
            decoder.call(decoder.end, context)
