"""Checks of the invariants on the loaded model."""

from __future__ import annotations

import logging
import pydoc_data.topics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ragkv.config import MEMORY, ReuseConfig
from ragkv.decode.prefill import full_prefill, rounding_kl
from ragkv.engine.pipeline import Pipeline
from ragkv.engine.plan import Clock, Computed, Request
from ragkv.engine.planner import Planner
from ragkv.errors import ConfigError, ModelInUseError, UnsupportedModelError
from ragkv.ingest.corpus import Corpus
from ragkv.ingest.encode import encode
from ragkv.model.architecture import KeyProbe, config_of, is_verified
from ragkv.model.linear import in_float32
from ragkv.model.load import without_reuse
from ragkv.model.loaded import LoadedModel, ReusableModel
from ragkv.model.lock import lock_of
from ragkv.model.memory import is_out_of_memory
from ragkv.model.quantised import int4_rows
from ragkv.model.rotary import rotate, unrotate
from ragkv.prompt.render import chat_head
from ragkv.schedule.beside import PassesBesideRequests
from ragkv.schedule.requests import RequestQueue
from ragkv.select import method_of
from ragkv.select.auxiliary import Auxiliary
from ragkv.splice.layout import Origin
from ragkv.store import open_store

_log = logging.getLogger(__name__)
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 3e-1}
"""Largest difference of two logits due to rounding, in their standard deviations."""
_MOST_KL = 1e-2
_QUESTION = "\n\nWhat does the text above describe?"


@dataclass(frozen=True, slots=True)
class CheckRow:
    """One invariant: its name, whether it holds, and the measurement."""

    name: str
    holds: bool
    detail: str


def verified(loaded: LoadedModel, on_unsupported: str) -> LoadedModel:
    """Check the invariants on a model of a family that the test suite does not cover.

    Returns
    -------
    LoadedModel
        The model; without reuse if an invariant fails and ``on_unsupported`` is ``"full"``.

    Raises
    ------
    UnsupportedModelError
        An invariant fails, and ``on_unsupported`` is ``"raise"``.
    """
    if not isinstance(loaded, ReusableModel) or is_verified(loaded.model):
        return loaded
    _log.info("%s is of an unknown family: checking that its caches can be moved", loaded.name)
    try:
        wrong = "; ".join(f"{r.name}: {r.detail}" for r in check_model(loaded) if not r.holds)
    except ModelInUseError:  # not the model's fault
        raise
    except Exception as error:  # an unknown model can raise anything
        if is_out_of_memory(error):
            raise
        wrong = f"{type(error).__name__}: {error}"
    if not wrong:
        return loaded
    if on_unsupported == "raise":
        raise UnsupportedModelError(
            f"ragkv's tests do not cover this model's family, and a check fails: {wrong}. "
            "Load it with on_unsupported='full' to serve it by ordinary full prefill."
        )
    return without_reuse(loaded.model, loaded.tokenizer, loaded.name, wrong)


def check_model(loaded: LoadedModel) -> list[CheckRow]:
    """Check the invariants on a model, with chunks in memory.

    Returns
    -------
    list of CheckRow
        For an unsupported model a single row with the reason.
    """
    if not isinstance(loaded, ReusableModel):
        return [CheckRow("caches can be moved", holds=False, detail=loaded.unsupported)]
    words = pydoc_data.topics.topics["assignment"].split()
    size = _chunk_words(loaded, words)
    chunks = [" ".join(words[at : at + size]) for at in (0, size, 2 * size)]
    config = config_of(loaded.model)
    detail = f"{config.model_type}, {config.num_hidden_layers} layers, {loaded.dtype}"
    with lock_of(loaded.model), loaded.without_autocast():
        with in_float32(loaded.model):
            check = _Check(loaded, chunks)
            rows = [
                CheckRow("caches can be moved", holds=True, detail=detail),
                _rotation(loaded),
                _moving(loaded),
                check.same_as_full("everything recomputed = full prefill", chunks, 1.0),
                check.same_as_full("one chunk behind the sink = full prefill", chunks[:1], 0.0),
                check.ordinary_ids(chunks),
            ]
        ids = np.asarray(loaded.tokenizer("\n\n".join(chunks))["input_ids"], dtype=np.int32)
        of_a_step = ids[: int4_rows()]
        kl = max(rounding_kl(loaded, some) for some in (ids, of_a_step))
    return [*rows, _products(kl)] if kl else rows


