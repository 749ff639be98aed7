"""A collective of the balancer's own is noted as one, and names who broke it."""

import pytest

from evenstep.exceptions import WorkerLostError
from evenstep.torch._exchange._side_group import Bracket

from ..exchange.exchanges import alone


def break_by_closing(other):
    """Be the collective that a rank left."""
    other.close()
    raise RuntimeError("port 4711")


def test_a_collective_of_the_balancers_own_names_who_broke_it():
    """Before a run is open its error stays as it is; later it is the loss that is behind it."""
    exchange, other = alone()
    bracket = Bracket()
    with pytest.raises(RuntimeError, match="port 4711"), bracket():
        raise RuntimeError("port 4711")
    bracket.watch = exchange.lost_ranks

    with pytest.raises(WorkerLostError, match="Rank 1 on b was lost") as caught, bracket():
        break_by_closing(other)  # in here: a loss known before needs no broken collective
    assert str(caught.value.__cause__) == "port 4711"
    with pytest.raises(WorkerLostError), bracket():  # known before: nobody goes in
        pytest.fail("a collective without the lost worker never ends")
    assert exchange.lost_ranks.verdict(within_s=0) is None, "it is outside again"
    exchange.close()


def test_a_collective_inside_of_another_leaves_that_one_noted():
    """As between the forward and the backward of a sharded model."""
    exchange, other = alone()
    bracket = Bracket()
    bracket.watch = exchange.lost_ranks
    exchange.lost_ranks.enter_collective()
    with bracket():
        pass

    other.close()
    assert exchange.lost_ranks.verdict(within_s=5).rank == 1
    exchange.close()
