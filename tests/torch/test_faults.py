"""A worker that dies or hangs ends the others with an error that names it; other faults do not."""

import signal
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, final

import numpy as np
import pytest

from evenstep import Decision
from evenstep._telemetry import EventFile
from evenstep.policies import AbstractPolicy
from evenstep.testing import WorkerFailed, run_workers
from evenstep.torch import Runtime

from .._tiers import slow_but
from . import faults, own_collectives
from .faults import WATCHFUL, hang_in_the_all_reduce, leave_early, raise_on_one, train

pytestmark = pytest.mark.cluster
SILENT = Runtime(line_every=None)
KILL, STOP = signal.SIGKILL, signal.SIGSTOP


@pytest.mark.parametrize(
    ("victim", "sent"), slow_but([(2, KILL), (0, STOP)], product((0, 2), (KILL, STOP)))
)
def test_the_survivors_name_the_victim(victim, sent):
    """Killed or stopped, rank 0 or another: no hang, an error within the deadline."""
    answers = 2 if sent == STOP else 3  # a stopped process never says that it is
    results = run_workers(3, train, victim, sent, timeout_s=15, check=False, stop_after=answers)

    assert isinstance(results[victim], WorkerFailed)
    for rank in {0, 1, 2} - {victim}:
        message, named, seconds = results[rank]
        assert named == victim, message
        assert f"Rank {victim} on " in message
        assert "Restart the run from its last checkpoint" in message
        # Generous: what must not happen is the half hour that a collective would wait.
        assert seconds < WATCHFUL.deadline_s + 8


def test_a_collective_that_hangs_does_not_hold_the_others_for_ever(tmp_path):
    """Their all-reduce is broken off; a script without a `with` finds the name in its log."""
    results = run_workers(
        3, hang_in_the_all_reduce, str(tmp_path), timeout_s=20, check=False, stop_after=2
    )

    for rank in (0, 1):
        assert "gloo" in str(results[rank])
        assert "Rank 2 on " in (tmp_path / f"{rank}.log").read_text()


@pytest.mark.parametrize("sent", slow_but([KILL], [KILL, STOP]))
def test_a_worker_lost_in_an_evaluation_is_named(sent):
    """A collective of the balancer's own breaks or hangs like any other."""
    results = run_workers(
        2,
        faults.lose_one_in_an_evaluation,
        sent,
        timeout_s=20,
        check=False,
        stop_after=1 if sent == STOP else 2,
    )

    assert isinstance(results[0], str), results[0]
    assert "Rank 1 on " in results[0]


def test_all_collectives_of_the_balancers_own_are_watched():
    """Whoever is stuck in one is seen to be, and is noted to be out again after."""
    found = run_workers(2, own_collectives.watch, timeout_s=60)[1]

    assert found == {
        "share": (True, ["in", "out"]),
        "share_indices": (True, ["in", "out"]),
        "collect": (True, ["in", "out"]),
        "sum": (True, ["in", "out"]),
        "agree": (True, ["in", "out"]),
        "peers' share": (True, ["in", "out"]),
    }


@pytest.mark.parametrize(
    ("victim", "how"), slow_but([(1, "exit"), (0, "return")], product((0, 1), ("exit", "return")))
)
def test_a_rank_that_leaves_early_is_named(victim, how):
    """One that ends before the others is no silent hang either; a batch without use is no step."""
    results = run_workers(3, leave_early, victim, how, timeout_s=30)

    assert results[victim] == "left"
    for rank in {0, 1, 2} - {victim}:
        assert f"Rank {victim} on " in results[rank]
        assert "it ended its run after step 1" in results[rank]
        assert "The last step complete on all ranks is 1." in results[rank]


@pytest.mark.parametrize(("victim", "at"), [(0, 2), (1, 2), (0, 91), (1, 91)])
def test_an_exception_on_one_rank_is_told_to_all(victim, at):
    """By its type and its message's first line, with the newest step, also where plans hold."""
    results = run_workers(3, raise_on_one, victim, at, timeout_s=15)

    for rank in {0, 1, 2} - {victim}:
        assert f"Rank {victim} on " in results[rank]
        assert f"it raised ValueError: sample 17 has no label after step {at - 1}." in results[rank]
        assert f"The last step complete on all ranks is {at - 1}." in results[rank]
        assert "slow" not in results[rank]


def test_a_rank_whose_device_failed_says_so_and_keeps_its_events():
    """Such a device raises again whatever it is asked, as at the end of the run."""
    (own, events), (told, _) = run_workers(2, faults.fail_on_a_device, timeout_s=15)

    assert own == "CUDA error: device-side assert triggered"
    assert "Rank 0 on " in told
    assert f"it raised RuntimeError: {own} after step 2." in told
    assert events[-1] == "RunEnded"


def test_a_rank_that_hangs_while_its_heartbeats_go_on_is_named():
    """As an error on all others, with the line at which it hangs."""
    results = run_workers(3, faults.hang, timeout_s=60, check=False)  # it is interrupted

    for rank in (0, 1):
        assert "Rank 2 on " in results[rank]
        assert "it has not finished step 4 for 3 s while others wait" in results[rank]
        assert "faults.py:" in results[rank]
        assert "in forward" in results[rank]


