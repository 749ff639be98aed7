"""The figures of a report are those of every step, however long the run."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from evenstep._report import read_figures
from evenstep.events import (
    BalancingStopped,
    EstimatesRestored,
    LinksMeasured,
    Rebalanced,
    SharesPlanned,
    StepMeasured,
    WaitingDiagnosed,
    WorkerLost,
    to_record,
)

from . import dull_figures as dull
from .recorded import PARTS, accounted, measured, started, trained, written


@pytest.fixture(
    scope="module", params=[(40, 3), (1300, 20)], ids=["a step each", "four steps each"]
)
def run(request, tmp_path_factory):
    """A run's events and its figures: short, and so long that stretches were doubled twice.

    Some steps are missing, as those are that a rank could not measure.
    """
    events = [
        event
        for event in trained(*request.param)
        if not (isinstance(event, StepMeasured) and event.step % 50 == 31)
    ]
    return events, read_figures(written(tmp_path_factory.mktemp("run"), events))


def test_means_by_stretch_are_those_of_all_steps(run):
    """Whole steps, computing and predictions, each over the steps that tell it."""
    events, figures = run
    width, steps = figures.width, figures.steps

    assert len(figures.edges) <= 512
    assert figures.edges.tolist() == list(range(0, figures.last_step + 1, width))
    assert steps.num.sum() == figures.num_steps == len(dull.steps_of(events))
    whole = dull.whole_steps(events)
    known = {
        "makespan_s": dull.by_stretch(events, width, lambda step: step.makespan_s),
        "equal_s": dull.by_stretch(events, width, lambda step: step.equal_split_s),
        "best_s": dull.by_stretch(events, width, lambda step: step.best_split_s),
    }
    for name, means in known.items():
        for at, value in enumerate(getattr(steps, name).tolist()):
            assert np.isnan(value) if at not in means else value == pytest.approx(means[at])
    for at in range(len(figures.edges)):
        walls = [wall_s for step, wall_s in whole if step.step // width == at]
        if walls:
            assert steps.wall_s[at] == pytest.approx(np.mean(walls))
            assert (steps.least_s[at], steps.most_s[at]) == (min(walls), max(walls))


def test_what_was_saved_is_the_sum_over_all_steps(run):
    """Hours, and the part of what the equal split would have taken."""
    events, figures = run
    elapsed_s, saved_s, left_s, share = dull.savings(events)

    savings = figures.steps
    assert savings.elapsed_s == pytest.approx(elapsed_s)
    assert savings.saved_s == pytest.approx(saved_s)
    assert savings.left_s == pytest.approx(left_s)
    assert savings.saved_share == pytest.approx(share)


def test_ranks_have_their_own_speeds_and_waiting(run):
    """By stretch, and who was the slowest how often."""
    events, figures = run
    steps = figures.steps
    for rank in range(figures.world_size):
        speeds, idle = dull.of_rank(events, rank, figures.width)
        at = list(speeds)
        assert steps.samples_per_s[at, rank] == pytest.approx(list(speeds.values()))
        assert steps.idle_share[at, rank] == pytest.approx(list(idle.values()))
    num, caused_s = dull.slowest(events, figures.world_size)
    assert steps.num_slowest.tolist() == num
    assert steps.caused_s == pytest.approx(caused_s)


def test_accounts_are_added_up_by_part_and_by_rank(run):
    """Means of a step over ranks, and each rank's waiting by its own time."""
    events, figures = run
    means, waiting = dull.accounts(events, figures.width)

    for at in {at for at, _ in waiting}:
        for column, part in enumerate(PARTS):
            assert figures.accounts.part_s[at, column] == pytest.approx(means[at, part])
        for rank in range(figures.world_size):
            assert figures.accounts.waiting_share[at, rank] == pytest.approx(waiting[at, rank])


def test_another_layout_of_the_same_events_gives_the_same_figures(tmp_path):
    """Keys in another order and without spaces, as another program may write them."""
    events = list(trained(30, 3))
    ours = read_figures(written(tmp_path / "ours", events))
    theirs = tmp_path / "theirs.jsonl"
    records = [dict(sorted(to_record(event).items())) for event in events]
    theirs.write_text("".join(json.dumps(one, separators=(",", ":")) + "\n" for one in records))
    figures = read_figures(theirs)

    assert figures.steps.wall_s == pytest.approx(ours.steps.wall_s, nan_ok=True)
    assert figures.accounts.part_s == pytest.approx(ours.accounts.part_s)
    assert figures.left_out == ""


