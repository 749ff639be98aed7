"""Ranks that are slow behind others: in what comes and goes, and against earlier times."""

import re

import numpy as np
import pytest

from evenstep._diagnosis import Cause, Phase

from .runs import names, shown, steps


def slow(by, since=0):
    """What a rank computes longer from a step on, in forward and backward alike."""
    return lambda step: {"FORWARD": by // 3, "BACKWARD": by * 2 // 3} if step >= since else {}


@pytest.mark.parametrize("others", [2, 3])
def test_a_slow_rank_does_not_hide_behind_what_changes_from_step_to_step(others):
    """A long step comes on one rank or another, by turns that a seed draws."""
    whose = np.random.default_rng(1).integers(others, size=150)

    def late(step, rank):
        more = slow(27_000 * (rank == 1) + 120_000 * (rank == whose[step]))
        return more(step)

    found = shown(steps(150, others, late=late)).diagnose()

    assert sorted(names(found), key=str) == [(Cause.ROTATING, None), (Cause.SLOW_WORKER, 1)]


@pytest.mark.parametrize("whole_run", [False, True])
def test_of_two_slow_ranks_both_are_named_if_they_became_slow_one_after_the_other(whole_run):
    """Of two ranks the faster one is usual, were it not for earlier steps."""
    each = slow(45_000, since=20), slow(81_000, since=60)
    told = shown(steps(160, 2, late=lambda step, rank: each[rank](step))).diagnose(
        whole_run=whole_run
    )

    assert names(told) == [(Cause.SLOW_WORKER, 1), (Cause.SLOW_WORKER, 0)]
    assert "times as long as was usual before" in told.found[1].evidence


@pytest.mark.parametrize("before", [0, 90_000], ids=["larger inputs", "samples of a slow rank"])
def test_ranks_that_change_together_are_not_slow(before):
    """From step 60 on both take longer; or the one that was slow gives samples to the other."""
    later = slow(45_000)

    def late(step, rank):
        return later(step) if step >= 60 else slow(before * rank)(step)

    told = shown(steps(600, 2, late=late)).diagnose(whole_run=True)

    assert (Cause.SLOW_WORKER, 0) not in names(told)


def test_ranks_whose_parts_change_are_not_held_against_earlier_times():
    """As under a balancer: one became slow, and then the other one got samples of it."""
    each = slow(45_000, since=20), slow(81_000, since=60)
    told = shown(
        steps(160, 2, late=lambda step, rank: each[rank](step)), parts_stay=False
    ).diagnose()

    assert (Cause.SLOW_WORKER, 0) not in names(told)


def test_how_much_longer_a_rank_computes_is_said_where_it_is_little():
    """Five percent of it, on the rank that waits for input besides."""
    small, disk = {"FORWARD": 1_500, "BACKWARD": 3_000}, {"INPUT": 45_000}
    found = steps(60, 4, late=lambda step, rank: small | disk if rank == 2 else {})
    (_, slow) = shown(found).diagnose(whole_run=True).found

    assert (slow.cause, slow.rank) == (Cause.SLOW_WORKER, 2)
    assert re.match(r"it computes [4-6](\.\d)? % longer than the others, throughout", slow.evidence)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_whose_computing_is_not_known_have_no_level(world_size):
    """As where computing and waiting cannot be told apart: no division by nothing."""
    found = steps(80, world_size, late=lambda step, rank: {"REST": 40_000 * rank})
    for rows in found:
        for row in rows:
            row[Phase.REST] += row[Phase.FORWARD] + row[Phase.BACKWARD]
            row[Phase.FORWARD] = row[Phase.BACKWARD] = 0

    told = shown(found).diagnose()

    assert (Cause.SLOW_WORKER, world_size - 1) not in names(told)
