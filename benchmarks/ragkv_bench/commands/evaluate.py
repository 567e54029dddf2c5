"""``ragkv eval``: its options."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragkv.errors import ConfigError
from ragkv_bench.commands import options

if TYPE_CHECKING:
    from ragkv import RagKV
    from ragkv_bench.data.examples import DataSet

DEFAULT_METHODS = "query,cacheclip,epic,reuse"


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
        typer.Option("--json", help="Write the result here; measurements beside it are kept."),
    ] = None,
    probe: Annotated[
        str | None,
        typer.Option(help="Instead: copies, abstention (also of --data), aggregation, length."),
    ] = None,
    needles: Annotated[
        str | None,
        typer.Option(help="Instead of --data: single, multikey, multivalue, multiquery or all."),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            help="Needles, probes: comma-separated tokens of prompt and answer together.",
            show_default="needles: 4096; probes: 2048; length: 4096,8192,16384,32768",
        ),
    ] = None,
    haystack: Annotated[
        Path | None, typer.Option(help="Needles, probes: the text; default: Python's reference.")
    ] = None,
    history: Annotated[
        bool,
        typer.Option(
            "--history", help="Instead: so many requests (200) over recurring chunks, in a row."
        ),
    ] = False,
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
    if probe is None and (data is None) == (needles is None):
        raise ConfigError("give one of --data FILE, --needles KIND and --probe NAMES")
    options.refuse(
        context,
        {
            "without --needles or --probe": () if needles or probe else ("tokens", "haystack"),
            "with --history": ("needles", "time_in_turn") if history else (),
            "with --probe": ("needles", "history", "time_in_turn") if probe is not None else (),
        },
    )
    options.check_folders(json_path)
    from ragkv_bench.data.examples import read_data
    from ragkv_bench.data.needles import read_haystack
    from ragkv_bench.methods import named
    from ragkv_bench.quality.records import records_path
    from ragkv_bench.quality.run import evaluate
    from ragkv_bench.quality.summary import table

    examples = None if data is None else read_data(data)
    names = options.parts_of(DEFAULT_METHODS if methods is None else methods)
    ratios, lengths = options.ratios_of(ratio), options.lengths_of(tokens)
    with options.engine(model, auxiliary_model, device=device, dtype=dtype) as kv:
        if history and examples is not None:
            one = names[:1] if methods is None else names
            if len(one) != 1 or len(ratios) != 1:
                raise ConfigError("--history takes one method and one ratio")
            from ragkv_bench.quality import history as recurring

            plan = recurring.HistoryPlan(requests=limit or 200, seed=seed)
            with options.interruptible(None):
                found = recurring.evaluate_history(
                    kv, examples, plan, method=named(one[0]), ratio=ratios[0], show_progress=True
                )
            options.finish(found, [recurring.table(found)], json_path)
            return
        how: Any = {
            "methods": [named(name) for name in names],
            "ratios": ratios,
            "records": records_path(json_path) if json_path else None,
            "show_progress": True,
        }
        if probe is not None:
            from ragkv_bench.probes import run
            from ragkv_bench.probes.sets import probe_sets

            parts, text = options.parts_of(probe), read_haystack(haystack)
            made = probe_sets(kv, parts, text, lengths, count=limit or 20, seed=seed, data=examples)
            with options.interruptible(json_path):
                found = run.evaluate_probes(kv, made, **how)
            options.finish(found, [run.table(found)], json_path)
            return
        if examples is None:
            text = read_haystack(haystack)
            examples = _needles(kv, needles or "", lengths or [4096], limit or 20, seed, text)
        with options.interruptible(json_path):
            picked = examples.pick(None if needles else limit, seed)
            evaluation = evaluate(kv, picked, seed=seed, time_in_turn=time_in_turn, **how)
    options.finish(evaluation.to_dict(), [table(evaluation)], json_path)


def _needles(
    kv: RagKV, kinds: str, lengths: Sequence[int], count: int, seed: int, text: str
) -> DataSet:
    from ragkv_bench.data.examples import DataSet
    from ragkv_bench.data.needles import KINDS, build_needles

    names = KINDS if kinds == "all" else tuple(dict.fromkeys(options.parts_of(kinds)))
    if not names:
        raise ConfigError(f"--needles takes {', '.join(KINDS)} or all")
    made = [
        example
        for tokens in lengths
        for kind in names
        for example in build_needles(text, kv.tokenizer, kind, tokens, count=count, seed=seed)
    ]
    name = kinds if kinds == "all" else "-".join(names)
    return DataSet(f"needles-{name}-{'-'.join(map(str, lengths))}", tuple(made))
