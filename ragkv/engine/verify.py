"""The invariants, on the model that is actually loaded."""

from __future__ import annotations

import pydoc_data.topics
from dataclasses import dataclass

import numpy as np
import torch

from ragkv.decode.full import full_prefill
from ragkv.engine.engine import RagKV
from ragkv.model.architecture import config_of
from ragkv.model.load import LoadedModel
from ragkv.model.rope_probe import KeyProbe
from ragkv.model.rotary import rotate, unrotate

_TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 3e-1}
"""Largest difference of two logits that passes as rounding, in their standard deviations."""
_QUESTION = "\n\nWhat does the text above describe?"


@dataclass(frozen=True, slots=True)
class CheckRow:
    """One invariant: its name, whether it holds, and what was measured.

    ``required`` is False for what is expected and not promised.
    """

    name: str
    holds: bool
    detail: str
    required: bool = True


def verify_model(loaded: LoadedModel) -> str:
    """Run the invariants on a model of a family that the test suite does not cover.

    Returns
    -------
    str
        What does not hold; empty if everything does.
    """
    with RagKV(loaded, store=":memory:") as kv:
        failing = [row for row in check_model(kv) if row.required and not row.holds]
    return "; ".join(f"{row.name}: {row.detail}" for row in failing)


def check_model(kv: RagKV) -> list[CheckRow]:
    """Run the invariants on the engine's model, in a store of their own in memory.

    Returns
    -------
    list of CheckRow
        For an unsupported model a single row with the reason.
    """
    if not kv.supported:
        return [CheckRow("caches can be moved", holds=False, detail=kv.unsupported_reason)]
    words = pydoc_data.topics.topics["assignment"].split()
    size = _chunk_words(kv, words)
    chunks = [" ".join(words[at : at + size]) for at in (0, size, 2 * size)]
    with RagKV(kv.loaded, store=":memory:") as scratch:
        scratch.precompute(chunks)
        return [
            CheckRow("caches can be moved", holds=True, detail=_kinds(scratch)),
            _rotation(scratch),
            _moving(scratch),
            _same_as_full("everything recomputed = full prefill", scratch, chunks, 1.0),
            _same_as_full("one chunk behind the sink = full prefill", scratch, chunks[:1], 0.0),
            _ordinary_ids(scratch, chunks),
            _repair_helps(scratch, chunks),
        ]


def _chunk_words(kv: RagKV, words: list[str]) -> int:
    """Return how long chunks are, in words: three of them and some more fit the model."""
    size, known = 90, kv.loaded.positions
    while known is not None and size > 5:
        if len(kv.tokenizer(" ".join(words[: 4 * size]))["input_ids"]) <= known:
            break
        size //= 2
    return size


def _prompt(kv: RagKV, chunks: list[str]) -> str:
    """Return a prompt that begins with the sink, as a string: every tokenizer takes it."""
    head = kv.sink_from([{"role": "user", "content": "{context}"}]) if _chats(kv) else ""
    return head + "\n\n".join(chunks) + _QUESTION


def _chats(kv: RagKV) -> bool:
    return bool(kv.tokenizer.chat_template)


def _kinds(kv: RagKV) -> str:
    config = config_of(kv.model)
    return f"{config.model_type}, {config.num_hidden_layers} layers, {kv.model.dtype}"


def _moving(kv: RagKV) -> CheckRow:
    """Keys computed at one place and moved are the keys computed at the other."""
    loaded = kv.loaded
    architecture, rotary = loaded.architecture, loaded.rotary
    if architecture is None or rotary is None:
        return CheckRow("keys can be moved", holds=False, detail=loaded.unsupported)
    seen = KeyProbe(loaded.model)
    kinds = enumerate(architecture.rope_kinds)
    worst = max(seen.apart(layer, kind, rotary) for layer, kind in kinds)
    holds = worst < 10 * _TOLERANCE.get(kv.model.dtype, 3e-1)
    return CheckRow("keys can be moved", holds, f"{worst:.1e} standard deviations apart")


def _rotation(kv: RagKV) -> CheckRow:
    """Un-rotating and rotating again changes nothing but rounding."""
    architecture, rotary = kv.loaded.architecture, kv.loaded.rotary
    if architecture is None or rotary is None:
        return CheckRow("rotation can be undone", holds=False, detail=kv.unsupported_reason)
    worst = 0.0
    for kind in set(architecture.rope_kinds):
        table = rotary.at(kind, torch.arange(64, device=kv.model.device))
        keys = torch.randn(64, table[0].shape[-1] * 2, device=kv.model.device)
        worst = max(worst, float((unrotate(rotate(keys, table), table) - keys).abs().max()))
    return CheckRow("rotation can be undone", worst < 1e-4, f"largest error {worst:.1e}")


def _distance(kv: RagKV, logits: torch.Tensor, ids: list[int]) -> float:
    """Largest difference to a full prefill, in standard deviations of its logits."""
    full, _ = full_prefill(kv.loaded, np.array(ids, dtype=np.int32))
    return float((logits - full).abs().max() / full.std())


def _same_as_full(name: str, kv: RagKV, chunks: list[str], ratio: float) -> CheckRow:
    out = kv.prefill(_prompt(kv, chunks), recompute_ratio=ratio, method="query")
    far = _distance(kv, out.logits, out.token_ids)
    known = out.report.reused_tokens + out.report.recomputed_tokens
    holds = far < _TOLERANCE.get(kv.model.dtype, 3e-1) and known > 0
    return CheckRow(name, holds, f"{far:.1e} standard deviations apart, {known} tokens known")


def _ordinary_ids(kv: RagKV, chunks: list[str]) -> CheckRow:
    prompt = _prompt(kv, chunks)
    ids = kv.prefill(prompt).token_ids
    bos = str(kv.tokenizer.bos_token or "\0")
    ordinary = kv.tokenizer(prompt, add_special_tokens=not prompt.startswith(bos))["input_ids"]
    text = kv.tokenizer.decode(ids, skip_special_tokens=False)
    holds = list(ordinary) == ids and chunks[0] in text
    return CheckRow("token ids are the ordinary ones", holds, f"{len(ids)} tokens")


def _repair_helps(kv: RagKV, chunks: list[str]) -> CheckRow:
    """Recomputing 20 % is not further from full prefill than plain reuse."""
    far = {}
    for method in ("reuse", "query"):
        out = kv.prefill(_prompt(kv, chunks[::-1]), recompute_ratio=0.2, method=method)
        far[method] = _distance(kv, out.logits, out.token_ids)
    return CheckRow(
        "repair comes closer than plain reuse",
        far["query"] <= far["reuse"],
        f"{far['query']:.2f} against {far['reuse']:.2f} standard deviations",
        required=False,
    )
