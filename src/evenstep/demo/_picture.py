"""The demo's picture: one step, batch sizes, waiting, and the losses of both runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from statistics import median

from matplotlib.axes import Axes

from .._render._figures import new_figure, save, tidy, title
from .._render._words import ratio, seconds
from ._recording import Recording
from ._screen import color_of
from ._summary import Summary

EQUAL, BALANCED = "#cc3311", "#009988"
_GREY = "#555555"
_WAITING = "#e4e4e4"


def save_picture(
    path: Path,
    summary: Summary,
    *,
    equal: Recording,
    balanced: Recording,
    speeds: Sequence[float] | None = None,
) -> None:
    """Draw both runs side by side into ``path``, a PNG."""
    figure = new_figure(11, 9.2)
    grid = figure.add_gridspec(4, 2, height_ratios=[1.15, 1, 1, 1.25])
    gain = f"{summary.speed_up:.1f} times as fast on the same workers"
    title(figure, f"{gain}, with the same training result")
    for column, (name, run) in enumerate((("Equal split", equal), ("Balanced", balanced))):
        one_step = figure.add_subplot(grid[0, column])
        _draw_step(one_step, run, name, longest_s=1.04 * summary.equal.step_s)
        _name_workers(one_step, len(run.batch_size[0]), speeds)
        if run is balanced:
            _mark_limit(one_step, summary)
        _draw_batch_sizes(figure.add_subplot(grid[1, column]), run)
        most_s = max(max(map(max, equal.idle_s)), max(map(max, balanced.idle_s)))
        _draw_waiting(figure.add_subplot(grid[2, column]), run, most_s)
    by_step, by_time = (figure.add_subplot(grid[3, column]) for column in (0, 1))
    _draw_losses(by_step, by_time, equal, balanced)
    save(figure, path)


def _draw_step(axes: Axes, run: Recording, name: str, *, longest_s: float) -> None:
    """Draw what every worker does in a usual step of the run's second half."""
    half = run.num_done // 2
    compute_s = [median(column) for column in zip(*run.compute_s[half:], strict=True)]
    end_s = max(compute_s)
    wall_s = median(run.known_wall_s(last=run.num_done - half))
    for rank, (size, busy_s) in enumerate(zip(run.batch_size[-1], compute_s, strict=True)):
        axes.barh(rank, busy_s, color=color_of(rank), height=0.72)
        axes.barh(
            rank,
            end_s - busy_s,
            left=busy_s,
            color=_WAITING,
            height=0.72,
            hatch="///",
            edgecolor="white",
            linewidth=0,
        )
        inside = busy_s > 0.2 * longest_s
        axes.text(
            (0.0 if inside else busy_s) + 0.012 * longest_s,
            rank,
            f"{size} samples",
            va="center",
            color="white" if inside else "black",
            fontsize=9,
            fontweight="bold",
        )
    axes.barh(
        range(len(compute_s)),
        [wall_s - end_s] * len(compute_s),
        left=end_s,
        color=_GREY,
        height=0.72,
    )
    axes.set_title(f"{name}: one step takes {seconds(wall_s)}", loc="left", fontweight="bold")
    axes.invert_yaxis()
    axes.set_xlim(0, longest_s)
    axes.set_xlabel("seconds: computing, waiting (hatched), the rest (dark)")
    tidy(axes)


def _name_workers(axes: Axes, world_size: int, speeds: Sequence[float] | None) -> None:
    names = [f"worker {rank}" for rank in range(world_size)]
    if speeds is not None:
        names = [f"{name}\nspeed {ratio(speed)}" for name, speed in zip(names, speeds, strict=True)]
    axes.set_yticks(range(world_size), names)


def _mark_limit(axes: Axes, summary: Summary) -> None:
    axes.axvline(summary.limit_s, color="black", linestyle="--", linewidth=1)
    axes.annotate(
        f"physical limit\n{seconds(summary.limit_s)}:\n{summary.share_of_limit:.0%} reached",
        (summary.limit_s, 0.5),
        xycoords=("data", "axes fraction"),
        xytext=(30, 0),
        textcoords="offset points",
        va="center",
        arrowprops={"arrowstyle": "->", "color": "black"},
    )


def _draw_batch_sizes(axes: Axes, run: Recording) -> None:
    """Draw the shares of the global batch, stacked, over steps."""
    steps = range(run.num_done)
    edges = [[0, *accumulate(sizes)] for sizes in run.batch_size]
    for rank in range(len(run.batch_size[0])):
        low, high = ([edge[rank + part] for edge in edges] for part in (0, 1))
        axes.fill_between(steps, low, high, color=color_of(rank), step="post", linewidth=0)
        axes.text(
            0.98 * (run.num_done - 1),
            (low[-1] + high[-1]) / 2,
            str(run.batch_size[-1][rank]),
            ha="right",
            va="center",
            color="white",
            fontweight="bold",
        )
    axes.set_ylabel("batch sizes")
    axes.set_xlim(0, run.num_done - 1)
    axes.set_ylim(0, run.global_batch_size)
    tidy(axes)


def _draw_waiting(axes: Axes, run: Recording, most_s: float) -> None:
    """Draw every worker's waiting time over steps."""
    for rank, idle_s in enumerate(zip(*run.idle_s, strict=True)):
        axes.plot([1e3 * value for value in idle_s], color=color_of(rank), label=f"worker {rank}")
    axes.set_xlabel("step")
    axes.set_ylabel("waiting, ms")
    axes.set_xlim(0, run.num_done - 1)
    axes.set_ylim(-0.03e3 * most_s, 1.08e3 * most_s)
    tidy(axes)


def _draw_losses(by_step: Axes, by_time: Axes, equal: Recording, balanced: Recording) -> None:
    """Draw both losses over steps, where they are the same, and over seconds."""
    named = ((equal, EQUAL, "equal split", 5.0, 0.35), (balanced, BALANCED, "balanced", 1.6, 1.0))
    for run, color, name, wide, alpha in named:
        by_step.plot(run.loss, color=color, label=name, linewidth=wide, alpha=alpha)
        usual_s = median(run.known_wall_s())
        times = accumulate(usual_s if wall is None else wall for wall in run.wall_s)
        by_time.plot(list(times), run.loss, color=color, linewidth=2, label=name)
    by_step.set_title("Step by step: the same loss", loc="left", fontweight="bold")
    by_step.set_xlabel("step")
    by_time.set_title("By the clock: much sooner", loc="left", fontweight="bold")
    by_time.set_xlabel("seconds of training")
    for axes in (by_step, by_time):
        axes.set_ylabel("loss, nats per byte")
        axes.legend(frameon=False)
        tidy(axes)
