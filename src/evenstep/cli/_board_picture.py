"""The leaderboard as a picture: policies by scenarios, the better the paler."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.colors import LogNorm

from .._render._figures import new_figure, save, title
from .._render._words import percent
from ._board import Leaderboard, headline

_LEAST, _MOST = 0.01, 1.5  # regrets past these look alike


def save_picture(path: Path, board: Leaderboard) -> None:
    """Draw the leaderboard into ``path``, a PNG: a cell for each policy and scenario."""
    lines, columns = board.lines, list(board.scenarios)
    regrets = np.array([[line.regret[name] for name in columns] for line in lines])
    if len(columns) > 1:
        columns.append("mean")
        regrets = np.column_stack([regrets, [line.mean_regret for line in lines]])
    schemes = {line.scheme for line in lines} != {"bsp"}
    names = [f"{line.policy}, {line.scheme}" if schemes else line.policy for line in lines]

    wide, high = max(3.2 + 0.95 * len(columns), 7.0), 1.5 + 0.42 * len(lines)
    figure = new_figure(wide, high)
    axes = figure.add_subplot()
    shown = np.clip(regrets, _LEAST, _MOST)
    axes.imshow(shown, cmap="OrRd", norm=LogNorm(_LEAST, _MOST), aspect="auto")
    for (row, column), regret in np.ndenumerate(regrets):
        axes.text(
            column,
            row,
            percent(regret),
            ha="center",
            va="center",
            color="white" if regret > 0.4 else "black",
            fontweight="bold" if regret == regrets[:, column].min() else "normal",
        )
    if len(columns) > 1:
        axes.axvline(len(columns) - 1.5, color="white", linewidth=4)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(names)), names)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    what, _, where = headline(board).partition(": ")
    title(figure, f"{what}\n{where}", size=10, weight="normal")
    save(figure, path)
