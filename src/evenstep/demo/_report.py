"""What the demo says at the end, in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ._curves import draw
from ._look import seconds_text, sizes_text
from ._recording import Recording
from ._summary import Summary

_TOO_LATE = 0.05


def print_report(
    console: Console, summary: Summary, *, equal: Recording, balanced: Recording
) -> None:
    """Print the figures of both runs, the physical limit, and the loss curves."""
    console.print(
        Text.assemble(
            ("Result  ", "bold"),
            (f"{summary.speed_up:.1f} times as fast", "bold green"),
            (f", at {summary.share_of_limit:.0%} of what is physically possible", "bold"),
        )
    )
    console.print(_figures(summary))
    console.print(_limit(summary))
    console.print()
    console.print(_losses(summary))
    console.print(draw(equal.loss, balanced.loss, width=min(64, console.width - 8)))
    if summary.late_share > _TOO_LATE:
        console.print(
            f"\n[yellow]In {summary.late_share:.0%} of the steps this machine was too busy to play"
            " its workers on time, so take the figures with care, or run it again.[/]"
        )


def _figures(summary: Summary) -> Table:
    one, other = summary.equal, summary.balanced
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for name in ("", "equal split", "balanced"):
        table.add_column(name, justify="left" if not name else "right")
    table.add_row(
        "batch sizes",
        sizes_text(one.batch_size),
        Text(sizes_text(other.batch_size), "green"),
    )
    table.add_row(
        "step time, median",
        seconds_text(one.step_s),
        Text(seconds_text(other.step_s), "bold green"),
    )
    table.add_row(
        "workers idle, median",
        Text(f"{one.idle_share:.0%}", "red"),
        Text(f"{other.idle_share:.0%}", "green"),
    )
    table.add_row(
        "idle in all steps", f"{one.idle_share_of_all:.0%}", f"{other.idle_share_of_all:.0%}"
    )
    table.add_row("samples/s", f"{one.samples_per_s:.0f}", f"{other.samples_per_s:.0f}")
    table.add_row(
        f"{summary.num_steps} steps took", f"{one.total_s:.1f} s", f"{other.total_s:.1f} s"
    )
    table.add_row("final loss", f"{one.final_loss:.4f}", f"{other.final_loss:.4f}")
    return table


def _limit(summary: Summary) -> Text:
    found = (
        f"{summary.steps_to_balance} steps were enough to find the speeds."
        if summary.steps_to_balance > 1
        else "One step was enough to find the speeds."
    )
    return Text.assemble(
        "\n  Physical limit ",
        (seconds_text(summary.limit_s), "bold"),
        f": {seconds_text(summary.compute_limit_s)} with every worker busy all the time,\n"
        f"  and {seconds_text(summary.communication_s)} to average the gradients. {found}",
    )


def _losses(summary: Summary) -> Text:
    text = Text.assemble(
        ("  Same training", "bold"),
        f": the losses differ by at most {summary.loss_difference:.1e}.",
    )
    if summary.reference_difference is not None:
        text.append(
            f"\n  By rounding alone, equal splits on {len(summary.equal.batch_size)} workers and"
            f" on 1 differ by {summary.reference_difference:.1e},\n"
            f"  the balanced run and the one on 1 by {summary.balanced_reference_difference:.1e}."
        )
    text.append_text(Text.assemble("\n  Loss: ", ("⣀⣀⣀", "red"), " equal split, "))
    text.append_text(Text.assemble(("o", "bold green"), " balanced\n"))
    return text
