"""What fails inside evenstep, and is not needed for the gradient, costs the balancing alone."""

import pytest

from evenstep.events import BalancingStopped, PolicyFailed
from evenstep.testing import run_workers

from .faulty import FAILS_AT, UNEQUAL, train

pytestmark = pytest.mark.cluster

NUM_FULL = 6  # and a short step after them


def sizes_of(results):
    """Return the sizes that all ranks had in the full steps, which they computed."""
    assert [sizes for _, sizes in results[0]["sizes"]] == [s for _, s in results[1]["sizes"]]
    for rank, result in enumerate(results):
        full = result["sizes"][:NUM_FULL]
        assert [num for num, _ in full] == [sizes[rank] for _, sizes in full]
    return [sizes for _, sizes in results[0]["sizes"][:NUM_FULL]]


@pytest.mark.parametrize(
    ("what", "rank", "problem"),
    [
        ("planner", 0, "internal fault of evenstep (AttributeError"),
        ("reader", 1, "Reader failed (OSError: no such counter)"),
    ],
)
def test_all_ranks_go_on_with_equal_sizes_from_the_same_step(what, rank, problem):
    """The gradient stays that of one process; it is said once, and who is to blame."""
    results = run_workers(2, train, what, allow_faults=True)

    assert sizes_of(results) == [UNEQUAL] * (FAILS_AT + 1) + [(8, 8)] * 2
    assert [result["error"] <= 1e-12 for result in results] == [True, True]
    (stopped,) = results[0]["events"]
    assert isinstance(stopped, BalancingStopped)
    assert (stopped.step, stopped.rank) == (FAILS_AT, rank)
    assert stopped.problem.startswith(problem)
    assert not results[0]["learnt"]
    logged = results[rank]["logged"]
    assert len(logged) == 1
    assert problem in logged[0]
    assert "Traceback" in logged[0]
    assert ("Please report it" in logged[0]) == (what == "planner")
    assert results[0]["measured"][-1] == NUM_FULL


def test_a_policy_of_the_users_own_is_named_and_the_plan_stays():
    """Its mistake is none of evenstep's: it is asked again at the next step."""
    results = run_workers(2, train, "policy")

    assert sizes_of(results) == [UNEQUAL] * NUM_FULL
    assert [result["error"] <= 1e-12 for result in results] == [True, True]
    failed = results[0]["events"]
    assert [type(event) for event in failed] == [PolicyFailed] * 3
    assert {(event.policy, event.problem) for event in failed} == {
        ("Mine", "ZeroDivisionError: integer division or modulo by zero")
    }
    assert results[0]["learnt"]
    (logged,) = results[0]["logged"]
    assert "the policy Mine failed" in logged
