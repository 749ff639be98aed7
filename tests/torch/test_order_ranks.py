"""Orders between real ranks: no collective, errors on all of them, nobody waits for a lost one."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from torch.utils.data import DataLoader

from evenstep.testing import run_workers
from evenstep.torch._data.loaders._balanced import BalancedLoader
from evenstep.torch._data.loaders._base import StepContext

from ..exchange.exchanges import star
from . import order_runs
from .loader_fakes import FixedPlan, Items, Mail, Recorder, Session, flat


@pytest.mark.parametrize("kind", ["order", "same", "sharded"])
def test_a_fetch_makes_no_collective(kind):
    """A prefetching thread may ask for a batch while the main thread is in a collective."""
    for num_steps, counts in run_workers(2, order_runs.collectives_in_next, kind, timeout_s=120):
        assert num_steps >= 10
        assert counts == {0}


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_rank_may_be_an_epoch_ahead_of_the_other(ahead):
    """Rank 0 waits for nobody, and the other until what it needs is here."""
    ends, asked = star(2), threading.Event()

    def share(end, key, ints):
        if ints is None:
            asked.set()
        return end.box.share((0, *key), ints)

    loaders = [
        BalancedLoader(
            DataLoader(Items(29), batch_size=2, shuffle=True),
            StepContext(
                ranks=Mail(rank, 2, partial(share, end)),
                session=Session(FixedPlan(3, 1, tail=(0, 1)), Recorder()),
                global_batch_size=4,
            ),
            block_size=5,
        )
        for rank, end in enumerate(ends)
    ]

    def epochs(loader):
        return [[batch[0].tolist() for batch in loader] for _ in range(2)]

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(epochs, loaders[ahead])
        if ahead == 0:
            first.result(30)
        else:
            assert asked.wait(30)
        second = pool.submit(epochs, loaders[1 - ahead])
        results = [first.result(30), second.result(30)]
    for end in ends:
        end.channel.close()
    for end in ends:
        end.channel.close()
    for mine, other in zip(*results, strict=True):
        stand_in = 1  # of the rank without a sample in the short last step
        assert len(flat(mine) + flat(other)) == 29 + stand_in
        assert set(flat(mine) + flat(other)) == set(range(29))


def test_a_sampler_that_fails_late_ends_the_loop_on_all_ranks():
    """Rank 0 with its error, the others with its words, at the same step."""
    (mine, error), (other, words) = run_workers(2, order_runs.break_late, timeout_s=120)

    assert mine == other > 50  # where a later block is drawn
    assert error == "ConnectionError: the table of the samples is gone"
    assert words == f"RuntimeError: the sampler failed on rank 0: {error}"


def test_nobody_waits_for_the_order_of_a_rank_that_has_left():
    """It raises, and names who is gone."""
    results = run_workers(2, order_runs.leave_before_the_order, timeout_s=60)

    assert results[0] == "left"
    assert "Rank 0 on " in results[1]
    assert "it ended its run" in results[1]
