"""What a watch says at its end: speed-ups, what to do, and when to do nothing."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from evenstep._diagnosis import Phase, StepClues
from evenstep.watch._advice_text import advice_notes, kept_change
from evenstep.watch._step_records import StepRecord
from evenstep.watch._watched_run import CallSite

from ._scripts import BY_NAME, NANOGPT, read

NUM_STEPS = 60
SCRIPT = BY_NAME["mnist"]


def run(
    times_ms,
    *,
    size=0,
    sites=(),
    kind="DDP",
    num_steps=NUM_STEPS,
    rest_ms=0,
    meeting_ms=0,
    input_ms=0,
):
    """A run in which every rank's forward and backward take so long."""
    times_us = 1000 * np.array(times_ms, float)
    times_us = np.broadcast_to(times_us, (num_steps, times_us.shape[-1]))
    spent = np.zeros((*times_us.shape, len(Phase)), np.int64)
    spent[..., Phase.FORWARD] = times_us / 3
    spent[..., Phase.BACKWARD] = times_us - spent[..., Phase.FORWARD]
    spent[..., Phase.REDUCTION] = times_us.max(axis=1, keepdims=True) - times_us + 1000
    spent[..., Phase.REST] = 1000 * rest_ms
    spent[..., Phase.MEETING] = 1000 * meeting_ms
    spent[..., Phase.INPUT] = input_us = 1000 * np.broadcast_to(input_ms, times_us.shape)
    spent[..., Phase.REDUCTION] += input_us.max(axis=1, keepdims=True) - input_us
    sizes = np.broadcast_to(size, times_us.shape)
    rows = [
        tuple(
            StepRecord(step, 1, tuple(spent[step, rank]), StepClues(size=sizes[step, rank]), 16)
            for rank in range(times_us.shape[1])
        )
        for step in range(num_steps)
    ]
    return kind, sites, rows


def site(made, line, file="/home/me/train.py", library=""):
    """Where something was made."""
    return CallSite(made, file, line, library)


OWN = (
    site("DistributedDataParallel", SCRIPT.line_of(SCRIPT.model)),
    site("DataLoader", SCRIPT.line_of(SCRIPT.loader)),
)


@pytest.fixture
def advice(tmp_path, monkeypatch):
    """What is said of a run, whose scripts are below a folder of the test's own."""
    (home := tmp_path / "home/me").mkdir(parents=True)
    monkeypatch.chdir(home)

    def advised(watched, source=SCRIPT.text):
        kind, sites, rows = watched
        made = [replace(one, file=one.file and f"{tmp_path}{one.file}") for one in sites]
        for one in made:
            Path(one.file).parent.mkdir(exist_ok=True, parents=True)
            if source is not None:
                Path(one.file).write_text(source, "utf-8")
        first, *notes = advice_notes(kind, made, rows)
        told = read(notes)
        told.speed_ups = first
        return told

    return advised


def test_each_speed_up_is_said(advice):
    """By speed, by length, by both, and without the slowest rank."""
    size = np.random.default_rng(0).gamma(16, 100, (NUM_STEPS, 2))
    told = advice(run(0.1 * size * [1, 3], size=size, sites=OWN))

    for words in ("balanced by speed 1.7", "by length 1.0", "by both 2.0", "without rank 1: 1.5"):
        assert words in told.speed_ups


def test_what_keras_asks_before_each_step_goes_with_evensteps_data(advice):
    """As long as the last one to be asked takes; in DDP, and without the slowest rank, it stays."""
    late = {"rest_ms": np.array([0, 10]), "meeting_ms": np.array([20, 10])}

    told = {kind: advice(run([100, 300], kind=kind, **late)).speed_ups for kind in ("Keras", "DDP")}

    assert f"by speed {321 / (10 + 150 + 1 + 1.5):.2f}x" in told["Keras"]
    assert f"by speed {321 / (10 + 150 + 10 + 1 + 0.4):.2f}x" in told["DDP"]
    assert all(f"without rank 1: {321 / (200 + 10 + 1 + 0.4):.2f}x" in it for it in told.values())


