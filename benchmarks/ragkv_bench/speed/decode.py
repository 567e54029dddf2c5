"""Milliseconds a token of decoding after a long prompt: ragkv, transformers and other engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
import torch
from rich.table import Table
from torch import nn
from tqdm.auto import trange
from transformers.cache_utils import DynamicCache

from ragkv import DecodeConfig, SparseDecoding
from ragkv.attend.blocks import BLOCK_SIZE, blocks_for
from ragkv.decode.generate import Drawn, draw
from ragkv.decode.prefill import prefill_into
from ragkv.decode.steps import Steps
from ragkv.errors import ConfigError
from ragkv.model.architecture import config_of
from ragkv.model.calls import cache_argument
from ragkv.model.implementation import has_bfloat16_products
from ragkv.model.linear import _patches_of, rounds_products
from ragkv.model.loaded import LoadedModel, ReusableModel, require_reusable
from ragkv.model.lock import end_openmp_threads, lock_of
from ragkv.prompt.render import render
from ragkv.prompt.tokens import IntArray, tokenize
from ragkv.splice.buffer import SplicedCache, spare_rows
from ragkv_bench.data.needles import build_needles, default_haystack
from ragkv_bench.data.tasks import TASKS, prompt
from ragkv_bench.probes.length import within
from ragkv_bench.quality.fidelity import Reference, compared
from ragkv_bench.quality.scores import score
from ragkv_bench.results import Found, grey, of, table
from ragkv_bench.speed.answer import transformers_answer
from ragkv_bench.speed.bound import memory_rate
from ragkv_bench.speed.machine import device_name, setup_of, title_of
from ragkv_bench.speed.peers.base import Peer, Startable
from ragkv_bench.speed.timing import check_plan, median_of, timed
from ragkv_bench.speed.traces import tokens_of

OWN, PACKED, OFF = "ragkv", "packed", "off"
WEIGHTS = ("float32", PACKED)
"""Those of a model that is loaded in float32, and as its file has them."""
_COMPUTED = 1024
"""Tokens of a prompt whose keys and values are computed; those of the others repeat them."""
_CAPTION = (
    "ms/tok: of each answer, so of a step; slope between answers of {answer_tokens[0]} and "
    "{answer_tokens[1]} tokens, median of {rounds} rounds; grey: quartiles. bound: bytes that a "
    "step reads over {rate:.0f} GB/s. once: answers at once. blocks: read by steps. KL to steps "
    "that read everything, and right answers, of {examples} prompts with needles."
)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """What is measured, with every combination of the lists; ConfigError for what cannot be.

    ``answer_tokens`` are two lengths of answers. ``examples`` are prompts with needles, of each
    length, on which the quality of steps is measured.
    """

    tokens: tuple[int, ...] = (1024, 4096)
    answer_tokens: tuple[int, ...] = (16, 64)
    weights: tuple[str, ...] = WEIGHTS
    sparse: tuple[str, ...] = (OFF,)
    concurrent: tuple[int, ...] = (1,)
    rounds: int = 5
    examples: int = 0

    def __post_init__(self) -> None:
        check_plan(self, "tokens", "weights", "sparse", "concurrent")
        if len(self.answer_tokens) != 2 or not 1 < self.answer_tokens[0] < self.answer_tokens[1]:
            raise ConfigError("answer_tokens are two lengths: a short one, 2 or more, and a longer")
        if min(self.concurrent) < 1 or self.examples < 0 or not set(self.weights) <= set(WEIGHTS):
            raise ConfigError(f"concurrent: 1 or more; examples: 0 or more; weights: {WEIGHTS}")
        for each in self.sparse:
            _settings(each)


def _settings(sparse: str) -> str | SparseDecoding:
    """Return the setting of a name: ``off``, ``auto``, or ``blocks`` at any length."""
    if sparse not in {OFF, "auto", "blocks"}:
        raise ConfigError(f"sparse must be off, auto or blocks, not {sparse!r}")
    return SparseDecoding() if sparse == "blocks" else sparse


@dataclass(slots=True, eq=False)
class _Prompt:
    """A prompt with its keys and values, and logits to begin an answer with."""

    ids: IntArray
    cache: SplicedCache
    logits: torch.Tensor

    def draw(
        self, loaded: ReusableModel, sparse: str, count: int, *, ignore_eos: bool = True
    ) -> Drawn:
        """Draw an answer."""
        config = DecodeConfig(max_new_tokens=count, drafts=False, ignore_eos=ignore_eos)
        return draw(loaded, self.ids, self._steps(loaded, sparse), config)

    def followed(self, loaded: ReusableModel, sparse: str, answer: Sequence[int]) -> Reference:
        """Return the distributions along an answer."""
        rows, steps = list[torch.Tensor](), self._steps(loaded, sparse)

        def take(logits: torch.Tensor) -> list[int] | None:
            rows.append(logits[-1].cpu())
            steps.history.append([answer[len(rows) - 1]])
            return [] if len(rows) < len(answer) else None

        steps.run(take)
        return Reference(tuple(answer), torch.stack(rows))

    def _steps(self, loaded: ReusableModel, sparse: str) -> Steps:
        """Return an answer's steps."""
        for layer in self.cache.layers:  # forgets another answer
            layer.length = len(self.ids)
        blocks = blocks_for(loaded, _settings(sparse), len(self.ids))
        # waiting threads have no OpenMP pool, as in an engine
        return Steps(
            loaded,
            self.ids,
            self.cache,
            self.logits,
            sparse=blocks,
            prefilled=end_openmp_threads,
        )


