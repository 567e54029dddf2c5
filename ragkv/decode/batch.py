"""Decoding steps of several answers as one pass.

Each answer is drawn in the thread that asked for it. Where a step needs the model, one of these
threads, the leader, runs the steps of all of them together: linear layers read their weights once
for up to eight rows as fast as for one. A thread that computes a whole prompt, or encodes chunks,
lets pending steps run between two of its layers, so no token waits for a prompt.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from ragkv.attend.forward import SubsetPass, joint_forward, ordinary_forward
from ragkv.model.architecture import backbone_of
from ragkv.model.experts import decoding_experts
from ragkv.model.loaded import ReusableModel
from ragkv.model.lock import Claim, ModelLock, lock_of
from ragkv.splice.overlap import OverlappedCache

PATIENCE_S = 0.05
"""A step waits this long for answers whose last token is still being drawn."""


@dataclass(slots=True, eq=False)
class _Step:
    """A pass that one answer waits for; at the end it has logits, or an error."""

    loaded: ReusableModel
    subset: SubsetPass
    thread: int = field(default_factory=threading.get_ident)
    since: float = field(default_factory=time.perf_counter)
    ready: threading.Event = field(default_factory=threading.Event)
    leads: bool = False
    logits: torch.Tensor | None = None
    error: Exception | None = None

    def result(self) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        if self.logits is None:
            raise RuntimeError("this step was not computed")
        return self.logits


class StepBatch(Claim):
    """The steps that wait for one model, whatever engine their answers belong to.

    Attributes
    ----------
    max_wait_s
        Seconds that a pending step waits for the layers of a prompt.
    """

    def __init__(self, lock: ModelLock) -> None:
        self.lock = lock
        self.max_wait_s = 0.2
        self._changed = threading.Condition()
        self._pending: list[_Step] = []
        self._answers = 0
        self._claims = False
        self._running = False
        self._leader: _Step | None = None

    @property
    def answers(self) -> int:
        """Number of answers whose steps come here."""
        return self._answers

    @contextmanager
    def answer(self) -> Iterator[AnswerSteps]:
        """Count one more answer in the block, and run its steps."""
        with self._changed:
            self._answers += 1
        steps = AnswerSteps(self)
        try:
            yield steps
        finally:
            with self._changed:
                self._answers -= 1
                self._changed.notify_all()
            steps.end()

    # ---- the steps of threads that do not have the model

    def submit(self, step: _Step) -> None:
        """Let a thread that has the model run the step, or this one when it gets it."""
        with self._changed:
            self._pending.append(step)
            claims, self._claims = self._claims, True
            self._changed.notify_all()
        if not claims:
            self.lock.enqueue(self)

    def drop(self, step: _Step) -> bool:
        """Remove a pending step; return whether it was there."""
        with self._changed:
            pending = step in self._pending
            if pending:
                self._pending.remove(step)
            return pending

    def thread(self) -> int | None:
        """Make the thread of the first pending step the leader."""
        with self._changed:
            self._claims = False
            if not self._pending:
                return None
            self._leader = leader = self._pending.pop(0)
            leader.leads = True
            return leader.thread

    def wake(self) -> None:
        """Wake the leader, which has the model now."""
        leader, self._leader = self._leader, None
        if leader is not None:
            leader.ready.set()

    # ---- the thread that has the model

    def lead(self, own: _Step) -> torch.Tensor:
        """Run a step together with those of the other answers."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._pending) >= self._answers - 1, PATIENCE_S)
            others, self._pending = self._pending, []
        self._run([own, *others], own)
        return own.result()

    @contextmanager
    def between_layers(self, loaded: ReusableModel) -> Iterator[None]:
        """Run pending steps between the layers of the calling thread's passes in the block."""
        if not self._answers:
            yield
            return
        here = threading.get_ident()

        def run_pending(*_: object) -> None:
            if threading.get_ident() != here or self._running:
                return
            with self._changed:
                waited = time.perf_counter() - min(
                    (step.since for step in self._pending), default=math.inf
                )
                if waited < self.max_wait_s:
                    return
                steps, self._pending = self._pending, []
            self._run(steps)

        hooks = [
            layer.register_forward_pre_hook(run_pending)
            for layer in backbone_of(loaded.model).layers
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _run(self, steps: Sequence[_Step], own: _Step | None = None) -> None:
        """Compute steps and wake their threads. An interrupt leaves the others' pending."""
        self._running = True
        try:
            for together in _compatible(steps):
                _compute(together)
        finally:
            self._running = False
            for step in steps:
                if step is own:
                    continue
                if step.logits is None and step.error is None:
                    self.submit(step)
                else:
                    step.ready.set()


class AnswerSteps:
    """One answer's steps. The leader keeps the model from one step to the next."""

    def __init__(self, batch: StepBatch) -> None:
        self._batch = batch
        self._leads = False

    def compute(self, loaded: ReusableModel, subset: SubsetPass) -> torch.Tensor:
        """Return the logits after the pass's last rows, ``[keep, vocab]`` float32.

        Raises
        ------
        Exception
            What the pass itself raises; other answers' steps never fail this one.
        """
        self._yield_model()
        batch, step = self._batch, _Step(loaded, subset)
        if not batch.lock.is_mine:
            batch.submit(step)
            self._wait(step)
        if step.leads:
            self._leads = True
        elif step.ready.is_set():
            return step.result()
        try:
            return batch.lead(step)
        finally:
            self._yield_model()

    def _wait(self, step: _Step) -> None:
        try:
            step.ready.wait()
        except BaseException:  # interrupted
            if not self._batch.drop(step) and step.leads:
                self._leads = True
            raise

    def _yield_model(self) -> None:
        """Let go of the model if others than steps wait for it."""
        if self._leads and self._batch.lock.is_wanted(but=self._batch):
            self.end()

    def end(self) -> None:
        """Let go of the model."""
        if self._leads:
            self._leads = False
            self._batch.lock.release()


def _compatible(steps: Sequence[_Step]) -> list[list[_Step]]:
    """Group steps that one pass can compute: on one side of the model's position limit."""
    limit = steps[0].loaded.architecture.position_limit
    if limit is None:
        return [list(steps)]
    sides: list[list[_Step]] = [[], []]
    for step in steps:
        sides[int(step.subset.rows[-1]) >= limit].append(step)
    return [side for side in sides if side]


@torch.no_grad()
def _compute(steps: Sequence[_Step]) -> None:
    """Compute steps in one pass; where that fails, one after another: each has its own error."""
    loaded = steps[0].loaded
    rows = sum(len(step.subset.rows) for step in steps)
    try:
        with loaded.without_autocast(), decoding_experts(loaded.model, rows):
            subsets = [step.subset for step in steps]
            if len(steps) == 1 and _is_ordinary(loaded, subsets[0]):
                found = [ordinary_forward(loaded, subsets[0])]
            else:
                found = joint_forward(loaded, subsets)
    except Exception as error:  # noqa: BLE001  handed to the answer's thread
        if len(steps) == 1:
            steps[0].error = error
            return
        for step in steps:
            _compute([step])
        return
    for step, logits in zip(steps, found, strict=True):
        step.logits = logits


def _is_ordinary(loaded: ReusableModel, subset: SubsetPass) -> bool:
    """Whether an ordinary call computes the step faster: on a GPU, where it repairs nothing."""
    on_device = loaded.device.type != "cpu" and not isinstance(subset.cache, OverlappedCache)
    return on_device and len(subset.rows) == subset.keep


def batch_of(loaded: ReusableModel) -> StepBatch:
    """Return the model's batch, the same for all engines over it."""
    return lock_of(loaded.model).shared(StepBatch)
