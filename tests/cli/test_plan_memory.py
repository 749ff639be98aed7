"""``evenstep plan --parameters --memory`` says whether a model fits on each worker, and how."""

import json
import re

import pytest
from typer.testing import CliRunner

from tests._snippets import ROOT

from . import app

GIB = 2**30
BILLION = ("--parameters", f"{GIB}", "--memory")  # 4 GiB of parameters in float32
SPEEDS = ("--speeds", "100,80,20", "--global-batch-size", "256")


def plan(*arguments):
    return CliRunner(env={"COLUMNS": "120"}).invoke(app, ["plan", *map(str, arguments)])


def memory(*arguments):
    """What a program reads of memory."""
    result = plan(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["memory"]


def needs_gib(found):
    ways = ("ddp", "ddp_view", "fsdp2_accumulated", "fsdp2")
    return [round(found[way]["need_bytes"] / GIB, 3) for way in ways]


@pytest.mark.parametrize(
    ("options", "gib"),
    [
        ((), [20, 16, 4 + 4.5, 4 + 0.5]),
        (("--optimizer", "momentum"), [16, 12, 3 + 4.5, 3 + 0.5]),
        (("--optimizer", "sgd", "--layers", 4), [12, 8, 2 + 8, 2 + 4]),
        (("--dtype", "bfloat16"), [10, 8, 2 + 2.25, 2 + 0.25]),
    ],
)
def test_needs_are_those_of_the_optimizer_and_the_dtype(options, gib):
    """Four ranks: buckets are a fifth copy in DDP, and FSDP2 shards all but what it gathers."""
    assert needs_gib(memory(*BILLION, "24,24,24,24", *options)) == gib


def test_more_workers_need_less_each_only_where_the_model_is_sharded():
    """Whatever memory each of them has."""
    two, eight = memory(*BILLION, "24,12"), memory(*BILLION, ",".join(["24"] * 8))

    assert needs_gib(two)[:2] == needs_gib(eight)[:2] == [20, 16]
    assert needs_gib(two)[2:] == [12.5, 8.5]
    assert needs_gib(eight)[2:] == [6.5, 2.5]


def test_what_is_left_is_counted_in_samples():
    """Nine tenths of a memory are planned, and samples are whole."""
    found = memory(*BILLION, "24,12", "--sample-mb", 1024)["fsdp2"]

    assert [round(each / GIB, 3) for each in found["left_bytes"]] == [13.1, 2.3]
    assert found["samples"] == [13, 2]
    assert memory(*BILLION, "24,12")["fsdp2"]["samples"] is None


@pytest.mark.parametrize(
    ("gib", "words"),
    [
        ("24,24,24", "DDP fits on every worker: nothing needs to be sharded."),
        ("24,24,20", "DDP with `gradient_as_bucket_view=True` fits on every worker."),
        ("24,24,16", "FSDP2 fits on every worker, with several forwards a step too."),
        ("24,24,10", "FSDP2 fits on every worker, with one forward a step."),
        ("24,24,5", "does not fit on worker 2 in any way."),
    ],
)
def test_the_first_way_that_fits_on_every_worker_is_named(gib, words):
    """From plain DDP to what is not balanced, and at the end that nothing fits."""
    text = plan(*BILLION, gib).stdout

    assert words in text
    assert "10 % of each memory is kept free." in text


def test_a_model_without_room_for_a_sample_does_not_fit():
    """A sample is part of what has to fit, if its size is given."""
    with_room = plan(*BILLION, "24,24,24", "--sample-mb", 1000).stdout
    without = plan(*BILLION, "24,24,24", "--sample-mb", 2000).stdout

    assert re.search(r"^DDP +20 GiB +1 samples? +1 samples? +1 samples?$", with_room, re.M)
    assert re.search(r"^DDP +20 GiB +no +no +no$", without, re.M)


def test_memory_stands_beside_speeds():
    """One memory is that of all workers then; what was said of speeds stays the same."""
    alone, beside = plan(*SPEEDS).stdout, plan(*SPEEDS, *BILLION, "24").stdout

    assert beside.startswith(alone.rstrip("\n"))
    assert len(memory(*SPEEDS, *BILLION, "24")["memory_gib"]) == 3


def test_the_page_shows_what_is_printed():
    """Its example of memory, to the letter."""
    page = (ROOT / "docs" / "plan.md").read_text("utf-8")
    command, printed = re.search(
        r"```console\n\$ (\S+ plan --par.*?)\n(.*?)```", page, re.S
    ).groups()

    assert plan(*command.split()[2:]).stdout == printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--parameters", "7e9"], "--memory` must be given together, got --parameters alone"),
        ([*SPEEDS, "--memory", "24"], "must be given together, got --memory alone"),
        ([*SPEEDS, "--sample-mb", "5"], "--sample-mb` must be given with --parameters"),
        ([*SPEEDS, "--optimizer", "sgd"], "--optimizer` must be given with --parameters"),
        ([*SPEEDS, "--layers", "8"], "--layers` must be given with --parameters"),
        ([*BILLION, "24,x"], "--memory"),
        ([*SPEEDS, *BILLION, "24,12"], "each of the 3 workers"),
        (["--parameters", "0", "--memory", "24"], "--parameters` must be from 1 to"),
        (["--parameters", "nan", "--memory", "24"], "--parameters` must be from 1 to"),
        ([*BILLION, "24", "--optimizer", "lion"], "be one of adam, momentum, sgd, got lion"),
        ([*BILLION, "24", "--dtype", "int8"], "be one of float32, bfloat16, got int8"),
        ([*BILLION, "24", "--layers", "0"], "--layers"),
        ([*BILLION, "24", "--sample-mb", "0"], "--sample-mb` must be from 1e-06 to"),
        ([*BILLION, "24", "--sample-mb", "1e-320"], "--sample-mb` must be from 1e-06 to"),
        ([*BILLION, "1e308"], "--memory` must be positive numbers from 1e-18 to 1e+18"),
        (["--parameters", "1e308", "--memory", "24"], "must be from 1 to 1e+18, got 1e+308"),
        ([*BILLION, "24", "--global-batch-size", "8"], "--speeds, --run"),
    ],
)
def test_a_wrong_option_ends_with_the_remedy(arguments, words):
    """Code 2, on stderr, with the option and its rule."""
    result = plan(*arguments)

    assert (result.exit_code, result.stdout) == (2, "")
    assert words in re.sub(r"\s+", " ", result.stderr)
