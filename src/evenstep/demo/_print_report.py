"""What the demo says at the end, in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from .._render._words import seconds, sizes, text_table
from ._summary import RunFigures, Summary

_TOO_LATE = 0.05


def print_report(console: Console, summary: Summary) -> None:
    """Print the figures of both runs, the physical limit, and how far the losses differ."""
    console.print(
        Text.assemble(
            ("Result  ", "bold"),
            (f"{summary.speed_up:.1f} times as fast", "bold green"),
            (f", at {summary.share_of_limit:.0%} of what is physically possible", "bold"),
        )
    )
    for text in (_figures(summary), _limit(summary), _losses(summary)):
        console.print(f"\n{text}", highlight=False)
    if summary.late_share > _TOO_LATE:
        console.print(
            f"\n[yellow]In {summary.late_share:.0%} of the steps this machine was too busy to play"
            " its workers on time, so take the figures with care, or run it again.[/]"
        )


def _figures(summary: Summary) -> str:
    def column(run: RunFigures) -> list[str]:
        return [
            sizes(run.batch_size),
            seconds(run.step_s),
            f"{run.idle_share:.0%}",
            f"{run.idle_share_of_all:.0%}",
            f"{run.samples_per_s:.0f}",
            f"{run.total_s:.1f} s",
            f"{run.final_loss:.4f}",
        ]

    names = [
        "  batch sizes",
        "  step time, median",
        "  workers idle, median",
        "  idle in all steps",
        "  samples/s",
        f"  {summary.num_steps} steps took",
        "  final loss",
    ]
    rows = zip(names, column(summary.equal), column(summary.balanced), strict=True)
    return text_table(("", "equal split", "balanced"), rows)


def _limit(summary: Summary) -> str:
    found = (
        f"{summary.steps_to_balance} steps were enough to find the speeds."
        if summary.steps_to_balance > 1
        else "One step was enough to find the speeds."
    )
    return (
        f"  Physical limit {seconds(summary.limit_s)}: {seconds(summary.compute_limit_s)} with "
        f"every worker busy all the time,\n  and {seconds(summary.communication_s)} to average the "
        f"gradients. {found}"
    )


def _losses(summary: Summary) -> str:
    text = f"  Same training: the losses differ by at most {summary.loss_difference:.1e}."
    if summary.reference_difference is not None:
        text += (
            f"\n  By rounding alone, equal splits on {len(summary.equal.batch_size)} workers and"
            f" on 1 differ by {summary.reference_difference:.1e},\n"
            f"  the balanced run and the one on 1 by {summary.balanced_reference_difference:.1e}."
        )
    return text
