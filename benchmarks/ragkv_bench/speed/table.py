"""What a benchmark found, read again and as tables for people, which fit 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from ragkv_bench.results import cell, reading, short_name, table

Found = dict[str, Any]
"""What a command writes as JSON, or one of its rows."""
PERCENTS = (50, 90, 99)
_TTFT = (
    "Medians over {rounds} rounds, full prefill and ragkv in turn; grey: quartiles. "
    "bound: the least that computing these tokens costs at full prefill's rates. eff.: of the "
    "time taken, the bound's share. MB: peak memory above that before the request."
)
_ANSWER = (
    "Medians over {rounds} rounds, transformers' generate and ragkv in turn; grey: quartiles. "
    "Answers go on past an end of text."
)
_INGEST = (
    "Medians over {rounds} rounds, in turn. share: of the model's plain prefill rate; "
    "grey: quartiles."
)
_LOAD = (
    "p50/p90/p99 in seconds: first token, milliseconds between tokens, whole answer. cached: of "
    "the prompt tokens, as the endpoint counts them."
)


def read(path: Path, command: str, key: str) -> Found:
    """Return what a command wrote, whose rows all have ``key``.

    Raises
    ------
    ConfigError
        The file cannot be read or is not by the command.
    """
    with reading(path, f"{{path}} is not by `{command}`: {{error!r}}") as saved:
        for row in saved["rows"]:
            row[key]
        found: Found = saved
    return found


def title_of(found: Found) -> str:
    """Return the model, without the way to it, and its device."""
    return f"{short_name(found['model'])} on {found['device']}"


def setting_name(row: Found) -> str:
    """Return how tables and pictures name a row's setting; a full prefill has no ratio."""
    return "full" if row["method"] == "full" else f"{row['method']} {row['ratio']:g}"


def ttft_tables(found: Found) -> list[Table]:
    """Return the speed-ups, the steps, and the peers if there are any."""
    rows, peers = found["rows"], found["peers"]
    names = dict.fromkeys(name for row in rows for name in row["steps"] if name != "wait")
    speedups, steps = [], []
    for row in rows:
        name, tokens = escape(setting_name(row)), str(row["prompt_tokens"])
        speedups.append(
            (
                name,
                row["tier"],
                tokens,
                f"{row['full_s']:.3g}",
                f"{row['ragkv_s']:.3g}",
                f"{row['speedup']:.1f}x\n{_grey(row, '.1f')}",
                f"{row['full_s'] / row['bound_s']:.1f}x",
                f"{row['efficiency']:.0%}",
                cell(row["peak_bytes"] and row["peak_bytes"] / 1e6, ".0f"),
            )
        )
        times = [1000 * row["steps"].get(step, 0.0) for step in names]
        shown = (f"{time:.1f}" if time < 100 else f"{time:.0f}" for time in times)
        steps.append((f"{name} {row['tier']}", tokens, *shown))
    heads = ("method", "from", "tokens", "full s", "ragkv s", "speed-up", "bound", "eff.", "MB")
    caption = _TTFT.format(rounds=max(row["rounds"] for row in rows))
    tables = [_table(title_of(found), caption, heads, speedups, words=2)]
    columns = ["method", "tokens", *(name.replace("_", "\n") for name in names)]
    tables.append(_table("Steps", "Of the median round, in milliseconds.", columns, steps))
    if peers:
        tables.append(_peers(peers))
    return tables


def _peers(peers: Sequence[Found]) -> Table:
    cells = [
        (
            escape(peer["name"]),
            escape(peer["against"]),
            str(peer["tokens"]),
            f"{peer['ttft_s']:.3g}",
            f"{peer['speedup']:.1f}x {_grey(peer, '.1f')}",
        )
        for peer in peers
    ]
    caption = "speed-up: of ragkv's first token over the engine's; grey: quartiles."
    heads = ("engine", "against", "tokens", "seconds", "speed-up")
    return _table("Other engines on the same prompts", caption, heads, cells, words=2)


