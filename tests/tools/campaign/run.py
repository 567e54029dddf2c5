"""The campaign: fault after fault, each on a store of its own."""

import random
import shutil
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

from campaign.case import Case, Outcome
from campaign.faults import FAULTS
from campaign.world import engine, precompute
from ragkv.config import StoreConfig

KNOWN = range(4)  # what is in the store before the fault
_MEMORY = (0, 2 << 30)


def run_campaign(
    runs: int, seed: int = 0, on_run: Callable[[str, Outcome], None] = lambda *_: None
) -> dict[str, Outcome]:
    """Run each fault in turn; return what each came to."""
    total = {name: Outcome() for name in FAULTS}
    with tempfile.TemporaryDirectory(prefix="campaign-") as scratch:
        prepared = _prepare(Path(scratch) / "prepared")
        for number in range(runs):
            name = list(FAULTS)[number % len(FAULTS)]
            folder = Path(scratch) / "run"
            outcome = _run(name, folder, prepared, random.Random(f"{seed} {number}"))
            shutil.rmtree(folder)
            total[name].add(outcome)
            on_run(name, outcome)
    return total


def _prepare(path: Path) -> Path:
    """Make a store, to be copied for each run."""
    with engine(StoreConfig(path)) as kv:
        for chunk in KNOWN:
            precompute(kv, chunk)
    return path


def _run(name: str, folder: Path, prepared: Path, draw: random.Random) -> Outcome:
    shutil.copytree(prepared, folder / "store")
    config = StoreConfig(folder / "store", memory_bytes=draw.choice(_MEMORY))
    case = Case(folder, config, draw, set(KNOWN))
    try:
        FAULTS[name](case)
        case.examine()
    except Exception:  # noqa: BLE001  reported, and the next run goes on
        case.outcome.wrong.append(traceback.format_exc())
    return case.outcome
