"""What the charts have in common: figure, axes, title, colours and the file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ragkv.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, without the yellow that is too light on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "p")
_TITLE = 80


def panels(title: str, size: tuple[float, float], columns: int = 1) -> tuple[Figure, list[Axes]]:
    """Return a figure and its empty axes, side by side; only a long title's end is shown.

    ``size`` is width and height in inches.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(f"...{title[-_TITLE:]}" if len(title) > _TITLE else title, fontsize=11)
    row = list(figure.subplots(1, columns, sharex=True, squeeze=False)[0])
    for axes in row:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(visible=True, axis="y", color="0.9")
        axes.set_axisbelow(True)
    return figure, row


def check_picture(path: Path | None) -> None:
    """Find out before the work, not after it, that a picture that is wanted cannot be drawn.

    Raises
    ------
    ConfigError
        The file's ending is no format.
    """
    if path is None:
        return
    figure, _ = panels("", (1.0, 1.0))
    known = figure.canvas.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in known:
        raise ConfigError(f"no picture {path}: its ending must be one of {', '.join(known)}")


def save_chart(figure: Figure, path: str | Path) -> None:
    """Write the picture; the ending (.png, .svg, .pdf) gives the format.

    Raises
    ------
    ConfigError
        The format is unknown or the file cannot be written.
    """
    try:
        figure.savefig(path, dpi=150)
    except (ValueError, OSError) as error:
        raise ConfigError(f"the chart cannot be written to {path}: {error}") from error