def pipeline_over(loaded: ReusableModel, chunks: Sequence[str]) -> Pipeline:
    """Encode chunks in memory; return a pipeline over them that keeps no history."""
    lock = lock_of(loaded.model)
    corpus = Corpus(loaded, open_store(MEMORY, device=loaded.device), PassesBesideRequests(loaded))
    encode(corpus, chunks, corpus.sinks.configured(ReuseConfig()))
    return Pipeline(loaded, lock.shared(RequestQueue), Planner(corpus, _no_auxiliary))


class _Check:
    """Prefills prompts over chunks in memory, and compares with full prefill."""

    def __init__(self, loaded: ReusableModel, chunks: Sequence[str]) -> None:
        self._loaded = loaded
        self._pipeline = pipeline_over(loaded, chunks)

    def prefill(self, chunks: Sequence[str], ratio: float = 0.2) -> Computed:
        config = ReuseConfig(recompute_ratio=ratio)
        request = Request(self._prompt(chunks), config, method_of(config), Clock())
        return self._pipeline.prefill(request)

    def _prompt(self, chunks: Sequence[str]) -> str:
        """Return a prompt that begins with the sink, as a string, which every tokenizer accepts."""
        return chat_head(self._loaded.tokenizer) + "\n\n".join(chunks) + _QUESTION

    def same_as_full(self, name: str, chunks: Sequence[str], ratio: float) -> CheckRow:
        computed = self.prefill(chunks, ratio)
        plan, (logits, _) = computed.plan, computed.prefilled
        full, _ = full_prefill(self._loaded, plan.ids)
        distance = float((logits - full).abs().max() / full.std())
        known = int(np.isin(plan.origin, (Origin.CACHED, Origin.RECOMPUTED)).sum())
        holds = distance < _TOLERANCE.get(self._loaded.dtype, 3e-1) and known > 0
        return CheckRow(name, holds, f"{distance:.1e} standard deviations apart, {known} tokens")

    def ordinary_ids(self, chunks: Sequence[str]) -> CheckRow:
        tokenizer, prompt = self._loaded.tokenizer, self._prompt(chunks)
        plan = self.prefill(chunks).plan
        bos = str(tokenizer.bos_token or "\0")
        ordinary = tokenizer(prompt, add_special_tokens=not prompt.startswith(bos))["input_ids"]
        text = tokenizer.decode(plan.ids.tolist(), skip_special_tokens=False)
        holds = list(ordinary) == plan.ids.tolist() and chunks[0] in text
        return CheckRow("token ids are the ordinary ones", holds, f"{len(plan.ids)} tokens")


def _no_auxiliary(config: ReuseConfig) -> Auxiliary:
    raise ConfigError(f"the check loads no auxiliary model for {config.method!r}")


def _chunk_words(loaded: LoadedModel, words: Sequence[str]) -> int:
    """Return a chunk's length in words, so that four chunks fit the model."""
    size, limit = 90, loaded.positions or 1 << 30
    while size > 5 and len(loaded.tokenizer(" ".join(words[: 4 * size]))["input_ids"]) > limit:
        size //= 2
    return size


def _moving(loaded: ReusableModel) -> CheckRow:
    """Keys computed at one position and moved equal the keys computed at the other."""
    probe = KeyProbe(loaded.model)
    kinds = enumerate(loaded.architecture.rope_kinds)
    worst = max(probe.distance(layer, kind, loaded.rotary) for layer, kind in kinds)
    holds = worst < 10 * _TOLERANCE.get(loaded.dtype, 3e-1)
    return CheckRow("keys can be moved", holds, f"{worst:.1e} standard deviations apart")


def _products(kl: float) -> CheckRow:
    """Products with quantised weights are close to float32 products."""
    return CheckRow("quantised products = float32 products", kl < _MOST_KL, f"KL {kl:.1e}")


def _rotation(loaded: ReusableModel) -> CheckRow:
    """Rotating and un-rotating gives the same keys up to rounding."""
    worst = 0.0
    for kind in set(loaded.architecture.rope_kinds):
        table = loaded.rotary.at(kind, torch.arange(64, device=loaded.device))
        keys = torch.randn(64, table[0].shape[-1] * 2, device=loaded.device)
        worst = max(worst, float((unrotate(rotate(keys, table), table) - keys).abs().max()))
    return CheckRow("rotation can be undone", worst < 1e-4, f"largest error {worst:.1e}")