def test_fsdp2_gathers_once_more_in_a_balanced_step(advice):
    """Its steps have two forwards at least; how long ranks gather together is known by then."""
    late = {"rest_ms": np.array([0, 10]), "meeting_ms": np.array([20, 10])}

    told = advice(run([100, 300], kind="FSDP2", **late)).speed_ups

    assert f"by speed {321 / (10 + 150 + 2 * 10 + 1 + 0.4):.2f}x" in told
    assert f"without rank 1: {321 / (200 + 10 + 1 + 0.4):.2f}x" in told


def test_the_users_own_file_gets_a_diff(advice):
    """With its path as seen from the folder."""
    told = advice(run([100, 300], sites=OWN))

    assert told.diff.startswith("--- a/train.py\n+++ b/train.py\n")
    assert told.where == "the change, for `git apply`"


def test_a_file_outside_of_the_folder_says_where_its_diff_applies(advice, tmp_path):
    """The script was started from elsewhere, or changed its folder."""
    made = [site(one.made, one.line, file="/data/p/train.py") for one in OWN]

    told = advice(run([100, 300], sites=made))

    assert told.diff.startswith("--- a/train.py\n+++ b/train.py\n")
    assert told.where == f"the change, for `git apply` in {tmp_path}/data/p"


def test_several_models_get_words(advice):
    """All go into one call, and the diff of one of them would leave out the others."""
    told = advice(run([100, 300], sites=[*OWN, site(OWN[0].made, OWN[0].line + 1)]))

    assert told.diff == ""
    assert f"(train.py:{OWN[0].line}, train.py:{OWN[0].line + 1})" in told.to_do[-1]
    assert told.to_do[-1].endswith(
        "all in one call: balancer = Balancer(); "
        "model_1, model_2, loader = balancer.prepare(model_1, model_2, loader)"
    )


def test_several_loaders_that_may_train_get_words(advice):
    """The lines of both are named, as it is not known which one it is."""
    told = advice(run([100, 300], sites=[*OWN, site("DataLoader", OWN[1].line + 1)]))

    assert told.diff == ""
    at = f"train.py:{OWN[1].line} or train.py:{OWN[1].line + 1}"
    assert f"the loader that trains ({at})" in told.to_do[-1]
    assert "docs/data.md#several-loaders" in told.to_do[0]


def test_what_would_be_slower_is_said_to_be(advice):
    """One of two equal workers alone: a factor below 1 is no advice."""
    told = advice(run([100, 100], sites=OWN))

    assert told.speed_ups.endswith(
        "not by length, as the sizes of the batches are not known; without rank 0: 0.50x (slower)"
    )


@pytest.mark.parametrize(
    ("library", "page"),
    [
        ("transformers", "docs/huggingface.md"),
        ("accelerate", "docs/huggingface.md"),
        ("lightning", "docs/loops.md#fabric-and-lightning"),
    ],
)
def test_inside_a_library_the_recipe_is_named(advice, library, page):
    """No diff: its own lines stand on its page."""
    made = [site("DistributedDataParallel", 3, library=library), OWN[1]]

    told = advice(run([100, 300], sites=made))

    assert told.diff == ""
    assert page in told.to_do[-1]


def test_a_loader_that_another_library_makes_is_the_users_line(advice):
    """Such as timm's: what the user called is what changes."""
    shape = BY_NAME["timm_train"]
    made = [
        site("DistributedDataParallel", shape.line_of(shape.model)),
        site("DataLoader", shape.line_of(shape.loader), library="timm"),
    ]

    assert "+    model, loader_train" in advice(run([1000, 300], sites=made), shape.text).diff


