"""Results: kept in one JSON file each, shown as a table for people and as a picture."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from ragkv.cli.console import out
from ragkv.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, without the yellow that is too light on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "p")
_DASHES = ("-", "--", "-.", ":")
_LONGEST_TITLE = 80
Row = TypeVar("Row")


def short_name(model: str) -> str:
    """Return the model as titles name it: a hub name, or a folder without the way to it."""
    path = Path(model)
    return path.name if path.is_absolute() else model


def write(path: str | Path, value: dict[str, Any]) -> None:
    """Write a JSON file for people to look into, too.

    Raises
    ------
    ConfigError
        It cannot be written.
    """
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error


@contextmanager
def reading(path: str | Path, otherwise: str) -> Iterator[Any]:
    """Yield what a JSON file holds; errors say ``otherwise``, with ``{path}`` and ``{error}``.

    Raises
    ------
    ConfigError
        The file cannot be read, or the block does not find in it what it looks for.
    """
    try:
        yield json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(otherwise.format(path=path, error=error)) from error


def table(
    title: str,
    caption: str,
    rows: Iterable[Row],
    columns: Mapping[str, Callable[[Row], str]],
    *,
    words: int = 1,
) -> Table:
    """Return a table of 80 columns' width: a line a row, cells made by the column's function.

    The first ``words`` columns are aligned left. Brackets in the title are text; in cells they are
    rich's markup.
    """
    shown = Table(
        title=escape(title),
        caption=caption,
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for index, heading in enumerate(columns):
        shown.add_column(heading, justify="left" if index < words else "right", no_wrap=True)
    for row in rows:
        shown.add_row(*(cell(row) for cell in columns.values()))
    return shown


def cell(value: float | None, form: str, unit: str = "") -> str:
    """Return a figure as a format shows it; ``-`` where there is none."""
    return "-" if value is None else f"{value:{form}}{unit}"


def show(
    tables: Iterable[Table], plot: Path | None = None, draw: Callable[[], Figure] | None = None
) -> None:
    """Print tables, and write the picture where one is wanted."""
    for each in tables:
        out.print(each)
    if plot is not None and draw is not None:
        save_chart(draw(), plot)
        out.print(f"Picture: {plot}", markup=False, highlight=False, soft_wrap=True)


def panels(title: str, size: tuple[float, float], columns: int = 1) -> tuple[Figure, list[Axes]]:
    """Return a figure and its empty axes, side by side; only a long title's end is shown.

    ``size`` is width and height in inches.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    shown = f"...{title[-_LONGEST_TITLE:]}" if len(title) > _LONGEST_TITLE else title
    figure.suptitle(shown, fontsize=11)
    row = list(figure.subplots(1, columns, sharex=True, squeeze=False)[0])
    for axes in row:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(visible=True, axis="y", color="0.9")
        axes.set_axisbelow(True)
    return figure, row


def line_style(number: int) -> dict[str, Any]:
    """Return a line's colour, marker and dashes, which run in cycles of different lengths."""
    styles = {"color": COLOURS, "marker": MARKERS, "linestyle": _DASHES}
    return {name: values[number % len(values)] for name, values in styles.items()}


def legend_below(figure: Figure, axes: Axes) -> None:
    """Name the lines of some axes below the figure."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        columns = min(len(labels), 6)
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)


def check_picture(path: Path | None) -> None:
    """Raise ConfigError before the work where a picture's ending is no format."""
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
