"""What machines have to spare reaches the policies that ask, and is not even read for others."""

import ast

import pytest

from evenstep.policies import Auto, Deadband, Equal
from evenstep.policies._by_name import reads_resources
from evenstep.testing import run_workers

from .machines import NUM_STEPS, Curious, Nosy, watched


@pytest.mark.cluster
def test_every_workers_machine_is_told_with_its_step():
    """Rank 0's policy sees both machines, as they were at the end of each step."""
    (reasons, num_looks), (_, theirs) = run_workers(2, watched, True, True)
    told = [ast.literal_eval(reason) for reason in reasons if reason != "start"]

    assert num_looks == theirs == NUM_STEPS
    # The first step warms up and is not shown, so the policy begins with the second look.
    assert told == [([n / 100] * 2, [1000, 2000]) for n in range(2, NUM_STEPS)]


@pytest.mark.cluster
def test_nobody_looks_for_a_policy_that_does_not_ask():
    """It would cost a tenth of a millisecond a step."""
    for reasons, num_looks in run_workers(2, watched, False, True):
        assert set(reasons) == {"start", "None"}
        assert num_looks == 0


@pytest.mark.cluster
def test_this_process_is_read_by_default():
    """A share of the CPUs and some bytes, from a live machine."""
    (reasons, _), _ = run_workers(2, watched, True, False)

    for reason in reasons[2:]:
        free_cpu, free_memory = ast.literal_eval(reason)
        assert all(0 <= share <= 1 for share in free_cpu)
        assert all(size > 2**20 for size in free_memory)


def test_who_asks_is_found_at_any_depth():
    """In a wrapped policy too."""
    assert reads_resources(Deadband(Nosy(Curious()), 0.1))
    assert not any(map(reads_resources, (Auto(), Equal(), Deadband(Nosy(None), 0.1))))
