"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ragkv.errors import ConfigError

Paths = Annotated[
    list[Path], typer.Argument(help="Files, or folders of .txt and .md files.", show_default=False)
]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Hub name, folder or GGUF file of the model.",
        show_default="the embedded SmolLM2-135M",
    ),
]
StorePath = Annotated[
    str | None,
    typer.Option(
        "--store",
        help="Folder or URL of the chunk caches, or :memory:.",
        show_default="the user's cache folder",
    ),
]
Namespace = Annotated[str, typer.Option(help="Chunks of other namespaces are invisible.")]
Codec = Annotated[str, typer.Option(help="Encoding of stored chunks: raw, int8 or int4.")]
SinkFrom = Annotated[
    Path | None,
    typer.Option(
        "--sink-from",
        help="Text file with the system prompt of all prompts, or its template with {context}; "
        "llama-index for the one of its query engines. Chunks are encoded behind it.",
        show_default="the chat template's text before the first user message",
    ),
]
ChunkTokens = Annotated[int, typer.Option(min=16, help="Longest chunk, in the model's tokens.")]
Method = Annotated[str | None, typer.Option(help="Method that selects the tokens to recompute.")]


def _ratio(text: str) -> float | Literal["auto"]:
    try:
        return "auto" if text == "auto" else float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither a number nor 'auto'") from None


Ratio = Annotated[
    Any,
    typer.Option(
        parser=_ratio,
        metavar="NUMBER|auto",
        help="Share of the cached tokens to recompute, 0 to 1.",
    ),
]
TopK = Annotated[int, typer.Option(min=1, help="Chunks to retrieve for a question.")]
AnswerTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Longest answer.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Device = Annotated[str | None, typer.Option(help="Device of torch, e.g. cuda:0.")]
DType = Annotated[str | None, typer.Option(help="E.g. float32 or bfloat16.")]


def check_folders(*paths: Path | None) -> None:
    """Check that result files can be created, before the work begins."""
    for path in paths:
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"there is no folder {path.absolute().parent}")
        if path is not None and path.is_dir():
            raise ConfigError(f"{path} is a folder: give a file")
