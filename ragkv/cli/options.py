"""Options that several commands share, and what is read from them."""

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
        "--model", help="Hub name or folder of the model.", show_default="the embedded SmolLM2-135M"
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
Namespace = Annotated[str, typer.Option(help="Chunks of other namespaces are never seen.")]
Codec = Annotated[str, typer.Option(help="How chunks are stored: raw, int8 or int4.")]
SinkFrom = Annotated[
    Path | None,
    typer.Option(
        "--sink-from",
        help="Text file: the system prompt of all prompts, or its template with {context}; "
        "llama-index: that of its query engines. Chunks are encoded behind it.",
        show_default="what the chat template puts before the first user text",
    ),
]
ChunkTokens = Annotated[int, typer.Option(min=16, help="Longest chunk, in the model's tokens.")]
Method = Annotated[str | None, typer.Option(help="How tokens to recompute are chosen.")]


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
Device = Annotated[str | None, typer.Option(help="As torch names it.")]
DType = Annotated[str | None, typer.Option(help="For example float32 or bfloat16.")]


def check_folders(*paths: Path | None) -> None:
    """Find out before the work, not after it, that a result has no place to go to."""
    for path in paths:
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"there is no folder {path.absolute().parent}")
        if path is not None and path.is_dir():
            raise ConfigError(f"{path} is a folder: name a file")
