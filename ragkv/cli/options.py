"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
        help="Folder of the chunk caches, or :memory:.",
        show_default="the user's cache folder",
    ),
]
Namespace = Annotated[str, typer.Option(help="Chunks of other namespaces are never seen.")]
ChunkTokens = Annotated[int, typer.Option(min=16, help="Longest chunk, in the model's tokens.")]
Method = Annotated[str | None, typer.Option(help="How tokens to recompute are chosen.")]
Ratio = Annotated[
    float, typer.Option(min=0.0, max=1.0, help="Share of the cached tokens to recompute.")
]
TopK = Annotated[int, typer.Option(min=1, help="Chunks to retrieve for a question.")]
AnswerTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Longest answer.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