def test_a_run_that_began_again_with_fewer_ranks_is_told_whole(tmp_path):
    """The lost rank has nothing to show from then on, and the loss is among the faults."""
    before = [event for event in trained(6, 3) if type(event).__name__ != "RunEnded"]
    after = [measured(step, [8, 8], [0.1, 0.2]) for step in range(6, 9)]
    lost = WorkerLost(5, 2, "node2", "silent for 60 s")
    figures = read_figures(written(tmp_path, [*before, lost, started(2), *after]))

    assert (figures.num_starts, figures.world_size, figures.num_steps) == (2, 3, 9)
    assert np.isnan(figures.steps.batch_size[6:, 2]).all()
    assert figures.steps.batch_size[6:, 0].tolist() == [8, 8, 8]
    assert [one.kind for one in figures.mishaps] == ["WorkerLost", "RunStarted"]
    assert not figures.is_ended


def test_faults_are_told_of_a_file_without_its_first_line(tmp_path):
    """As of the tail of a longer one; only the first start of a run is no fault."""
    stopped = BalancingStopped(1, 0, "a fault", "")
    steps = [measured(step, [8, 8], [0.1, 0.2]) for step in range(3)]
    tail = read_figures(written(tmp_path / "tail", [*steps, stopped, started(2)]))
    whole = read_figures(written(tmp_path / "whole", [started(2), *steps, stopped]))

    assert [one.kind for one in tail.mishaps] == ["BalancingStopped", "RunStarted"]
    assert [one.kind for one in whole.mishaps] == ["BalancingStopped"]


def test_training_began_again_after_the_newest_step(tmp_path):
    """A start has no step of its own, and accounts of older steps may be told last."""
    steps = [measured(step, [8, 8], [0.1, 0.2]) for step in range(50)]
    before = [started(2), Rebalanced(9, 1, (12, 4), "a"), *steps]
    late = accounted(47, [[0.1, 0.2]] * 9)
    (again,) = read_figures(written(tmp_path, [*before, late, started(2)])).mishaps

    assert (again.kind, again.step) == ("RunStarted", 49)


def test_the_largest_changes_are_kept_and_all_are_counted(tmp_path):
    """Of hundreds, the fifty that moved most samples, in their order."""
    sizes = np.random.default_rng(0).integers(0, 16, 300).tolist()
    plans = [
        Rebalanced(step, step, (size, 16 - size), f"reason {step}")
        for step, size in enumerate(sizes)
        if step
    ]
    steps = [measured(step, [8, 8], [0.1, 0.1]) for step in range(300)]
    figures = read_figures(written(tmp_path, [started(2), *steps, *plans]))

    assert (figures.num_changes, len(figures.changes)) == (299, 50)
    moved = [change.moved_share for change in figures.changes]
    assert min(moved) >= sorted(moved_by(plans))[-50]
    at = [change.event.step for change in figures.changes]
    assert at == sorted(at)
    assert figures.changes_by_stretch.sum() == 299


def test_a_plan_after_a_new_start_moves_samples_from_where_that_began(tmp_path):
    """From equal sizes, or from those that an earlier run had learnt; never from before."""
    kept = EstimatesRestored((True, True), "resumed", (12, 4))
    events = [
        *(started(2), Rebalanced(2, 1, (12, 4), "a"), measured(2, [12, 4], [0.1, 0.1])),
        *(started(2), Rebalanced(2, 1, (12, 4), "b"), measured(2, [12, 4], [0.1, 0.1])),
        *(started(2), kept, Rebalanced(2, 1, (13, 3), "c"), measured(2, [13, 3], [0.1, 0.1])),
    ]
    figures = read_figures(written(tmp_path, events))

    assert [change.moved_share for change in figures.changes] == [4 / 16, 4 / 16, 1 / 16]
    assert [change.before for change in figures.changes] == [None, None, (12, 4)]


def moved_by(plans):
    """The part of the samples that each plan moves, the first from equal sizes."""
    sizes = [(8, 8), *(plan.batch_size for plan in plans)]
    return [abs(now[0] - was[0]) / 16 for was, now in pairwise(sizes)]


def test_causes_are_added_up_over_diagnoses(tmp_path):
    """What each cost, by cause and rank; those without a verdict are counted."""

    def diagnosed(step, share, **told):
        lists = {"causes": ("input",), "ranks": (1,), "lost_share": (share,)}
        lists |= {"evidence": (f"at {step}",), "remedy": ("more workers",)} | told
        return WaitingDiagnosed(step, 10, 2.0, 0.5, 0.9, **lists)

    none = {name: () for name in ("causes", "ranks", "lost_share", "evidence", "remedy")}
    found = [diagnosed(10, 0.1), diagnosed(20, 0.3), diagnosed(30, 0.0, **none, no_verdict="few")]
    run = written(tmp_path, [started(2), measured(0, [8, 8], [0.1, 0.2]), *found])
    diagnoses = read_figures(run).diagnosed

    (cause,) = diagnoses.causes
    assert (cause.cause, cause.rank, cause.num) == ("input", 1, 2)
    assert cause.evidence == "at 20"
    assert cause.lost_s == pytest.approx(0.1 * 20 + 0.3 * 20)
    assert (diagnoses.num, diagnoses.num_without, diagnoses.no_verdict) == (3, 1, "few")


