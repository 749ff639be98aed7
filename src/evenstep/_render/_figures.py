"""Pictures as PNG files: a figure without a screen, and what all axes have in common."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def new_figure(wide: float, high: float) -> Figure:
    """Return an empty figure of so many inches, drawn by no window system."""
    figure = Figure(figsize=(wide, high), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def title(figure: Figure, text: str, *, size: int = 16, weight: str = "bold") -> None:
    """Write ``text`` above all axes, from the left."""
    figure.suptitle(text, fontsize=size, fontweight=weight, x=0.01, ha="left")


def tidy(axes: Axes) -> None:
    """Leave a frame on two sides and a pale grid of vertical lines."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def save(figure: Figure, path: Path) -> None:
    """Write the figure as a PNG, whose folder is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
