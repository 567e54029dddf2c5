"""Decoding steps of several answers as one pass.

The thread of one answer, the leader, computes the steps of all answers of a model and draws their
tokens: linear layers read their weights once for all rows. The other threads wait for the end of
their answer. A thread that computes a prompt, or encodes chunks, runs the steps between its layers,
so no token waits for a whole prompt.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch

from ragkv.attend.forward import SubsetPass, joint_forward, ordinary_forward
from ragkv.attend.graphs import graphs_for, look_over
from ragkv.attend.interface import pass_suspended
from ragkv.model.architecture import backbone_of
from ragkv.model.calls import decoding_experts
from ragkv.model.linear import fast_linear_layers, rounds_products
from ragkv.model.loaded import ReusableModel
from ragkv.model.lock import Claim, ModelLock, lock_of
from ragkv.model.memory import is_out_of_memory, release_calls

Advance = Callable[[torch.Tensor], SubsetPass | None]
"""Draws from a step's logits, ``[keep, vocab]`` float32; returns the next step, or None."""

MAX_WAIT_S = 0.2
"""Longest wait of a step for the layers of a prompt, in seconds."""


@dataclass(slots=True, eq=False)
class _Answer:
    """A running answer and its next step."""

    loaded: ReusableModel
    subset: SubsetPass
    advance: Advance
    thread: int = field(default_factory=threading.get_ident)
    woken: threading.Event = field(default_factory=threading.Event)
    ended: bool = False
    error: Exception | None = None


class StepBatch(Claim):
    """The running answers of one model, for all engines."""

    def __init__(self, lock: ModelLock) -> None:
        self._lock = lock
        self._mutex = threading.Lock()
        self._answers: list[_Answer] = []
        self._claims = False
        self.computes_steps = False
        """Whether the thread that has the model computes steps now."""
        self._chosen: _Answer | None = None
        self._last = 0.0

    @property
    def answers(self) -> int:
        """Number of running answers."""
        return len(self._answers)

    def run(self, loaded: ReusableModel, first: SubsetPass, advance: Advance) -> None:
        """Compute an answer's steps together with those of other answers until it ends.

        Parameters
        ----------
        advance
            Called after each step, in the thread that computed it.

        Raises
        ------
        Exception
            The errors of its own steps and of ``advance``.
        """
        answer = _Answer(loaded, first, advance)
        with self._mutex:
            if not self._answers:
                self._last = time.perf_counter()
            self._answers.append(answer)
        try:
            look_over(loaded)
            if self._lock.is_mine:
                with fast_linear_layers(loaded.model):
                    while not answer.ended:
                        self._step_all()
            while not answer.ended:
                self._wait_or_lead(answer)
        finally:
            self._end(answer, None)
        if answer.error is not None:
            raise answer.error

    def _wait_or_lead(self, answer: _Answer) -> None:
        """Wait for the answer's end, or lead until the model has another claim than steps."""
        self._claim()
        try:
            answer.woken.wait()
            answer.woken.clear()
            if self._lock.is_mine:
                with fast_linear_layers(answer.loaded.model):  # once, not for each step
                    self._step_all()
                    while not answer.ended and not self._lock.is_wanted(but=self):
                        self._step_all()
        except BaseException:  # interrupted
            self._end(answer, None)
            self._lock.is_wanted()  # after this, the answer's thread cannot become the leader
            raise
        finally:
            if self._lock.is_mine:
                if self._answers:
                    self._claim()
                self._lock.release()

    # ---- a place in the model's queue

    def _claim(self) -> None:
        """Queue for the model, unless the answers are in its queue already."""
        with self._mutex:
            claims, self._claims = self._claims, True
        if not claims:
            self._lock.enqueue(self)

    def thread(self) -> int | None:
        """Make the thread of the first answer the leader."""
        with self._mutex:
            self._claims = False
            self._chosen = next(iter(self._answers), None)
            return None if self._chosen is None else self._chosen.thread

    def wake(self) -> None:
        """Wake the leader, which has the model now."""
        chosen, self._chosen = self._chosen, None
        if chosen is not None:
            chosen.woken.set()

    # ---- steps, in the thread that has the model

    @contextmanager
    def between_layers(self, loaded: ReusableModel) -> Iterator[None]:
        """Run the steps between the layers of the calling thread's passes in the block."""
        if not self._answers:
            yield
            return

        def run_steps() -> None:
            if self._answers and time.perf_counter() - self._last >= MAX_WAIT_S:
                self._step_all(beside_prompt=True)

        with before_layers(loaded, run_steps):
            yield

    def _step_all(self, *, beside_prompt: bool = False) -> None:
        """Compute the next step of every answer.

        ``beside_prompt``: between a prompt's layers. A step that runs out of memory there is
        computed after the prompt.
        """
        with self._mutex:
            answers = list(self._answers)
        self.computes_steps = True
        try:
            for together in _compatible(answers):
                self._step(together, beside_prompt=beside_prompt)
        finally:
            self.computes_steps = False
            self._last = time.perf_counter()

    def _step(self, answers: Sequence[_Answer], *, beside_prompt: bool) -> None:
        """Compute steps in one pass; if it fails, in two, so that an error ends only its answer.

        An interrupted pass is computed again. An interrupt while drawing another thread's answer
        ends that answer with an error.
        """
        found: list[torch.Tensor] | None = None
        try:
            found = _compute(answers)
        except Exception as error:  # noqa: BLE001  handed to the answer's thread
            lacks_memory = is_out_of_memory(error)
            if lacks_memory:
                release_calls(error)
            if len(answers) == 1 and not (lacks_memory and beside_prompt):
                self._end(answers[0], error)
        if found is None:  # the error and what it held are gone
            middle = len(answers) // 2
            for part in (answers[:middle], answers[middle:]) if middle else ():
                self._step(part, beside_prompt=beside_prompt)
            return
        for answer, logits in zip(answers, found, strict=True):
            self._draw(answer, logits)

    def _draw(self, answer: _Answer, logits: torch.Tensor) -> None:
        """Draw from a step's logits, and prepare the answer's next step."""
        try:
            subset = answer.advance(logits)
        except Exception as error:  # noqa: BLE001  handed to the answer's thread
            if is_out_of_memory(error):
                release_calls(error)  # its frames hold other answers' tensors
            self._end(answer, error)
        except BaseException:
            self._end(answer, RuntimeError("interrupted by another answer's thread"))
            raise
        else:
            if subset is None:
                self._end(answer, None)
            else:
                answer.subset = subset

    def _end(self, answer: _Answer, error: Exception | None) -> None:
        """Remove an answer and wake its thread."""
        with self._mutex, suppress(ValueError):
            self._answers.remove(answer)
            answer.error = error
        answer.ended = True
        answer.woken.set()


