"""The loop over an answer's steps, in place of the loop inside transformers' ``generate``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers import StoppingCriteriaList as Criteria
from transformers.generation.streamers import BaseStreamer

from ragkv.decode.draft import Drafts
from ragkv.decode.steps import Steps
from ragkv.errors import ConfigError


class SeededSampling(LogitsProcessor):
    """Draws each token with its own generator, and sets the scores of all others to -inf.

    It must be the last processor. torch's generators are shared by all threads. This one is on the
    CPU, so a seed gives the same tokens on every device.
    """

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.tokens = 0

    def __call__(self, _: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Take and return ``[1, vocab]`` scores."""
        self.tokens += 1
        _require_allowed(scores)
        chances = torch.softmax(scores, dim=-1).cpu()
        drawn = torch.multinomial(chances, 1, generator=self._generator).to(scores.device)
        return torch.full_like(scores, float("-inf")).scatter(-1, drawn, 0.0)


@dataclass(slots=True, eq=False)
class Loop:
    """Draws one answer as transformers' loop does, from steps over one or several tokens.

    Every token is drawn from the model's scores after the tokens before it. If it is the draft's
    token, the step's next row continues from it. Drafts change only the number of steps: this is
    speculative sampling (arXiv 2302.01318) for drafts without probabilities.

    Attributes
    ----------
    seeded
        The last logits processor; None samples from torch's generator, or takes the best token.
    count
        Steps after the prompt's.
    begun
        Number of calls by ``generate``.
    """

    steps: Steps
    drafts: Drafts
    streamer: BaseStreamer
    seeded: SeededSampling | None = None
    count: int = 0
    begun: int = 0

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: Criteria,
        generation_config: GenerationConfig,
        **_: Any,
    ) -> torch.Tensor:
        """Return ``[1, tokens]`` the prompt and the answer; called by ``generate``."""
        del model  # the steps have it
        self.begun += 1
        last = [] if self.seeded is None else [self.seeded]
        processors: Any = LogitsProcessorList([*logits_processor, *last])
        history, draft = self.steps.history, list[int]()

        def take(logits: torch.Tensor) -> list[int] | None:
            nonlocal input_ids, draft
            draft = draft[: len(logits) - 1]
            for row, expected in enumerate([*draft, None]):
                scores = processors(input_ids, logits[row : row + 1].clone())
                token = _drawn(scores, sampling=bool(generation_config.do_sample))
                input_ids = torch.cat([input_ids, token], dim=-1)
                history.append([int(token)])
                self.streamer.put(token)  # type: ignore[no-untyped-call]
                ends = bool(stopping_criteria(input_ids, None).all())
                if ends or int(token) != expected:
                    break
            self.drafts.record(len(draft), row)
            if ends:
                return None
            self.drafts.costs = self.steps.draft_costs
            draft = self.drafts.propose(history, self._room(generation_config), self.steps.answers)
            self.count += 1
            return draft

        self.steps.run(take)
        return input_ids

    def _room(self, config: GenerationConfig) -> int:
        """Return the room for a draft in the next step.

        No step crosses the position at which the rotary table changes.
        """
        length, limit = len(self.steps.history), self.steps.position_limit
        room = int(config.max_length) - length - 1
        return room if limit is None or length > limit else min(room, limit - length)


def _drawn(scores: torch.Tensor, *, sampling: bool) -> torch.Tensor:
    """Draw a token ``[1, 1]`` from ``[1, vocab]`` scores."""
    _require_allowed(scores)
    if sampling:
        return torch.multinomial(torch.softmax(scores, dim=-1), 1)
    return scores.argmax(dim=-1, keepdim=True)


def _require_allowed(scores: torch.Tensor) -> None:
    if not bool(scores.isfinite().any()):
        raise ConfigError(
            "no token has a finite score: json_schema, suppress_tokens and the like allow none "
            "together, or the model's logits are not finite"
        )
