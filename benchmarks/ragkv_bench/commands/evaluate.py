"""``ragkv eval``: its options."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from ragkv.errors import ConfigError
from ragkv_bench.commands import options
from ragkv_bench.results import show, write

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ragkv import RagKV
    from ragkv.select import Method
    from ragkv_bench.data.examples import DataSet
    from ragkv_bench.quality.records import Ratio
    from ragkv_bench.quality.summary import Evaluation

DEFAULT_METHODS = "query,cacheclip,epic,reuse"
_OF_NEEDLES = ("tokens", "haystack", "needle_values")
_NOT_OF_HISTORY = ("needles", "chart", "plot", "resume", "time_in_turn")
_MEASURING = ("model", "methods", "ratio", "limit", "seed", "json_path", "strict", "resume")


def evaluate_command(
    context: typer.Context,
    *,
    data: Annotated[
        Path | None, typer.Option(help="JSONL of examples; its form: docs/evaluation.md.")
    ] = None,
    model: options.Model = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated: ragkv's methods, prophetkv, agentkvshift.",
            show_default=DEFAULT_METHODS,
        ),
    ] = None,
    ratio: Annotated[
        str, typer.Option(help="Comma-separated shares to recompute, or auto.")
    ] = "0.2",
    limit: options.Limit = None,
    seed: Annotated[int, typer.Option(help="Draws examples, needles and intervals.")] = 0,
    json_path: Annotated[
        Path | None,
        typer.Option("--json", help="Write the result here; an interrupted run is resumed."),
    ] = None,
    plot: options.Plot = None,
    chart: options.Chart = None,
    needles: Annotated[
        str | None,
        typer.Option(help="Instead of --data: single, multikey, multivalue, multiquery or all."),
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=1, help="Needles: tokens of prompt and answer together.")
    ] = 4096,
    haystack: Annotated[
        Path | None, typer.Option(help="Needles: the text; default: Python's reference.")
    ] = None,
    needle_values: Annotated[
        str, typer.Option(help="Needles: numbers, words or uuids are hidden.")
    ] = "numbers",
    history: Annotated[
        bool,
        typer.Option(
            "--history", help="Instead: so many requests (200) over recurring chunks, in a row."
        ),
    ] = False,
    strict: options.Strict = True,
    resume: options.Resume = None,
    time_in_turn: Annotated[
        bool,
        typer.Option(
            "--time-in-turn/--time-once",
            help="A full prefill before every method's, or one an example (faster).",
        ),
    ] = True,
    auxiliary_model: options.AuxiliaryModel = None,
    device: options.Device = None,
    dtype: options.DType = None,
) -> None:
    """Compare methods with full attention: answers, fidelity and time to first token."""
    from ragkv_bench.quality.summary import Evaluation

    if sum(option is not None for option in (data, needles, chart)) != 1:
        raise ConfigError("give one of --data FILE, --needles KIND and --chart FILE")
    options.refuse(
        context,
        {
            "without --needles": () if needles is not None else _OF_NEEDLES,
            "with --chart": () if chart is None else (*_MEASURING, "time_in_turn"),
            "without --json": () if json_path is not None else ("resume",),
            "with --history": _NOT_OF_HISTORY if history else (),
        },
    )
    options.check_places(json_path, plot=plot)
    if chart is not None:
        _show(Evaluation.load(chart), plot)
        return

    from ragkv_bench.methods import named
    from ragkv_bench.quality.records import records_path
    from ragkv_bench.quality.run import evaluate

    examples = None if data is None else options.read_examples(data, strict=strict)
    chosen = [named(name) for name in options.parts_of(methods or DEFAULT_METHODS)]
    ratios = options.ratios_of(ratio)
    with options.engine(model, auxiliary_model, seed, device=device, dtype=dtype) as kv:
        if history and examples is not None:
            asked = chosen if methods is not None else chosen[:1]
            _history(kv, examples, asked, ratios, limit or 200, seed, json_path)
            return
        if examples is not None:
            examples = examples.pick(limit, seed)
        else:
            kinds, count = needles or "", 20 if limit is None else limit
            examples = _build(kinds, kv.tokenizer, tokens, count, seed, haystack, needle_values)
        with options.interruptible(json_path):
            evaluation = evaluate(
                kv,
                examples,
                methods=chosen,
                ratios=ratios,
                seed=seed,
                records=records_path(json_path) if json_path else None,
                resume=resume,
                strict=strict,
                time_in_turn=time_in_turn,
                show_progress=True,
            )
    if json_path is not None:
        evaluation.save(json_path)
    _show(evaluation, plot)


def _history(
    kv: RagKV,
    data: DataSet,
    methods: Sequence[str | Method],
    ratios: Sequence[Ratio],
    requests: int,
    seed: int,
    json_path: Path | None,
) -> None:
    from ragkv_bench.quality.history import HistoryPlan, evaluate_history, table

    if len(methods) != 1 or len(ratios) != 1:
        raise ConfigError("--history takes one method and one ratio")
    plan = HistoryPlan(requests=requests, seed=seed)
    with options.interruptible(None):
        found = evaluate_history(
            kv, data, plan, method=methods[0], ratio=ratios[0], show_progress=True
        )
    if json_path is not None:
        write(json_path, found)
    show([table(found)])


def _build(
    kinds: str,
    tokenizer: PreTrainedTokenizerBase,
    tokens: int,
    count: int,
    seed: int,
    haystack: Path | None,
    values: str,
) -> DataSet:
    from ragkv_bench.data.examples import DataSet
    from ragkv_bench.data.needles import (
        NeedleKind,
        NeedleSpec,
        build_needles,
        default_haystack,
        read_haystack,
    )

    known = get_args(NeedleKind)
    names = known if kinds == "all" else tuple(dict.fromkeys(options.parts_of(kinds)))
    if not names:
        raise ConfigError(f"--needles takes {', '.join(known)} or all")
    text = default_haystack() if haystack is None else read_haystack(haystack)
    specs = [NeedleSpec(kind, tokens, values=values) for kind in names]  # type: ignore[arg-type]
    made = [build_needles(text, tokenizer, spec, count=count, seed=seed) for spec in specs]
    kind = kinds if kinds == "all" else "-".join(names)
    return DataSet(f"needles-{kind}-{tokens}", tuple(example for each in made for example in each))


def _show(evaluation: Evaluation, plot: Path | None) -> None:
    from ragkv_bench.quality.show import chart, table

    show([table(evaluation)], plot, lambda: chart(evaluation))
