"""One example under one method after another."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ragkv.evaluate.data import Example
from ragkv.evaluate.fidelity import Fidelity, Reference, fidelity, reference
from ragkv.evaluate.prompts import chunk_texts, prompt, template
from ragkv.evaluate.records import Record
from ragkv.evaluate.scores import score
from ragkv.evaluate.tasks import TASKS
from ragkv.select import get_method

if TYPE_CHECKING:
    from ragkv import Prefilled, RagKV, ReuseReport

FULL = "full"
Setting = tuple[str, float]
"""A method and its ratio."""


class Subject:
    """An example, its prompt, and what its measurements share.

    Parameters
    ----------
    methods
        The methods that will be measured: ingestion prepares the chunks for all of them.
    time_in_turn
        Time a full prefill before every method's, not only the first.
    """

    def __init__(
        self, kv: RagKV, example: Example, methods: Sequence[str], *, time_in_turn: bool = True
    ) -> None:
        chat = bool(kv.tokenizer.chat_template)
        self._kv = kv
        self._example = example
        self._methods = methods
        self._time_in_turn = time_in_turn
        self._prompt = prompt(example, chat=chat)
        self._sink = kv.sink_from(template(example.task, chat=chat))
        self._reference: Reference | None = None
        self._ttft_full_s: float | None = None

    def key(self, method: str, ratio: float) -> str:
        """Return a hash of everything that a measurement depends on."""
        reuse = self._kv.reuse.override(method=method, recompute_ratio=ratio, sink=self._sink)
        dtype = str(self._kv.model.dtype)
        parts = [self._kv.model_name, dtype, asdict(self._example), self._prompt, asdict(reuse)]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()

    def measure(self, method: str, ratio: float) -> Record:
        """Prefill, compare with full attention, then answer as a user would be answered."""
        against = self._against()
        ttft_full_s = self._full_ttft()
        near, share, ttft_s = Fidelity(kl=0.0, agreement=1.0), 1.0, ttft_full_s
        if method != FULL:
            prefilled = self._prefill(method, ratio)
            ttft_s = prefilled.report.ttft_s
            share = self._share(method, prefilled.report)
            near = fidelity(self._kv, prefilled, against)
            del prefilled
        completion = self._kv.generate(
            self._prompt,
            max_new_tokens=TASKS[self._example.task].length(self._example.id),
            temperature=0.0,
            **self._overrides(method, ratio),
        )
        scored = score(self._example, completion.text)
        return Record(
            key=self.key(method, ratio),
            id=self._example.id,
            method=method,
            ratio=ratio,
            answer=completion.text,
            score=scored.value,
            exact_match=scored.exact_match,
            kl=near.kl,
            agreement=near.agreement,
            share_recomputed=share,
            prompt_tokens=completion.report.prompt_tokens,
            ttft_s=ttft_s,
            ttft_full_s=ttft_full_s,
        )

    def _against(self) -> Reference:
        """Precompute the chunks and take the full answer, on the first call."""
        if self._reference is None:
            for method in self._methods:
                if get_method(method).reuse != "none":
                    texts = chunk_texts(self._example)
                    self._kv.precompute(texts, sink=self._sink, method=method)
            prefilled = self._prefill(FULL, 1.0)
            self._ttft_full_s = prefilled.report.ttft_s
            self._reference = reference(self._kv, prefilled)
        return self._reference

    def _full_ttft(self) -> float:
        """Seconds of a full prefill; each is used once where both are timed in turn."""
        seconds = self._ttft_full_s
        if seconds is None:
            seconds = self._prefill(FULL, 1.0).report.ttft_s
        self._ttft_full_s = None if self._time_in_turn else seconds
        return seconds

    def _prefill(self, method: str, ratio: float) -> Prefilled:
        return self._kv.prefill(self._prompt, **self._overrides(method, ratio))

    def _overrides(self, method: str, ratio: float) -> dict[str, Any]:
        return {"method": method, "recompute_ratio": ratio, "sink": self._sink}

    def _share(self, method: str, report: ReuseReport) -> float:
        """Share of chunk tokens computed; of all of them where a method caches only some."""
        if get_method(method).reuse == "chunks":
            return report.effective_ratio
        tokenizer = self._kv.tokenizer
        texts = chunk_texts(self._example)
        tokens = sum(len(tokenizer(t, add_special_tokens=False)["input_ids"]) for t in texts)
        return min(1.0, max(0.0, 1.0 - report.reused_tokens / tokens))
