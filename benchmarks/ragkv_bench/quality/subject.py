"""One example under one method after another."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ragkv
from ragkv.select import Method, get_method
from ragkv_bench.data.examples import Example
from ragkv_bench.data.tasks import TASKS, chunk_texts, prompt, template
from ragkv_bench.quality.fidelity import FIDELITY_TOKENS, Fidelity, Reference, fidelity, reference
from ragkv_bench.quality.records import EvalRecord, Ratio
from ragkv_bench.quality.scores import score

if TYPE_CHECKING:
    from ragkv import Prefilled, RagKV

_PACKAGES = (Path(ragkv.__file__).parent, Path(__file__).parents[1])
FULL = "full"
Setting = tuple[str | Method, Ratio]
"""A method, or its name, and its ratio."""


class Subject:
    """An example, its prompt, and what its measurements share.

    Parameters
    ----------
    methods
        The methods that will be measured: ingestion prepares the chunks for all of them.
    time_in_turn
        Time a full prefill before every method's, not only the first.
    whole_answers
        Compare over the whole of full attention's answer, not its first tokens.
    """

    def __init__(
        self,
        kv: RagKV,
        example: Example,
        methods: Sequence[str | Method],
        *,
        time_in_turn: bool = True,
        whole_answers: bool = False,
    ) -> None:
        chat = bool(kv.tokenizer.chat_template)
        self._kv = kv
        self._example = example
        self._methods = methods
        self._time_in_turn = time_in_turn
        self._longest = TASKS[example.task].max_new_tokens
        self._compared = self._longest if whole_answers else FIDELITY_TOKENS
        self._prompt = prompt(example, chat=chat)
        self._sink = kv.sink_from(template(example.task, chat=chat))
        self._reference: Reference | None = None
        self._ttft_full_s: float | None = None
        self._tokens = 0

    def key(self, method: str | Method, ratio: Ratio) -> str:
        """Return a hash of everything that a measurement depends on.

        What a rule of one's own does is not known: it is measured again each time.
        """
        chosen, kv = get_method(method), self._kv
        overrides = self._overrides(method, ratio)
        overrides["method"] = repr(replace(chosen, score=None))
        reuse = kv.reuse.override(calibrated_for=None, **overrides)
        model = [kv.info.name, kv.info.fingerprint or "", str(kv.loaded.dtype)]
        parts = [*model, asdict(reuse), _code_of(chosen), asdict(self._example), self._prompt]
        parts.append(f"{self._compared} tokens compared")
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()

    def measure(self, method: str | Method, ratio: Ratio) -> EvalRecord:
        """Prefill, compare with full attention, and answer."""
        against = self._against()
        ttft_full_s = self._full_ttft()
        near, share, ttft_s = Fidelity(kl=0.0, agreement=1.0), 1.0, ttft_full_s
        name = get_method(method).name
        if name != FULL:
            prefilled = self._prefill(method, ratio)
            ttft_s = prefilled.report.ttft_s
            near = fidelity(self._kv, prefilled, against, tokens=self._compared)
            share = self._share(method, prefilled)
        answer = self._answer(method, ratio, near)
        return EvalRecord(
            key=self.key(method, ratio),
            id=self._example.id,
            method=name,
            ratio=ratio,
            answer=answer,
            score=score(self._example, answer),
            kl=near.kl,
            agreement=near.agreement,
            share_recomputed=share,
            prompt_tokens=self._tokens,
            ttft_s=ttft_s,
            ttft_full_s=ttft_full_s,
        )

    def _answer(self, method: str | Method, ratio: Ratio, near: Fidelity) -> str:
        """Return a method's greedy answer, without the model's own penalty on repeated tokens."""
        if near.is_same:
            ids = list(self._against().token_ids[: self._longest])
            return str(self._kv.tokenizer.decode(ids, skip_special_tokens=True))
        return self._kv.generate(
            self._prompt,
            max_new_tokens=self._longest,
            generation={"repetition_penalty": 1.0},
            **self._overrides(method, ratio),
        ).text

    def _against(self) -> Reference:
        """Precompute the chunks and take the full answer, on the first call."""
        if self._reference is None:
            for method in self._methods:
                if get_method(method).reuse != "none":
                    texts = chunk_texts(self._example)
                    self._kv.precompute(texts, sink=self._sink, method=method)
            prefilled = self._prefill(FULL, 1.0)
            self._ttft_full_s = prefilled.report.ttft_s
            self._tokens = len(prefilled.token_ids)
            tokens = max(self._longest, FIDELITY_TOKENS)
            self._reference = reference(self._kv, prefilled, tokens=tokens)
        return self._reference

    def _full_ttft(self) -> float:
        """Seconds of a full prefill; each is used once where both are timed in turn."""
        seconds = self._ttft_full_s
        if seconds is None:
            seconds = self._prefill(FULL, 1.0).report.ttft_s
        self._ttft_full_s = None if self._time_in_turn else seconds
        return seconds

    def _prefill(self, method: str | Method, ratio: Ratio) -> Prefilled:
        return self._kv.prefill(self._prompt, **self._overrides(method, ratio))

    def _overrides(self, method: str | Method, ratio: Ratio) -> dict[str, Any]:
        return {
            "method": method,
            "recompute_ratio": ratio,
            "sink": self._sink,
            "history": False,  # figures do not depend on the prompts before
        }

    def _share(self, method: str | Method, prefilled: Prefilled) -> float:
        """Share of chunk tokens computed; of all of them where a method caches only some.

        Those that were computed while the reference's tokens were fed are among them.
        """
        report = prefilled.report
        if get_method(method).uses_chunks:
            ahead = 0 if prefilled.copies is None else prefilled.copies.repaired
            cached = report.tokens.reused + report.tokens.recomputed
            return report.effective_ratio + ahead / max(1, cached)
        tokenizer = self._kv.tokenizer
        texts = chunk_texts(self._example)
        tokens = sum(len(tokenizer(t, add_special_tokens=False)["input_ids"]) for t in texts)
        return min(1.0, max(0.0, 1.0 - report.tokens.reused / tokens))


def _code_of(method: Method) -> str:
    rule = method.score
    package = getattr(rule, "__module__", "").partition(".")[0]
    own = rule is None or package in {"ragkv", "ragkv_bench"}
    return _digest() if own else uuid.uuid4().hex


@cache
def _digest() -> str:
    """Return a digest of both packages' files."""
    state = hashlib.blake2b(digest_size=16)
    for package in _PACKAGES:
        for file in sorted(package.rglob("*.py")):
            state.update(file.read_bytes())
    return state.hexdigest()