def test_a_step_that_several_diagnoses_are_about_counts_once(tmp_path):
    """They are about the newest minute, and the last one about the whole start."""

    def diagnosed(step, num_steps, **shares):
        lists = {"causes": tuple(shares), "ranks": (1,) * len(shares)}
        lists |= {"lost_share": tuple(shares.values())}
        lists |= {"evidence": ("it",) * len(shares), "remedy": ("",) * len(shares)}
        return WaitingDiagnosed(step, num_steps, 1.0, 0.5, 0.9, **lists)

    def costs(name, *events):
        steps = [started(2), measured(0, [8, 8], [0.1, 0.2])]
        run = written(tmp_path / name, [*steps, *events])
        return {one.cause: one.lost_s for one in read_figures(run).diagnosed.causes}

    first = [diagnosed(at, min(at - 2, 60), input=0.5) for at in range(12, 203, 10)]
    first += [diagnosed(212, 60, logging=0.2)]
    whole = diagnosed(1002, 1000, input=0.1)

    assert costs("cut", *first) == pytest.approx({"input": 100.0, "logging": 12.0})
    assert costs("ended", *first, whole) == pytest.approx({"input": 100.0, "logging": 12.0})
    again = [started(2), measured(0, [8, 8], [0.1, 0.2]), diagnosed(12, 10, input=0.5)]
    found = costs("again", *first, whole, *again)
    assert found == pytest.approx({"input": 105.0, "logging": 12.0})


def test_a_cause_holds_until_another_diagnosis_is_told(tmp_path):
    """To the end of the start too: a run tells one only if it names other causes."""

    def diagnosed(step, **shares):
        lists = {"causes": tuple(shares), "ranks": (1,) * len(shares)}
        lists |= {"lost_share": tuple(shares.values())}
        lists |= {"evidence": ("it",) * len(shares), "remedy": ("",) * len(shares)}
        return WaitingDiagnosed(step, 30, 0.2, 0.5, 0.9, **lists)

    def costs(name, *events):
        run = written(tmp_path / name, [started(2), *events])
        return {one.cause: one.lost_s for one in read_figures(run).diagnosed.causes}

    steps = [measured(step, [8, 8], [0.1, 0.2]) for step in range(500)]
    first = [*steps[:30], diagnosed(29, input=0.25), *steps[30:]]
    once = 0.25 * 0.2 * 500

    assert costs("killed", *first) == pytest.approx({"input": once})
    again = [started(2), *steps[:100], diagnosed(99, logging=0.1)]
    assert costs("again", *first, *again) == pytest.approx({"input": once, "logging": 0.6})
    other = [diagnosed(499, logging=0.1)]  # its own steps begin with the 470th
    found = costs("changed", *first, *other)
    assert found == pytest.approx({"input": 0.25 * 0.2 * 470, "logging": 0.6})
    gone = replace(diagnosed(499), no_verdict="little")
    assert costs("gone", *first, gone) == pytest.approx({"input": 0.25 * 0.2 * 470})


def test_links_and_shares_are_told_where_a_run_has_them(tmp_path):
    """The first and the newest measurement, and the plans; no section without any."""
    steps = [started(2), measured(0, [8, 8], [0.1, 0.2])]
    links = [LinksMeasured(at, (1e6, 2e6 + at), (1e6, 1e6)) for at in (0, 5)]
    shares = SharesPlanned(1, 1, (2**19, 2**19), 0.1, None, "links are unequal")
    with_links = read_figures(written(tmp_path / "with", [*steps, *links, shares])).links

    assert read_figures(written(tmp_path / "without", steps)).links is None
    assert (with_links.first, with_links.last) == tuple(links)
    assert list(with_links.shares) == [shares]


def test_accounts_of_several_short_steps_count_as_many(tmp_path):
    """The mean is of a step, not of an event."""
    spent_s = [[0.4, 0.2]] + [[0.0, 0.0]] * 8
    run = [started(2), measured(0, [8, 8], [0.1, 0.2]), accounted(0, spent_s, num_steps=4)]
    figures = read_figures(written(tmp_path, run))

    assert figures.accounts.part_s[0, 0] == pytest.approx(0.3 / 4)
    assert figures.accounts.num_steps == 4
