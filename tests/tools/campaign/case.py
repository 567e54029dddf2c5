"""One run of the campaign: a store, what was acknowledged, and what was found."""

import random
import traceback
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from children import Child

from campaign.world import TEXTS, Question, ask, draw_questions, engine, precompute, whole, wrong
from ragkv import RagKV
from ragkv.config import StoreConfig
from ragkv.errors import StoreError
from ragkv.store import open_chunk_store, operate

ALL = range(len(TEXTS))


@dataclass
class Outcome:
    """What one run, or all runs of one fault, came to.

    ``struck`` counts runs in which the fault came in time: the process was killed before
    it was done, the disk was full before everything was written, the server was gone while
    answers were asked for.
    """

    runs: int = 0
    struck: int = 0
    answers: int = 0
    refused: int = 0
    damaged: int = 0
    healed: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def add(self, other: Self) -> None:
        """Sum up."""
        for name in ("runs", "struck", "answers", "refused", "damaged", "healed"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.misses += other.misses
        self.wrong += other.wrong
        self.lost += other.lost


@dataclass
class Case:
    """A store with the first chunks in it, for one fault.

    Attributes
    ----------
    folder
        Scratch space; the store lies in ``folder / "store"`` unless it is elsewhere.
    acknowledged
        Chunks whose ``put`` has returned, and that nobody has removed since.
    damages
        Whether the fault destroys bytes: then a store may lose entries, and even refuse
        to open, as long as it gives no wrong answer.
    examined
        Whether :meth:`examine` was called.
    """

    folder: Path
    config: StoreConfig
    draw: random.Random
    acknowledged: set[int]
    damages: bool = False
    examined: bool = False
    outcome: Outcome = field(default_factory=lambda: Outcome(runs=1))

    def ask(self, kv: RagKV, count: int = 1) -> None:
        """Ask, and compare with fresh engines."""
        for question in draw_questions(self.draw, count):
            self._ask(kv, question)

    def _ask(self, kv: RagKV, question: Question, *, all_known: bool = False) -> None:
        self.outcome.answers += 2
        try:
            answer = ask(kv, question)
            difference = wrong(question, answer)
        except Exception:  # noqa: BLE001  whatever it is, it must not come out of an answer
            self.outcome.wrong.append(traceback.format_exc())
            return
        self.outcome.misses.update(answer.misses)
        if difference:
            self.outcome.wrong.append(difference)
        if all_known and answer.reused != frozenset(question.chunks):
            self.outcome.wrong.append(f"{question} reuses {answer.reused} of a healed store")

    def check_acknowledged(self, kv: RagKV) -> None:
        """Demand what was acknowledged, unless the fault destroys bytes."""
        if not self.damages:
            lost = self.acknowledged - set(whole(kv, self.acknowledged))
            self.outcome.lost += [f"chunk {chunk}" for chunk in sorted(lost)]

    def check_budget(self) -> None:
        """Demand that the entries take no more than the budget."""
        with closing(open_chunk_store(self.config)) as store:
            used = sum(info.nbytes for info in store.entries())
        if self.config.disk_bytes is not None and used > self.config.disk_bytes:
            self.outcome.wrong.append(f"{used} bytes in a store for {self.config.disk_bytes}")

    def examine(self) -> None:
        """Look at what the fault left; a store that refuses to open is made anew."""
        if self.examined:
            return
        self.examined = True
        try:
            self._examine()
        except StoreError as error:
            self.outcome.refused += 1
            if not self.damages:
                self.outcome.lost.append(f"the store is refused: {error}")
            self.config = replace(self.config, path=self.folder / "anew")
            self.acknowledged = set()
            self._examine()

    def _examine(self) -> None:
        with engine(self.config) as kv:
            self.check_acknowledged(kv)
            self.ask(kv, 3)
        with closing(open_chunk_store(self.config)) as store:
            found = operate.verify(store, heal=True)
            self.outcome.damaged += sum(found.counts.get(k, 0) for k in ("damaged", "foreign"))
            self.outcome.healed += found.healed
            if not (again := operate.verify(store)).sound:
                self.outcome.wrong.append(f"verify --heal leaves {again}")
        with engine(replace(self.config, disk_bytes=None)) as kv:
            for chunk in ALL:
                precompute(kv, chunk)
            if missing := set(ALL) - set(whole(kv, ALL)):
                self.outcome.wrong.append(f"{missing} cannot be precomputed again")
            (question,) = draw_questions(self.draw, 1)
            self._ask(kv, question, all_known=True)


def acknowledged(child: Child, before: set[int]) -> set[int]:
    """Return the chunks that were acknowledged and not removed since.

    A child says ``+3`` after chunk 3's ``put`` has returned, ``-3`` before chunk 3 is removed.
    """
    chunks = set(before)
    for line in child.said:
        if line[0] in "+-":
            (chunks.add if line[0] == "+" else chunks.discard)(int(line[1:]))
    return chunks