def test_a_pause_of_all_ranks_is_no_hang():
    """An evaluation three times as long as a rank may keep the others waiting."""
    assert run_workers(2, faults.pause_together, timeout_s=30) == ["nothing happened"] * 2


def test_a_rank_stopped_for_less_than_the_deadline_comes_back():
    """Training goes on, nobody is lost, and the pause does not cost the rank its share."""
    results = run_workers(3, faults.stop_and_resume, 60, timeout_s=60)

    assert results[0] == results[1] == results[2]
    assert len(results[0]) == 60
    assert min(results[0][-1]) >= 5, results[0]  # of 8 at the equal split


@pytest.mark.slow
def test_a_worker_a_hundred_times_slower_goes_to_the_floor_and_comes_back():
    """Nobody is lost, and the sum stays what it was."""
    results = run_workers(3, faults.slow_for_a_while, 90, timeout_s=90)
    sizes = results[0]

    assert results[1] == results[2] == sizes
    assert {sum(step) for step in sizes} == {24}
    assert min(step[2] for step in sizes[10:32]) == 1
    assert sizes[-1][2] >= 5, sizes


def test_a_side_connection_that_breaks_ends_both_ranks_with_the_cause():
    """Each names the other: neither can tell a cut from a death."""
    for other, told in enumerate(reversed(run_workers(2, faults.cut_off, timeout_s=20))):
        assert f"Rank {other} on " in told
        assert "its connection closed: it ended, was killed or cut off" in told
        assert "The last step complete on all ranks is " in told


def test_a_sink_that_blocks_or_raises_does_not_stop_training():
    """Each is told of once, and the others go on."""
    settings = {"runtime": Runtime(line_every=None, hooks=(faults.block, faults.refuse))}
    results = run_workers(2, faults.with_settings, settings, timeout_s=60)

    assert [result[0] for result in results] == [30, 30]
    assert len(results[0][1]) == 2, results[0][1]
    assert "refuse" in results[0][1][0]
    assert "failed on RunStarted (KeyError" in results[0][1][0]
    assert "block" in results[0][1][1]
    assert "did not end within" in results[0][1][1]
    assert results[1][1] == []


@contextmanager
def mounted(folder, options):
    """A small file system; skips the test where none can be mounted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        done = False
    if not done:
        pytest.skip("mounting needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_stops_the_events_and_not_training(tmp_path):
    """One warning names the file and the reason; what was written can be read."""
    with mounted(tmp_path / "disk", "size=8k") as disk:
        settings = {"runtime": replace(SILENT, run_dir=str(disk))}
        results = run_workers(2, faults.with_settings, settings, timeout_s=60)
        told = [type(event).__name__ for event in EventFile(disk)]

    assert [result[0] for result in results] == [30, 30]
    assert len(results[0][1]) == 1, results[0][1]
    assert "events.jsonl" in results[0][1][0]
    assert "No space left on device" in results[0][1][0]
    assert "training continues" in results[0][1][0]
    assert told[0] == "RunStarted"
    assert told[-1] != "RunEnded"


def test_a_folder_that_cannot_be_written_to_stops_the_events_and_not_training(tmp_path):
    """One warning with the remedy, and the run begins."""
    with mounted(tmp_path / "disk", "ro") as disk:
        settings = {"runtime": replace(SILENT, run_dir=str(disk))}
        results = run_workers(2, faults.with_settings, settings, timeout_s=60)

    assert [result[0] for result in results] == [30, 30]
    assert len(results[0][1]) == 1, results[0][1]
    assert "No events are written to" in results[0][1][0]
    assert "`Runtime(run_dir=...)`" in results[0][1][0]


def test_a_folder_that_vanishes_stops_the_events_and_not_training(tmp_path):
    """Nothing is written to where nobody can read it, without a word."""
    results = run_workers(2, faults.vanishing_folder, str(tmp_path / "run"), timeout_s=60)

    assert [result[0] for result in results] == [30, 30]
    assert len(results[0][1]) == 1, results[0][1]
    assert "the file was deleted" in results[0][1][0]


@final
@dataclass(frozen=True)
class Breaking(AbstractPolicy[Any]):
    """Plans well five times and never again."""

    name = "breaking"

    def init(self, cluster):
        return Decision(np.array([8, 8]), 0, "start")

    def update(self, cluster, timings, state):
        if state == 5:
            raise ZeroDivisionError("a mistake of the user's")
        return Decision(np.array([8 - state % 2, 8 + state % 2]), state + 1, "moved")


def test_a_policy_that_fails_is_told_of_once_and_training_goes_on():
    """On rank 0, where a person sees it, with the line for people switched off."""
    settings = {"policy": Breaking(), "runtime": SILENT}
    results = run_workers(2, faults.with_settings, settings, timeout_s=60)

    assert [result[0] for result in results] == [30, 30]
    assert len(results[0][1]) == 1, results[0][1]
    assert "the last good plan stays (ZeroDivisionError" in results[0][1][0]
    assert results[1][1] == []
