"""``ragkv plan``: the size of a corpus, and the bandwidth above which loading is faster.

Only the model's configuration is read. Loading wins if ``bytes / bandwidth < prefill``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ragkv.cli.console import out, say_json
from ragkv.cli.options import AsJson, ModelName
from ragkv.config import CODECS
from ragkv.errors import ConfigError, UnsupportedModelError
from ragkv.report.words import count

if TYPE_CHECKING:
    import torch

_IDS_AND_OFFSETS = 12


def plan_command(
    prefill_tps: Annotated[
        float, typer.Option(help="Prefill speed in tokens per second, from `ragkv bench ttft`.")
    ],
    model: ModelName = None,
    chunks: Annotated[int, typer.Option(min=1, help="Number of chunks.")] = 10_000,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens per chunk.")] = 400,
    disk_gbps: Annotated[float, typer.Option(help="Read bandwidth of the store, in GB/s.")] = 2.0,
    dtype: Annotated[
        str | None,
        typer.Option(help="The model's dtype.", show_default="its configuration's"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print a corpus's size by codec, its ingestion time, and where loading breaks even."""
    for name, value in (("--disk-gbps", disk_gbps), ("--prefill-tps", prefill_tps)):
        if not 0 < value < math.inf:
            raise ConfigError(f"{name} must be a number above 0, not {value:g}")
    from ragkv.model.default_model import DEFAULT_MODEL
    from ragkv.model.load import dtype_of
    from ragkv.store.entry.codecs import codec_of

    name = model or DEFAULT_MODEL
    layers, kv_heads, head_dim, found = _shape_of(name)
    runs_in = dtype_of(dtype) or found
    compute = tokens / prefill_tps
    rows: list[dict[str, Any]] = []
    for codec in CODECS:
        layer = codec_of(codec).size((2, kv_heads, tokens, head_dim), runs_in)
        nbytes = layers * layer + _IDS_AND_OFFSETS * tokens
        load = nbytes / (disk_gbps * 1e9)
        rows.append(
            {
                "codec": codec,
                "bytes_per_token": nbytes / tokens,
                "total_bytes": nbytes * chunks,
                "load_s": load,
                "break_even_gbps": nbytes / compute / 1e9,
                "loading_wins": load < compute,
            }
        )
    corpus = {
        "model": name,
        "dtype": str(runs_in).removeprefix("torch."),
        "chunks": chunks,
        "tokens": tokens,
        "disk_gbps": disk_gbps,
        "compute_s": compute,
        "ingestion_s": chunks * compute,
    }
    if as_json:
        say_json({**corpus, "codecs": rows})
        return
    table = Table("codec", "bytes/token", "store GB", "load ms", "compute ms", "loading wins above")
    for row in rows:
        table.add_row(
            row["codec"],
            f"{row['bytes_per_token']:,.0f}",
            f"{row['total_bytes'] / 1e9:,.2f}",
            f"{row['load_s'] * 1e3:,.1f}",
            f"{compute * 1e3:,.1f}",
            f"{row['break_even_gbps']:,.2f} GB/s",
            style=None if row["loading_wins"] else "dim",
        )
    out.print(table)
    out.print(
        f"{name} in {corpus['dtype']}: {count(chunks, 'chunk')} of {count(tokens, 'token')}, "
        f"ingested in {chunks * compute / 60:,.1f} minutes. Load and compute are for one chunk, at "
        f"{disk_gbps:g} GB/s.",
        highlight=False,
        markup=False,
    )


def _shape_of(model: str) -> tuple[int, int, int, torch.dtype]:
    """Return layers, KV heads, head size and dtype of a model, without loading its weights."""
    import torch
    from transformers import AutoConfig

    from ragkv.model.default_model import DEFAULT_MODEL, default_model_folder
    from ragkv.model.load import pretrained

    place = default_model_folder() if model == DEFAULT_MODEL else model
    config = pretrained(AutoConfig, place).get_text_config()
    try:
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        layers = config.num_hidden_layers
    except AttributeError as error:
        raise UnsupportedModelError(
            f"the configuration of {model!r} does not determine the shape of its caches: {error}"
        ) from error
    return layers, kv_heads, head_dim, config.dtype or torch.float32
