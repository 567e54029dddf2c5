"""``ragkv eval``: its options."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from ragkv.cli.console import err, out
from ragkv.errors import ConfigError
from ragkv_bench.commands import options
from ragkv_bench.results import check_picture, show

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ragkv_bench.data.examples import DataSet
    from ragkv_bench.quality.records import Ratio
    from ragkv_bench.quality.summary import Evaluation

DEFAULT_METHODS = "query,cacheclip,epic,reuse"
_OF_NEEDLES = ("tokens", "haystack", "needle_values")
_OF_RUNS = ("resume", "time_in_turn")
_MEASURING = ("model", "methods", "ratio", "limit", "seed", "json_path", "strict")


def evaluate_command(
    context: typer.Context,
    *,
    data: Annotated[
        Path | None, typer.Option(help="JSONL of examples; its form: docs/evaluation.md.")
    ] = None,
    model: options.Model = None,
    methods: Annotated[
        str, typer.Option(help="Comma-separated: ragkv's methods, prophetkv, agentkvshift.")
    ] = DEFAULT_METHODS,
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
            "with --chart": () if chart is None else (*_MEASURING, *_OF_RUNS),
            "without --json": () if json_path is not None else ("resume",),
        },
    )
    options.check_folders(json_path, plot)
    check_picture(plot)
    if chart is not None:
        _show(Evaluation.load(chart), plot)
        return

    from ragkv import RagKV, ReuseConfig
    from ragkv_bench.methods import named
    from ragkv_bench.quality.records import records_path
    from ragkv_bench.quality.run import evaluate

    examples = read_examples(data, strict=strict) if data is not None else None
    with RagKV(
        model,
        store=":memory:",
        reuse=ReuseConfig(auxiliary_model=auxiliary_model, seed=seed),
        device=device,
        dtype=dtype,
    ) as kv:
        if examples is None:
            examples = _build(
                kv.tokenizer,
                needles or "",
                tokens=tokens,
                limit=limit,
                seed=seed,
                haystack=haystack,
                values=needle_values,
            )
        if data is not None:
            examples = examples.pick(limit, seed)
        try:
            evaluation = evaluate(
                kv,
                examples,
                methods=[named(name) for name in options.parts_of(methods)],
                ratios=ratios_of(ratio),
                seed=seed,
                records=records_path(json_path) if json_path else None,
                resume=resume,
                strict=strict,
                time_in_turn=time_in_turn,
                show_progress=True,
            )
        except KeyboardInterrupt:
            if json_path is not None:
                out.print("Interrupted. The same command goes on from here.")
            raise typer.Exit(130) from None
    if json_path is not None:
        evaluation.save(json_path)
    _show(evaluation, plot)


def read_examples(path: Path, *, strict: bool) -> DataSet:
    """Read a data set; the skipped lines are named on the standard error."""
    from ragkv_bench.data.examples import read_data

    data = read_data(path, strict=strict)
    for problem in data.problems:
        err.print(f"skipped: {problem}", markup=False, highlight=False, soft_wrap=True)
    return data


def _build(
    tokenizer: PreTrainedTokenizerBase,
    kinds: str,
    *,
    tokens: int,
    limit: int | None,
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

    text = read_haystack(haystack) if haystack is not None else default_haystack()
    names = (
        get_args(NeedleKind) if kinds == "all" else tuple(dict.fromkeys(options.parts_of(kinds)))
    )
    if not names:
        raise ConfigError(f"--needles takes {', '.join(get_args(NeedleKind))} or all")
    specs = [NeedleSpec(kind, tokens, values=values) for kind in names]  # type: ignore[arg-type]
    count = limit if limit is not None else 20
    examples = [
        example
        for spec in specs
        for example in build_needles(text, tokenizer, spec, count=count, seed=seed)
    ]
    kind = kinds if kinds == "all" else "-".join(names)
    return DataSet(f"needles-{kind}-{tokens}", tuple(examples))


def _show(evaluation: Evaluation, plot: Path | None) -> None:
    from ragkv_bench.quality.chart import chart
    from ragkv_bench.quality.table import table

    show([table(evaluation)], plot, lambda: chart(evaluation))


def ratios_of(text: str) -> list[Ratio]:
    """Return the ratios of a comma-separated option."""
    try:
        return ["auto" if part == "auto" else float(part) for part in options.parts_of(text)]
    except ValueError as error:
        raise ConfigError(f"--ratio takes numbers such as 0.1,0.2 or auto, not {text!r}") from error