def answer_tables(found: Found) -> list[Table]:
    """Return the one table of ``ragkv bench answer``, peers in it; all against transformers."""
    cells: list[tuple[str, ...]] = []
    ends: list[int] = []

    def add(name: str, row: Found, steps: str, speedup: str) -> None:
        lengths = f"{row['tokens']:,}", f"{row['answer_tokens']:,}"
        first, total = f"{row['ttft_s']:.3g}", f"{row['total_s']:.3g}"
        ms = f"{row['ms_per_token']:.1f}"
        cells.append((escape(name), *lengths, first, ms, steps, total, speedup))

    for length in dict.fromkeys(map(_length, found["rows"])):
        own = [row for row in found["rows"] if _length(row) == length]
        full = {time: own[0][f"full_{time}"] for time in ("ttft_s", "ms_per_token", "total_s")}
        add("transformers", own[0] | full, "1.00", "1.0x")
        for row in own:
            speedup = f"{row['speedup_total']:.1f}x\n{_grey(row, '.1f')}"
            add(setting_name(row), row, f"{row['tokens_per_step']:.2f}", speedup)
        for row in found["peers"]:
            if _length(row) == length:
                add(row["name"], row, "-", f"{full['total_s'] / row['total_s']:.1f}x")
        ends.append(len(cells) - 1)
    caption = _ANSWER.format(rounds=max(row["rounds"] for row in found["rows"]))
    heads = ("method", "prompt", "answer", "first s", "ms/tok", "tok/step", "total s", "speed-up")
    shown = _table(title_of(found), caption, heads, cells)
    for end in ends:
        shown.rows[end].end_section = True
    return [shown]


def ingest_table(found: Found) -> Table:
    """Return the one table of ``ragkv bench ingest``."""
    cells = (
        found["codec"],
        f"{found['prefill_tokens_s']:,.0f}",
        f"{found['ingest_tokens_s']:,.0f}",
        f"{found['share']:.0%}",
        _grey(found, ".0%"),
        f"{found['bytes_per_token']:,.0f}",
    )
    title = f"{title_of(found)}, {found['chunks']} chunks, {found['tokens']:,} tokens"
    caption = _INGEST.format(rounds=found["rounds"])
    heads = ("codec", "prefill tokens/s", "ingest tokens/s", "share", "", "bytes/token")
    return _table(title, caption, heads, [cells])


def load_table(results: Sequence[Found]) -> Table:
    """Return one table: a row for all requests of each engine, and one a turn."""
    cells = []
    for result in results:
        for row in result["rows"]:
            everything = row["turns"] == "all"
            cells.append(
                (
                    escape(result["name"]) if everything else "",
                    row["turns"],
                    _percentiles(row, "ttft", 1),
                    _percentiles(row, "inter_token", 1000),
                    _percentiles(row, "answer", 1),
                    f"{row['tokens_per_s']:.1f}" if everything else "",
                    f"{row['requests_per_s']:.2f}" if everything else "",
                    f"{row['errors']}/{row['requests']}",
                    f"{row['cached_share']:.0%}",
                )
            )
    heads = ("engine", "turns", "first token", "ms/token", "answer", "tok/s", "req/s", "err")
    shown = _table(load_title(results), _LOAD, (*heads, "cached"), cells, words=2)
    shown.columns[0].no_wrap = False
    return shown


def load_title(results: Sequence[Found]) -> str:
    """Say how requests came."""
    shapes = (
        f"{one['rate']:g} requests a second"
        if one["clients"] is None
        else f"{one['clients']} client{'s' * (one['clients'] != 1)}"
        for one in results
    )
    return "; ".join(dict.fromkeys(shapes))


def _table(
    title: str,
    caption: str,
    heads: Sequence[str],
    cells: Iterable[Sequence[str]],
    words: int = 1,
) -> Table:
    columns = {head: itemgetter(index) for index, head in enumerate(heads)}
    return table(title, caption, cells, columns, words=words)


def _length(row: Found) -> tuple[int, int]:
    return row["tokens"], row["answer_tokens"]


def _percentiles(row: Found, name: str, scale: int) -> str:
    values = (row[f"{name}_p{percent}_s"] for percent in PERCENTS)
    return "\n".join(cell(value and value * scale, ".3g") for value in values)


def _grey(row: Found, form: str) -> str:
    """Return the quartiles in grey."""
    low, high = row["quartiles"]
    return f"[bright_black]{low:{form}}-{high:{form}}[/]"
