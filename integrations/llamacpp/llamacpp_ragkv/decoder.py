"""Answers whose steps llama.cpp computes, behind rows that ragkv repaired."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from llamacpp_ragkv.blob import SequenceRows, parse, render
from llamacpp_ragkv.library import Context, Cyllama, Library, Part
from llamacpp_ragkv.probe import RowOrder, probe
from ragkv.decode.steps import Steps, Take
from ragkv.model.gguf import parts_of
from ragkv.model.loaded import ReusableModel
from ragkv.prompt.tokens import IntArray
from ragkv.splice.buffer import SplicedCache

_FIRST_ROOM = 512
"""Most free tokens behind a prompt at first; the memory grows by copying."""
_MULTIPLE = 256
"""Sizes of sequences are multiples."""
_MAX_WAIT_S = 0.005
"""Longest wait of a step for those of other answers, in seconds."""


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    part: Part
    logits: Future[torch.Tensor] = field(default_factory=Future)


class LlamaCppDecoder:
    """llama.cpp in this process, over the GGUF file of a model that ragkv has loaded.

    All its calls are in one thread, without torch's products: both in one thread can end the
    process on CPUs with AMX. Steps of several answers are computed together.

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
        self._running = set[int]()
        """The running answers' sequences."""
        self._steps: list[_Step] = []
        self._changed = threading.Condition()
        self._thread = ThreadPoolExecutor(1, "llama.cpp")
        try:
            self._library: Library = self.call(library, parts_of(file)[0], torch.get_num_threads())
            self._order = RowOrder(loaded, self._library.architecture)
            self._format = probe(self._order, self._library, self.call)
            self._memory: Context = self.call(self._library.open, _MULTIPLE)
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

    @property
    def answers(self) -> int:
        """Number of running answers."""
        return len(self._running)

    def begin(self, cache: SplicedCache, tokens: int, room: int) -> int:
        """Hand over the rows of the first ``tokens``; return their sequence, until :meth:`end`."""
        rows = self._order.rows(0, cache.keys[:, :, :tokens], cache.values[:, :, :tokens])
        sequence: int = self.call(self._begin, rows, room)
        return sequence

    def _begin(self, rows: SequenceRows, room: int) -> int:
        memory, running = self._memory, len(self._running)
        if memory.room < room or memory.sequences == running:
            memory = self._resize(room, 1 << running.bit_length())
        sequence = min(set(range(memory.sequences)) - self._running)
        self._restore(memory, sequence, rows)
        self._running.add(sequence)
        return sequence

    def end(self, sequence: int) -> None:
        """End an answer; its rows stay until another answer replaces them."""
        with self._changed:
            self._running.remove(sequence)
            self._changed.notify()

    def step(self, sequence: int, tokens: Sequence[int], begin: int) -> torch.Tensor:
        """Compute tokens from a position on, in place of later rows, with other answers' steps.

        Returns
        -------
        torch.Tensor
            ``[tokens, vocab]`` float32.
        """
        step = _Step(Part(sequence, tokens, begin))
        with self._changed:
            self._steps.append(step)
            self._changed.notify()
        self._thread.submit(self._compute)
        return step.logits.result()

    def _compute(self) -> None:
        """Compute the steps of all answers, unless an earlier call has."""
        with self._changed:
            self._changed.wait_for(
                lambda: not self._steps or len(self._steps) >= len(self._running), _MAX_WAIT_S
            )
            steps, self._steps = self._steps, []
        if steps:
            self._compute_together(steps)

    def _compute_together(self, steps: Sequence[_Step]) -> None:
        """Compute steps in one call; if it fails, in one each: an error ends only its answer."""
        parts = [step.part for step in steps]
        try:
            memory, room = self._memory, max(part.begin + len(part.tokens) for part in parts)
            if memory.room < room:
                memory = self._resize(max(room, 2 * memory.room), memory.sequences)
            for part in parts:
                memory.remove(part.sequence, part.begin)
            found = memory.decode(parts)
        except Exception as error:  # noqa: BLE001  handed to the answer's thread
            if len(steps) == 1:
                steps[0].logits.set_exception(error)
                return
            for step in steps:
                self._compute_together([step])
            return
        for step, logits in zip(steps, found, strict=True):
            step.logits.set_result(torch.from_numpy(logits))

    def _resize(self, room: int, sequences: int) -> Context:
        """Replace the memory by one with at least these sizes and the running answers' rows."""
        old, running = self._memory, sorted(self._running)
        if running:
            room, sequences = max(room, old.room), max(sequences, old.sequences)
        new = self._library.open(-(-room // _MULTIPLE) * _MULTIPLE, sequences)
        try:
            for sequence in running:
                self._restore(new, sequence, parse(old.state(sequence))[1])
        except BaseException:
            new.close()
            raise
        old.close()
        self._memory = new
        return new

    def _restore(self, memory: Context, sequence: int, rows: SequenceRows) -> None:
        own = replace(self._format, sequence=sequence, streams=memory.sequences, stream=sequence)
        memory.restore(sequence, render(own, rows))

    def close(self) -> None:
        """Release llama.cpp's memory."""
        self.call(self._close)
        self._thread.shutdown()

    def _close(self) -> None:
        self._memory.close()
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
        """See :attr:`ragkv.decode.steps.Steps.answers`."""
        return max(1, self._decoder.answers)

    @torch.no_grad()
    def run(self, take: Take) -> None:
        """See :meth:`ragkv.decode.steps.Steps.run`."""
        tokens = len(self.history)
        draft = take(self._logits[None])
        self._prefilled()
        if draft is None:
            return
        decoder = self._decoder
        sequence = decoder.begin(self._cache, tokens, self._room)
        try:
            while draft is not None:
                last = len(self.history) - 1
                fed = [int(self.history.ids[last]), *draft]
                draft = take(decoder.step(sequence, fed, last))
        finally:
            decoder.end(sequence)