def _prompt(loaded: ReusableModel, ids: IntArray, longest: int, computed: int) -> _Prompt:
    """Compute a prompt's first tokens, and repeat their keys and values for the others."""
    cache = SplicedCache(loaded, 0, spare=len(ids) + spare_rows(longest))
    with lock_of(loaded.model), loaded.without_autocast():
        logits = prefill_into(loaded, ids[:computed], cache)
    for rows in cache.rows(slice(None)):
        for at in range(computed, len(ids), computed):
            end = min(at + computed, len(ids))
            rows[:, :, at:end] = rows[:, :, : end - at]
    return _Prompt(ids, cache, logits)


Subject = tuple[Found, Callable[[int], float]]
"""A row without times; and what draws answers of so many tokens, and returns the seconds."""


def bench_decode(
    models: Mapping[str, LoadedModel], plan: DecodePlan, *, peers: Sequence[Startable] = ()
) -> Found:
    """Measure milliseconds a token: those of a step, however many answers it serves.

    ``models``: one with each kind of weights. Returns ``rows``, one a length, number of answers and
    engine with its options, and the ``setup``.

    Raises ConfigError: the model has too few positions, or no weights to pack; PeerError: a peer
    does not start or gives no token.
    """
    own = {weights: require_reusable(loaded) for weights, loaded in models.items()}
    first = next(iter(own.values()))
    longest = plan.answer_tokens[1]
    within(first.positions, [tokens + longest for tokens in plan.tokens], first.name)
    judged = product(plan.tokens if plan.examples else (), own)
    quality = {(tokens, each): _quality(own[each], plan, tokens) for tokens, each in judged}
    text = tokens_of(default_haystack(), first.tokenizer).ids
    texts = [np.resize(text, each[::-1]) for each in product(plan.tokens, plan.concurrent)]
    rate, rows = memory_rate(first.device), list[Found]()
    with ThreadPoolExecutor(max(plan.concurrent)) as threads:
        for ids in texts:
            prompts = [_prompt(first, each, longest, _COMPUTED) for each in ids]
            rows += _measured(list(_subjects(own, plan, prompts, threads)), plan)
            del prompts
        for startable in peers:
            with startable as peer:
                for ids in texts:
                    seconds = partial(_asked, peer, ids.tolist(), threads)
                    rows += _measured([(_row(peer.name, ids.shape[::-1]), seconds)], plan)
    for row in (each for each in rows if each["engine"] == OWN):
        row["bound_ms"] = 1e3 * row["bytes_read"] / rate
        row.update(quality.get((row["tokens"], row["weights"]), {}).get(row["sparse"], {}))
    setup = setup_of(first, plan) | {"bytes_per_s": rate}
    return {"model": first.name, "device": device_name(first.device), "rows": rows, "setup": setup}


def _subjects(
    models: Mapping[str, ReusableModel],
    plan: DecodePlan,
    prompts: Sequence[_Prompt],
    threads: ThreadPoolExecutor,
) -> Iterator[Subject]:
    """Yield transformers and ragkv over the same keys and values."""
    size = len(prompts[0].ids), len(prompts)
    first = next(iter(models.values()))
    yield _row("transformers", size, "float32"), partial(_transformers, first, prompts)
    for (weights, loaded), sparse in product(models.items(), plan.sparse):
        row = _row(OWN, size, weights, sparse)
        yield row, partial(_ragkv, loaded, prompts, row, threads)


def _row(
    engine: str, size: tuple[int, ...], weights: str | None = None, sparse: str = OFF
) -> Found:
    row = {"engine": engine, "tokens": size[0], "weights": weights, "sparse": sparse}
    later = ("ms_per_token", "quartiles", "bound_ms", "bytes_read", "blocks_read", "kl", "needles")
    return row | {"concurrent": size[1]} | dict.fromkeys(later)


def _measured(subjects: Sequence[Subject], plan: DecodePlan) -> Iterator[Found]:
    """Time all in turn, round after round, and yield their rows; a first round warms up."""
    short, long = plan.answer_tokens
    slopes: list[list[float]] = [[] for _ in subjects]
    for number in trange(plan.rounds + 1, disable=None, desc=str(subjects[0][0]["tokens"])):
        for (_, seconds), found in zip(subjects, slopes, strict=True):
            less = seconds(short)
            if number:
                found.append(1e3 * (seconds(long) - less) / (long - short))
    for (row, _), found in zip(subjects, slopes, strict=True):
        ms, quartiles = median_of(found)
        yield row | {"ms_per_token": ms, "quartiles": quartiles, "rounds": len(found)}


