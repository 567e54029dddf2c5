"""Order the chunks of a saved trace by contextpilot: IN.jsonl OUT.jsonl.

Conversations are given to it one after another, as they come; with what it returns, prompts
share longer prefixes. The time that it takes is not part of any latency then.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import contextpilot


def main(given: Path, out: Path) -> None:
    """Write the trace again."""
    pilot = contextpilot.ContextPilot(use_gpu=False)
    rows = [json.loads(line) for line in given.read_text("utf-8").split("\n") if line]
    for number, row in enumerate(rows):
        if "dialogue" in row:
            chunks = row["dialogue"]["chunks"]
            (row["dialogue"]["chunks"],), _ = pilot.reorder(chunks, conversation_id=str(number))
    out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
