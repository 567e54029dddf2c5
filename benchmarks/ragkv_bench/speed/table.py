"""The tables of a benchmark, for people; they fit 80 columns."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from ragkv_bench.speed.ingest import Ingestion
from ragkv_bench.speed.result import (
    AnswerBenchmark,
    AnswerRow,
    Benchmark,
    BenchRow,
    setting_name,
)
from ragkv_bench.speed.speculate import SpeculateBenchmark

_CAPTION = (
    "Medians over {rounds} rounds, full prefill and ragkv in turn; grey: quartiles. "
    "bound: the least that computing these tokens costs at full prefill's rates. eff.: of the "
    "time taken, the bound's share. MB: peak memory above that before the request."
)
_STEPS = "Of the median round, in milliseconds."


def tables(benchmark: Benchmark) -> list[Table]:
    """Return the speed-ups, the steps, and the peers if there are any."""
    found = [_speedups(benchmark), _steps(benchmark)]
    return [*found, _peers(benchmark)] if benchmark.peers else found


def _table(title: str, caption: str, *columns: str, names: int) -> Table:
    """Return an empty table whose first ``names`` columns are words."""
    out = Table(
        title=escape(title),
        caption=caption,
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for index, column in enumerate(columns):
        out.add_column(column, justify="left" if index < names else "right", no_wrap=True)
    return out


def _speedups(benchmark: Benchmark) -> Table:
    rounds = max(row.rounds for row in benchmark.rows)
    out = _table(
        f"{benchmark.model_name} on {benchmark.device}",
        _CAPTION.format(rounds=rounds),
        *("method", "from", "tokens", "full s", "ragkv s", "speed-up", "bound", "eff.", "MB"),
        names=2,
    )
    for row in benchmark.rows:
        low, high = row.quartiles
        out.add_row(
            _name(row),
            row.tier,
            str(row.prompt_tokens),
            f"{row.full_s:.3g}",
            f"{row.ragkv_s:.3g}",
            f"{row.speedup:.1f}x\n[bright_black]{low:.1f}-{high:.1f}[/]",
            f"{row.full_s / row.bound_s:.1f}x",
            f"{row.efficiency:.0%}",
            "-" if row.peak_bytes is None else f"{row.peak_bytes / 1e6:.0f}",
        )
    return out


def _steps(benchmark: Benchmark) -> Table:
    names = list(dict.fromkeys(name for row in benchmark.rows for name in row.steps))
    names = [name for name in names if name != "wait"]
    headings = [name.replace("_", "\n") for name in names]
    out = _table("Steps", _STEPS, "method", "tokens", *headings, names=1)
    for row in benchmark.rows:
        times = [row.steps.get(name, 0.0) for name in names]
        out.add_row(f"{_name(row)} {row.tier}", str(row.prompt_tokens), *map(_milliseconds, times))
    return out


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f}" if seconds < 0.1 else f"{1000 * seconds:.0f}"


def _peers(benchmark: Benchmark) -> Table:
    out = _table(
        "Other engines on the same prompts",
        "speed-up: of ragkv's first token over the engine's; in brackets: quartiles.",
        *("engine", "against", "tokens", "seconds", "speed-up"),
        names=2,
    )
    for peer in benchmark.peers:
        low, high = peer.quartiles
        out.add_row(
            escape(peer.name),
            escape(peer.against),
            str(peer.tokens),
            f"{peer.ttft_s:.3g}",
            f"{peer.speedup:.1f}x [bright_black]({low:.1f}-{high:.1f})[/]",
        )
    return out


def _name(row: BenchRow | AnswerRow) -> str:
    return escape(setting_name(row))


def answer_tables(benchmark: AnswerBenchmark) -> list[Table]:
    """Return the one table of ``ragkv bench answer``, peers in it."""
    out = _table(
        f"{benchmark.model_name} on {benchmark.device}",
        f"Medians over {max(row.rounds for row in benchmark.rows)} rounds, transformers' generate "
        "and ragkv in turn; grey: quartiles. Answers go on past an end of text.",
        *("method", "prompt", "answer", "first s", "ms/tok", "tok/step", "total s", "speed-up"),
        names=1,
    )
    lengths = list(dict.fromkeys((row.tokens, row.answer_tokens) for row in benchmark.rows))
    for length in lengths:
        own = [row for row in benchmark.rows if (row.tokens, row.answer_tokens) == length]
        others = [peer for peer in benchmark.peers if (peer.tokens, peer.answer_tokens) == length]
        sizes = [f"{number:,}" for number in length]
        full = own[0]
        times = full.full_ttft_s, full.full_ms_per_token, 1.0, full.full_total_s
        out.add_row("transformers", *sizes, *_answer_times(*times), "1.0x")
        for row in own:
            low, high = row.quartiles
            times = row.ttft_s, row.ms_per_token, row.tokens_per_step, row.total_s
            quartiles = f"[bright_black]{low:.1f}-{high:.1f}[/]"
            speedup = f"{row.speedup_total:.1f}x\n{quartiles}"
            out.add_row(_name(row), *sizes, *_answer_times(*times), speedup)
        for peer in others:
            times = peer.ttft_s, peer.ms_per_token, 0.0, peer.total_s
            behind = f"{full.full_total_s / peer.total_s:.1f}x"
            out.add_row(escape(peer.name), *sizes, *_answer_times(*times), behind)
        out.add_section()
    return [out]


def _answer_times(ttft: float, ms: float, per_step: float, total: float) -> tuple[str, ...]:
    steps = f"{per_step:.2f}" if per_step else "-"
    return f"{ttft:.3g}", f"{ms:.1f}", steps, f"{total:.3g}"


def speculate_table(found: SpeculateBenchmark) -> Table:
    """Return the one table of ``ragkv bench speculate``."""
    table = _table(
        f"{found.model_name} on {found.device}",
        f"Seconds from the question to the first token, medians over {found.rows[0].requests} "
        "questions, in turn; grey: quartiles. overlap: seconds computed when the prompt came. "
        "used: of the speculations begun. wasted: seconds computed for nothing, in all.",
        *("retrieval s", "plain s", "ahead s", "speed-up", "", "overlap", "used", "wasted"),
        names=0,
    )
    for row in found.rows:
        low, high = row.quartiles
        table.add_row(
            f"{row.retrieval_s:g}",
            f"{row.plain_ttft_s:.3f}",
            f"{row.ttft_s:.3f}",
            f"{row.speedup:.2f}x",
            f"[bright_black]{low:.2f}-{high:.2f}[/]",
            f"{row.overlap_s:.3f}",
            f"{row.used} / {row.started}",
            f"{row.wasted_s:.2f}",
        )
    return table


def ingest_table(found: Ingestion) -> Table:
    """Return the one table of ``ragkv bench ingest``."""
    table = _table(
        f"{found.model_name} on {found.device}, {found.chunks} chunks, {found.tokens:,} tokens",
        f"Medians over {found.rounds} rounds, in turn. share: of the model's plain prefill rate; "
        "grey: quartiles.",
        "codec", "prefill tokens/s", "ingest tokens/s", "share", "", "bytes/token",
        names=1,
    )  # fmt: skip
    low, high = found.quartiles
    table.add_row(
        found.codec,
        f"{found.prefill_tokens_s:,.0f}",
        f"{found.ingest_tokens_s:,.0f}",
        f"{found.share:.0%}",
        f"[bright_black]{low:.0%}-{high:.0%}[/]",
        f"{found.bytes_per_token:,.0f}",
    )
    return table