def test_without_a_loader_it_says_so(advice):
    """nanoGPT's loop draws its batches itself."""
    text = NANOGPT.read_text("utf-8")
    line = next(n for n, line in enumerate(text.splitlines(), 1) if "= DDP(" in line)

    told = advice(run([100, 300], sites=[site("DistributedDataParallel", line)]), text)

    assert told.diff == ""
    assert "no DataLoader was seen" in told.to_do[-1]


def test_parts_in_two_files_are_named(advice):
    """Which lines to change, where a diff of one file cannot."""
    made = [OWN[0], site("DataLoader", 7, file="/home/me/data.py")]

    told = advice(run([100, 300], sites=made))

    assert told.diff == ""
    assert f"train.py:{OWN[0].line}" in told.to_do[-1]
    assert "data.py:7" in told.to_do[-1]


def test_a_file_that_cannot_be_read_is_named(advice):
    """It may be on another machine."""
    told = advice(run([100, 300], sites=OWN), source=None)

    assert told.diff == ""
    assert f"train.py:{OWN[1].line}" in told.to_do[-1]


def test_what_is_not_worth_it_is_said_plainly(advice):
    """Two percent are not worth a changed line."""
    told = advice(run([100, 102], rest_ms=100, sites=OWN))

    assert told.diff == ""
    assert "not worth it" in told.to_do[0]


def test_too_few_steps_give_no_advice(advice):
    """It says how many it takes."""
    told = advice(run([100, 300], num_steps=12, sites=OWN))

    assert "only 12 steps (or sums of short ones) were seen" in told.speed_ups
    assert told.diff == ""


def test_lengths_that_matter_are_said_beside_the_diff(advice):
    """`Balancer(cost=...)` where it brings more than `Balancer()`."""
    size = np.random.default_rng(0).gamma(4, 400, (NUM_STEPS, 4))

    told = advice(run(0.1 * size, size=size, sites=OWN))

    assert "Balancer(cost=lengths)" in told.to_do[0]
    assert told.diff


def test_fsdp1_is_sent_to_fsdp2(advice):
    """It cannot be balanced, and a diff would fail."""
    made = [site("FullyShardedDataParallel", 3), OWN[1]]

    told = advice(run([100, 300], kind="FSDP1", sites=made))

    assert told.diff == ""
    assert "docs/loops.md#fsdp2" in told.to_do[0]


def test_a_rank_that_waits_for_its_input_is_to_be_mended_and_not_left_out():
    """What that brings is said; of input that all wait for, nothing."""
    one = advice_notes(*run([50, 50, 50], input_ms=[0, 50, 10]))
    alike = advice_notes(*run([50, 50, 50], input_ms=[50, 50, 50]))
    text = "rank 1 waits 0.04 s a step longer for its input than the others"

    assert any(text in line and f"up to {101 / 61:.2f}x" in line for line in one)
    assert not any("train without rank 1" in line for line in one)
    assert not any("for its input" in line for line in alike)


@pytest.mark.parametrize(
    ("where", "command"), [("", "next: "), (" in /p q", "next: cd '/p q' && ")]
)
def test_the_change_is_kept_in_a_file_with_the_command_that_makes_it(tmp_path, where, command):
    """Between tracebacks, none could copy it."""
    diff = "--- a/train.py\n+++ b/train.py\n"
    (said,) = kept_change(["a speed-up", f"the change, for `git apply`{where}:\n{diff}"], tmp_path)
    file = tmp_path / "evenstep.diff"

    assert file.read_text("utf-8") == diff
    assert said == f"{command}git apply {file if where else 'evenstep.diff'}"


def test_without_a_change_no_file_is_written(tmp_path):
    """Nor where it cannot be: it was said."""
    change = "the change, for `git apply`:\n---"

    assert kept_change([], tmp_path) == kept_change(["in words"], tmp_path) == ()
    assert list(tmp_path.iterdir()) == []
    assert kept_change([change], tmp_path / "none") == ()
