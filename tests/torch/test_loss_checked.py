"""A loss that is not what the balancer was told ends the run on all ranks; others never do."""

import pytest

from evenstep.testing import run_workers

from .._tiers import Groups, slow_but
from .loss_runs import RIGHT, WRONG, outcomes

pytestmark = pytest.mark.cluster

FIRST = ["a mean over samples", "ignored targets", "a sum"]
REMEDIES = dict.fromkeys(WRONG, 'use `Balancer(loss_reduction="sum")`') | {
    "a mean for a sum": 'Leave `loss_reduction="sum"` out',
    "mixed": "`balancer.weight(means) + sums`",
}


@pytest.fixture(scope="module")
def right():
    """What ended the training of each of two ranks, by the case."""

    def run(cases):
        ranks = run_workers(2, outcomes, dict.fromkeys(cases, "right"))
        return {case: [found[case] for found in ranks] for case in cases}

    return Groups(FIRST, RIGHT, run)


@pytest.mark.parametrize("case", slow_but(FIRST, RIGHT))
def test_a_loss_that_is_as_it_was_said_is_let_be(right, case):
    assert right[case] == ["", ""]


@pytest.mark.parametrize("case", slow_but(["a sum", "a mean for a sum", "mixed"], WRONG))
def test_another_one_ends_all_ranks_with_the_remedy(case):
    """Silent, it would train with a gradient that is up to 70 % off."""
    found = run_workers(2, outcomes, {case: "wrong"}, allow_faults=True)

    for texts in found:
        assert texts[case].startswith("`Balancer(loss_reduction=")
        assert REMEDIES[case] in texts[case]


def test_the_check_can_be_turned_off():
    found = run_workers(2, outcomes, {"a sum": "wrong"}, False)

    assert found == [{"a sum": ""}] * 2
