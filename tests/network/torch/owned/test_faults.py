"""Ranks that part, die or stop while parameters are exchanged."""

import signal

import pytest

from evenstep.testing._workers import run_workers

from . import faults, runs

pytestmark = pytest.mark.cluster

KILL, STOP = signal.SIGKILL, signal.SIGSTOP


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        ("settings", "On rank 1, `param_groups` has other settings: ch"),
        ("gradients", "On rank 1, other parameters have a gradient: red"),
        ("plans", "On rank 1, another split was given: decide it on"),
        ("place", "On rank 1, another method was called: step, rep"),
    ],
)
def test_a_rank_that_parts_is_named_and_nothing_changes(how, problem):
    """On all ranks, before a parameter is touched; once mended, training goes on."""
    for said in run_workers(3, runs.part, how):
        assert said.startswith(problem)


@pytest.mark.parametrize(
    ("sent", "timeout_s", "act"),
    [(KILL, 30.0, "step"), (KILL, 30.0, "replan"), (STOP, 1.5, "step")],
)
def test_a_rank_lost_in_the_middle_is_named_everywhere(sent, timeout_s, act):
    """At once where it died, after the timeout where it only stopped; no thread is left."""
    stops = 2 if sent is STOP else None
    run = (sent, timeout_s, act)
    ranks = run_workers(3, faults.train, *run, check=False, stop_after=stops)

    for rank in (0, 2):
        text, named, seconds, threads, again = ranks[rank]
        assert text.startswith("Rank 1 was lost in the exchange of parameters: ")
        assert "raise `ShardedOptimizer(timeout_s=...)`" in text
        assert (named, threads, again) == (1, "", text)
        assert seconds < (8.0 if timeout_s > 8 else 1.5 * timeout_s + 1)


def test_an_error_of_one_ranks_optimizer_ends_all():
    """It comes out there as it is; the others hear who failed."""
    ranks = run_workers(3, faults.fail)

    assert ranks[1] == ("ZeroDivisionError", "in the optimizer")
    for rank in (0, 2):
        assert ranks[rank][0] == "WorkerLostError"
        assert ranks[rank][1].startswith("Rank 1 was lost in the exchange of parameters: ")