def _ragkv(
    loaded: ReusableModel,
    prompts: Sequence[_Prompt],
    row: Found,
    threads: ThreadPoolExecutor,
    count: int,
) -> float:
    """Let threads draw an answer each, as those of an engine do, without this one's OpenMP pool."""
    end_openmp_threads()

    def together() -> list[Drawn]:
        return list(threads.map(lambda each: each.draw(loaded, row["sparse"], count), prompts))

    seconds, (first, *_) = timed(loaded.device, together)
    unread = 0.0
    if first.blocks:
        row["blocks_read"] = first.blocks_read / first.blocks
        unread = (first.blocks - first.blocks_read) / first.steps
        unread *= BLOCK_SIZE
    row["bytes_read"] = bytes_read(loaded, row["tokens"] + count // 2, len(prompts), unread)
    if row["weights"] == PACKED and not rounds_products(loaded.model):
        raise ConfigError(f"{loaded.name} has no quantised products here: leave out packed")
    return seconds


def _transformers(loaded: ReusableModel, prompts: Sequence[_Prompt], count: int) -> float:
    """Let transformers draw answers as a batch, from a cache of its own."""
    ids = [each.ids.tolist() for each in prompts]
    cache = DynamicCache(config=config_of(loaded.model))
    for layer in range(loaded.architecture.layers):
        rows = zip(*(each.cache.layer(layer) for each in prompts), strict=True)
        keys, values = (torch.stack(each)[:, :, : len(ids[0]) - 1] for each in rows)
        cache.update(keys, values, layer)
    named = cache_argument(loaded.model, cache)
    return transformers_answer(loaded.model, ids, count, **named).total_s


def _asked(
    peer: Peer, prompts: Sequence[Sequence[int]], threads: ThreadPoolExecutor, count: int
) -> float:
    """Return the seconds from when all answers have their first token to the end of all."""
    times = list(threads.map(lambda ids: peer.answer(ids, count), prompts))
    first, last = zip(*times, strict=True)
    return float(max(last) - max(first))


def bytes_read(loaded: ReusableModel, tokens: int, answers: int, unread: float = 0.0) -> float:
    """Return the bytes that a step reads: of each answer, all layers' rows but for ``unread``."""
    quantised, nbytes = _patches_of(loaded.model).quantised, 0
    for layer in loaded.model.modules():
        if isinstance(layer, nn.Linear):
            known = quantised.get(layer)
            int4 = None if known is None else known.int4
            if int4 is not None and answers <= int4.most_rows:
                nbytes += int4.nbytes
            else:
                nbytes += layer.weight.nbytes // (2 if known and has_bfloat16_products() else 1)
    shape = loaded.architecture
    seen = sum(min(tokens, window or tokens) for window in shape.windows) - unread
    row = 2 * shape.kv_heads * shape.head_dim * loaded.dtype.itemsize
    return nbytes + answers * seen * row


def _quality(loaded: ReusableModel, plan: DecodePlan, tokens: int) -> dict[str, Found]:
    """Return mean KL to dense steps along their answers, and the share of right answers."""
    tokenizer, kind = loaded.tokenizer, "multikey"
    found: dict[str, list[tuple[float, float]]] = {sparse: [] for sparse in plan.sparse}
    for example in build_needles(default_haystack(), tokenizer, kind, tokens, count=plan.examples):
        text = prompt(example, chat=bool(tokenizer.chat_template))
        ids = tokenize(render(text, tokenizer), tokenizer).ids
        longest = TASKS[example.task].max_new_tokens
        computed = _prompt(loaded, ids, longest, len(ids))
        answer = computed.draw(loaded, OFF, longest, ignore_eos=False).token_ids
        dense = computed.followed(loaded, OFF, answer)
        for sparse, figures in found.items():
            own = computed.draw(loaded, sparse, longest, ignore_eos=False).token_ids
            near = compared(computed.followed(loaded, sparse, answer), dense, tokens=len(answer))
            figures.append((near.kl, score(example, str(tokenizer.decode(own)))))
    means = {sparse: np.mean(figures, axis=0).tolist() for sparse, figures in found.items()}
    return {sparse: {"kl": kl, "needles": needles} for sparse, (kl, needles) in means.items()}


def tables(found: Found) -> list[Table]:
    """Return the one table."""
    setup = found["setup"]
    caption = _CAPTION.format(**setup["plan"], rate=setup["bytes_per_s"] / 1e9)
    columns = {
        "engine": lambda row: row["engine"] + f" {row['weights']}" * (row["engine"] == OWN),
        "reads": of("sparse"),
        "prompt": of("tokens", ","),
        "once": of("concurrent"),
        "ms/tok": lambda row: f"{row['ms_per_token']:.1f}\n{grey(row['quartiles'], '.3g')}",
        "bound": of("bound_ms", ".1f"),
        "blocks": of("blocks_read", ".0%"),
        "KL": of("kl", ".3f"),
        "right": of("needles", ".0%"),
    }
    return [table(title_of(found), caption, found["rows"], columns, words=2)]
