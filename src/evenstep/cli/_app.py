"""All commands, and what they have in common."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import __version__
from ._plan_command import plan
from ._run_commands import demo, doctor, lab, report, top, watch
from ._simulate import simulate

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # whose frames cut words at the edge of a narrow terminal
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _say_version(asked: bool) -> None:
    if asked:
        typer.echo(f"evenstep {__version__}")
        raise typer.Exit


@app.callback()
def evenstep(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_say_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Data-parallel training at the sum of its workers' speeds."""


app.command("demo", short_help="Equal shares against balanced ones, live.")(demo)
app.command("lab", short_help="Run a script on hosts that this machine emulates.")(lab)
app.command("simulate", short_help="Compare policies on simulated workers.", no_args_is_help=True)(
    simulate
)
app.command("plan", short_help="How long a step takes, and which workers are worth it.")(plan)
app.command(
    "watch",
    short_help="Which ranks of a training wait for which, and why.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)(watch)
app.command("top", short_help="Follow a run in the terminal.")(top)
app.command("doctor", short_help="What is wrong with machines and links.")(doctor)
app.command("report", short_help="Write a recorded run as one HTML page.")(report)
