"""The tasks: how each kind of question is scored and how long its answer may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["qa", "summary", "needle"]


@dataclass(frozen=True, slots=True)
class Task:
    """One task of an evaluation file.

    ``kind`` decides prompt and metric: ``qa`` token F1, ``summary`` ROUGE-L,
    ``needle`` recall. ``max_new_tokens`` is the generation length; ``by_data_set``
    overrides it for examples whose id begins with a data set's name and ``_``.
    """

    name: str
    kind: Kind
    max_new_tokens: int
    by_data_set: tuple[tuple[str, int], ...] = ()

    def length(self, example_id: str) -> int:
        """Return how many tokens may be generated for the example of this id."""
        for data_set, length in self.by_data_set:
            if example_id.startswith(f"{data_set}_"):
                return length
        return self.max_new_tokens


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("multihop_qa", "qa", 32),
        Task("singlehop_qa", "qa", 32),
        Task("summarization", "summary", 160, (("qmsum", 160), ("samsum", 80))),
        Task("niah_single", "needle", 64),
        Task("niah_multikey", "needle", 64),
        Task("niah_multivalue", "needle", 128),
        Task("niah_multiquery", "needle", 128),
    )
}
"""All tasks by name."""
