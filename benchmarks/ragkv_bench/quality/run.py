"""Methods x ratios x examples: answer, fidelity and time of each, and their summary."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm.auto import tqdm

from ragkv.errors import ConfigError, PromptTooLongError
from ragkv.prompt.find import is_registrable
from ragkv.select import Method, get_method
from ragkv_bench.data.examples import DataSet
from ragkv_bench.data.tasks import chunk_texts
from ragkv_bench.quality.records import EvalRecord, Ratio, RecordFile, ratio_name
from ragkv_bench.quality.subject import FULL, Setting, Subject
from ragkv_bench.quality.summary import Evaluation, summarise

if TYPE_CHECKING:
    from ragkv import RagKV

_log = logging.getLogger(__name__)


def grid(methods: Sequence[str | Method], ratios: Sequence[Ratio]) -> list[Setting]:
    """Return the (method, ratio) pairs to measure: ``full`` first, each once.

    A method that chooses no tokens is listed once: at 1 if it reuses nothing, else at 0.
    ``"auto"`` is listed for methods that can choose a ratio.

    Raises UnknownMethodError: a method does not exist; ConfigError: no method is named, two have
    one name, or one needs a ratio and none that it can use is given.
    """
    if not methods:
        raise ConfigError("name at least one method to evaluate")
    out: list[Setting] = [(FULL, 1.0)]
    known = {FULL: get_method(FULL)}
    for name in methods:
        method = get_method(name)
        if known.setdefault(method.name, method) != method:
            raise ConfigError(f"two methods are called {method.name}: results go by the name")
        usable = [ratio for ratio in ratios if ratio != "auto" or method.auto]
        if method.score is None:
            usable = [1.0 if method.reuse == "none" else 0.0]
        if not usable:
            why = ": it cannot choose for 'auto'" if ratios else ""
            raise ConfigError(f"method {method.name} needs at least one ratio{why}")
        out.extend((name, ratio if ratio == "auto" else float(ratio)) for ratio in usable)
    return list({(get_method(name).name, ratio): (name, ratio) for name, ratio in out}.values())


def usable(kv: RagKV, methods: Sequence[str | Method], ratios: Sequence[Ratio]) -> list[Setting]:
    """Return :func:`grid`; ConfigError where the engine takes no such ratio."""
    settings = grid(methods, ratios)
    for method, ratio in settings:
        kv.reuse.override(method=method, recompute_ratio=ratio)
    return settings


def check_chunks(data: DataSet) -> None:
    """Say in the log how many examples show nothing of reuse: none of their chunks is cached.

    Raises ConfigError: all of them.
    """
    count = sum(not any(map(is_registrable, chunk_texts(each))) for each in data.examples)
    if count and count == len(data.examples):
        raise ConfigError(f"no chunk of {data.name} is long enough to be reused")
    if count:
        _log.warning(
            "%d of %d examples of %s have no chunk that is long enough to be reused: every"
            " method computes them in full",
            count,
            len(data.examples),
            data.name,
        )


def evaluate(
    kv: RagKV,
    data: DataSet,
    *,
    methods: Sequence[str | Method],
    ratios: Sequence[Ratio] = (0.2,),
    seed: int = 0,
    records: str | Path | None = None,
    time_in_turn: bool = True,
    show_progress: bool = False,
) -> Evaluation:
    """Measure methods against full prefill on a data set.

    Each example's chunks are precomputed behind the head of its task's prompt.

    Parameters
    ----------
    methods, ratios
        As in :class:`ragkv.ReuseConfig`; ``full`` is always measured too.
    seed
        Of the bootstrap intervals.
    records
        JSONL of single measurements: those of this code, model and example are not repeated.
    time_in_turn
        Measure a full prefill before every method's, not one an example, so that both
        see the same state of the machine.

    Raises ConfigError: a method or ratio does not exist, no chunk is long enough to be reused, or
    no example could be measured.
    """
    settings = usable(kv, methods, ratios)
    check_chunks(data)
    how = {"time_in_turn": time_in_turn, "show_progress": show_progress}
    done = measurements(kv, data, settings, RecordFile(records), **how)
    measured = len({record.id for record in done})
    return Evaluation(kv.info.name, data.name, measured, summarise(done, seed=seed))


def measurements(
    kv: RagKV,
    data: DataSet,
    settings: Sequence[Setting],
    file: RecordFile,
    *,
    show_progress: bool = False,
    **how: bool,
) -> list[EvalRecord]:
    """Return the records of all settings, measuring those that the file does not have.

    ``how`` are the options of :class:`ragkv_bench.quality.subject.Subject`.

    Examples whose prompts exceed the model's positions are left out, with a warning. Raises
    ConfigError where none is left.
    """
    methods = list(dict.fromkeys(method for method, _ in settings))
    bar = tqdm(total=len(data.examples) * len(settings), disable=not show_progress, desc=data.name)
    done: list[EvalRecord] = []
    with bar:
        for example in data.examples:
            subject = Subject(kv, example, methods, **how)
            try:
                for method, ratio in settings:
                    name = f"{get_method(method).name} {ratio_name(ratio)}"
                    bar.set_postfix_str(name, refresh=False)
                    key = subject.key(method, ratio)
                    record = file.get(key)
                    if record is None:
                        record = subject.measure(method, ratio)
                        file.add(record)
                    done.append(record)
                    bar.update()
            except PromptTooLongError as error:
                done = [record for record in done if record.id != example.id]
                _log.warning("example %s is skipped: %s", example.id, error)
    if not done:
        raise ConfigError(f"no example of {data.name} fits the model")
    return done
