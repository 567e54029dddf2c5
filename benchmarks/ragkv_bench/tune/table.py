"""The table of a tuning, for people."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from ragkv_bench.tune.figures import TOP
from ragkv_bench.tune.run import Tuning


def table(tuning: Tuning) -> Table:
    """Return a rich table: held-out and training examples, before and after."""
    out = Table(
        title=escape(f"{tuning.auxiliary} for {tuning.primary} on {tuning.data}"),
        caption=(
            "KL: of the auxiliary model's scores from the primary model's attention, in nats."
            f" overlap: Jaccard of the top {TOP:.0%} of the chunk tokens. Weights of pass"
            f" {tuning.best_epoch} of {tuning.epochs[-1].number}: those with the least held-out"
            " KL."
        ),
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
    )
    out.add_column("examples", no_wrap=True)
    for heading in ("number", "KL before", "after", "overlap before", "after"):
        out.add_column(heading, justify="right", no_wrap=True)
    for name, part in (("held out", tuning.heldout), ("trained on", tuning.training)):
        out.add_row(
            name,
            str(part.examples),
            *(f"{figures.kl:.3f}" for figures in (part.before, part.after)),
            *(f"{figures.jaccard:.1%}" for figures in (part.before, part.after)),
        )
    return out