def _compatible(answers: Sequence[_Answer]) -> list[list[_Answer]]:
    """Group answers by model and rotary table: one pass computes a group's steps.

    Models that share a configuration object share a batch.
    """
    groups = dict[tuple[int, bool], list[_Answer]]()
    for answer in answers:
        model, architecture = answer.loaded.model, answer.loaded.architecture
        is_beyond = architecture.is_beyond(int(answer.subset.rows[-1]) + 1)
        groups.setdefault((id(model), is_beyond), []).append(answer)
    return list(groups.values())


def _compute(answers: Sequence[_Answer]) -> list[torch.Tensor]:
    """Return each step's logits, ``[keep, vocab]`` float32."""
    loaded, subsets = answers[0].loaded, [answer.subset for answer in answers]
    rows = sum(len(subset.rows) for subset in subsets)
    # a twentieth of a step's time on a CPU; tensors of other classes do not allow it
    mode = torch.inference_mode() if rounds_products(loaded.model) else torch.no_grad()
    with mode, loaded.without_autocast(), decoding_experts(loaded.model, rows):
        graphs = graphs_for(loaded)
        captured = None if graphs is None else graphs.compute(loaded, subsets)
        if captured is not None:
            return captured
        if len(subsets) == 1 and _is_ordinary(loaded, subsets[0]):
            return [ordinary_forward(loaded, subsets[0])]
        return joint_forward(loaded, subsets)


def _is_ordinary(loaded: ReusableModel, subset: SubsetPass) -> bool:
    """Whether an ordinary call is faster: on a GPU, for a step without repair or sparsity."""
    repairs = len(subset.rows) > subset.keep
    return loaded.device.type != "cpu" and not repairs and subset.sparse is None


@contextmanager
def before_layers(loaded: ReusableModel, check: Callable[[], object]) -> Iterator[None]:
    """Call ``check`` before each layer of the calling thread's passes in the block.

    It is not called in steps between the layers, nor while a pass is captured, since it can end the
    pass or yield the model.
    """
    here, batch, graphs = threading.get_ident(), batch_of(loaded), graphs_for(loaded)
    backbone = backbone_of(loaded.model)

    def call(*_: object) -> None:
        captures = graphs is not None and graphs.captures
        if threading.get_ident() == here and not (batch.computes_steps or captures):
            with pass_suspended(backbone.config):
                check()

    hooks = [layer.register_forward_pre_hook(call) for layer in backbone.layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def batch_of(loaded: ReusableModel) -> StepBatch:
    """Return the model's batch, the same for all engines over it."""
    return lock_of(loaded.model).shared(StepBatch)
