"""Ranks without data that only sum."""

import threading

import numpy as np
import pytest

from evenstep.network import Split
from evenstep.network._torch._orders import OrderBook, Orders
from evenstep.network._torch._pipeline import BucketJob
from evenstep.network._torch._reducer import ShardedReducer
from evenstep.testing import run_workers

from . import runs
from .memory import MemoryTransport, Network

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize(
    ("workers", "shares"),
    [
        ([0, 1, 2], [0, 0, 0, 0.7, 0.3]),  # servers alone, unlike
        ([1, 3], [0.2, 0.3, 0.0, 0.5]),  # mixed, and the lead is not rank 0
    ],
)
def test_servers_sum_what_workers_have(workers, shares):
    """By any split the same bits, by all-reduce nearly; they leave when training ends."""
    ranks = run_workers(len(shares), runs.serve, workers, shares)
    first = ranks[workers[0]]["gradients"][0]

    for worker in workers:
        sharded, turned, plain, equal = ranks[worker]["gradients"]
        assert np.array_equal(sharded, first)
        assert np.array_equal(turned, first)
        assert np.array_equal(equal, first)
        assert abs(plain - first).max() < 1e-6
    counted = [rank["traffic"] for rank in ranks]
    sent, received = zip(*counted, strict=True)
    assert sum(sent) == sum(received)
    if shares[0] == 0:
        assert ranks[0]["sent"] == first.nbytes  # a worker that sums nothing: once, and no more


def test_an_order_by_an_older_plan_is_refused():
    """A server that is told of epoch 3 after 4 says so, and goes."""
    network = Network()
    book = OrderBook(MemoryTransport(network, 0, 2), [1])
    orders = Orders(MemoryTransport(network, 1, 2), 0)
    for epoch in (4, 3):
        split = Split.of(np.array([0.5, 0.5]), epoch=epoch)
        book.send(BucketJob(None, 10, runs.FLOATS[0], split, print, ends=True))

    first = orders.next(print)
    assert (first.num_elements, first.wire, first.ends) == (10, runs.FLOATS[0], True)
    assert first.split == Split.of(np.array([0.5, 0.5]), epoch=4)
    with pytest.raises(ValueError, match=r"`ShardedReducer.serve\(\)` must be given no plan older"):
        orders.next(print)


def test_a_server_alone_ends_when_the_lead_does():
    """Also where no bucket ever came, and closing once more does no harm."""
    network = Network()
    lead = ShardedReducer(MemoryTransport(network, 0, 2), workers=[0])
    server = ShardedReducer(MemoryTransport(network, 1, 2), workers=[0])
    with lead:
        thread = threading.Thread(target=server.serve, daemon=True)
        thread.start()
    thread.join(20)
    server.close()

    assert not thread.is_alive()
