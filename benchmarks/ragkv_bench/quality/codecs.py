"""Codecs side by side: what they lose, what they take, how fast they load.

Every codec has its own store in a temporary folder, from which every request loads
again. A codec's loss is measured against the raw entries under the same method and
ratio, along the full prefill's greedy answer (see :mod:`ragkv_bench.quality.fidelity`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm.auto import tqdm

from ragkv.config import StoreConfig
from ragkv.errors import ConfigError, PromptTooLongError
from ragkv.select import get_method, independent
from ragkv_bench.data.examples import DataSet, Example
from ragkv_bench.data.prompts import chunk_texts, prompt, template
from ragkv_bench.data.tasks import TASKS
from ragkv_bench.quality.bootstrap import ratio_of_sums
from ragkv_bench.quality.fidelity import compared, followed, reference
from ragkv_bench.quality.records import Ratio
from ragkv_bench.quality.run import check_chunks, grid
from ragkv_bench.quality.scores import score
from ragkv_bench.quality.subject import FULL, Setting
from ragkv_bench.results import Saved

if TYPE_CHECKING:
    from ragkv import RagKV

RAW = "raw"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CodecRow:
    """One codec under one method and ratio, over all examples.

    Attributes
    ----------
    bytes_per_token
        Bytes of the entries, headers included, for each token.
    load_s
        Seconds to load 1,000 tokens from files in the page cache.
    kl_raw
        Mean of ``KL(raw || codec)``, in nats.
    kl, agreement
        To full attention, as in :class:`ragkv_bench.quality.summary.SummaryRow`.
    score
        Mean task score.
    retention
        The score as a share of raw's; None where raw scores nothing.
    """

    codec: str
    method: str
    ratio: Ratio
    bytes_per_token: float
    load_s: float
    kl_raw: float
    kl: float
    agreement: float
    score: float
    retention: float | None


@dataclass(frozen=True, slots=True)
class CodecComparison(Saved):
    """What ``ragkv eval --codec`` writes."""

    data: str
    examples: int
    rows: tuple[CodecRow, ...]


@dataclass(frozen=True, slots=True)
class _Seen:
    """One example under one codec and setting."""

    codec: str
    setting: Setting
    nbytes: int
    stored_tokens: int
    load_s: float
    loaded_tokens: int
    kl_raw: float
    kl: float
    agreement: float
    score: float


def compare_codecs(
    kv: RagKV,
    data: DataSet,
    codecs: Sequence[str],
    *,
    methods: Sequence[str],
    ratios: Sequence[Ratio] = (0.2,),
    strict: bool = True,
    show_progress: bool = False,
) -> CodecComparison:
    """Measure codecs on a data set; ``raw`` is always measured, first.

    Parameters
    ----------
    kv
        Gives model and settings; its store is not touched.
    methods, ratios
        As in :class:`ragkv.ReuseConfig`; methods that store no chunks are refused.
    strict
        As in :func:`ragkv_bench.quality.run.evaluate`.

    Raises
    ------
    ConfigError
        A codec, method or ratio does not exist, there is no example, or no chunk is long
        enough to be stored.
    MissingDependencyError
        A codec needs a package that is not installed.
    PromptTooLongError
        See ``strict``.
    """
    for method in methods:
        if not get_method(method).uses_chunks:
            raise ConfigError(f"method {method} stores no chunks that a codec could change")
    settings = [setting for setting in grid(methods, ratios) if setting[0] != FULL]
    if not data.examples:
        raise ConfigError(f"no example in {data.name}")
    check_chunks(data)
    names = list(dict.fromkeys([RAW, *codecs]))
    seen: list[_Seen] = []
    left_out = 0
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="ragkv-codecs-")))
        stores = {
            name: StoreConfig(folder / name, memory_bytes=0, device_bytes=0, codec=name)
            for name in names
        }
        engines = {name: stack.enter_context(_like(kv, store)) for name, store in stores.items()}
        for example in tqdm(data.examples, desc=data.name, disable=not show_progress):
            try:
                seen += _measured(engines, example, settings)
            except PromptTooLongError as error:
                if strict:
                    raise
                _log.warning("example %s is skipped: %s", example.id, error)
                left_out += 1
    if not seen:
        raise ConfigError(f"no example of {data.name} fits the model")
    rows = [_row(name, setting, seen) for setting in settings for name in names]
    return CodecComparison(kv.model_name, data.name, len(data.examples) - left_out, tuple(rows))


def _like(kv: RagKV, store: StoreConfig) -> RagKV:
    """Return an engine of the same model over another store, which always loads from it."""
    from ragkv import RagKV

    return RagKV(kv.loaded, store=store, reuse=kv.reuse.override(load="always"))


def _measured(
    engines: dict[str, RagKV], example: Example, settings: Sequence[Setting]
) -> Iterator[_Seen]:
    chat = bool(engines[RAW].tokenizer.chat_template)
    asked, texts = prompt(example, chat=chat), chunk_texts(example)
    sink = engines[RAW].sink_from(template(example.task, chat=chat))
    length = TASKS[example.task].length(example.id)
    full = reference(engines[RAW], engines[RAW].prefill(asked, method=FULL, sink=sink))
    for method, ratio in settings:
        given = independent(method)
        overrides: dict[str, Any] = {"method": given, "recompute_ratio": ratio, "sink": sink}
        raw = None
        for name, engine in engines.items():
            stored = engine.precompute(texts, sink=sink, method=method)
            prefilled = engine.prefill(asked, **overrides)
            report = prefilled.report
            rows = followed(engine, prefilled, full)
            raw = raw or rows
            near = compared(rows, full)
            answer = engine.generate(asked, max_new_tokens=length, **overrides).text
            for text in texts:
                engine.forget(text)
            yield _Seen(
                codec=name,
                setting=(method, ratio),
                nbytes=stored.bytes,
                stored_tokens=stored.tokens,
                load_s=report.steps["load"],
                loaded_tokens=report.reused_tokens + report.recomputed_tokens,
                kl_raw=compared(rows, raw).kl,
                kl=near.kl,
                agreement=near.agreement,
                score=score(example, answer).value,
            )


def _row(codec: str, setting: Setting, seen: Sequence[_Seen]) -> CodecRow:
    mine = [one for one in seen if (one.codec, one.setting) == (codec, setting)]
    raw = [one.score for one in seen if (one.codec, one.setting) == (RAW, setting)]

    def total(name: str) -> float:
        return float(sum(getattr(one, name) for one in mine))

    scores = np.array([one.score for one in mine])
    kept = float(ratio_of_sums(scores, np.array(raw)))
    return CodecRow(
        codec=codec,
        method=get_method(setting[0]).name,
        ratio=setting[1],
        bytes_per_token=total("nbytes") / total("stored_tokens"),
        load_s=1000 * total("load_s") / total("loaded_tokens"),
        kl_raw=total("kl_raw") / len(mine),
        kl=total("kl") / len(mine),
        agreement=total("agreement") / len(mine),
        score=float(scores.mean()),
        retention=None if np.isnan(kept) else kept,
    )
