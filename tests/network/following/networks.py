"""Networks that change, for what follows them."""

from dataclasses import replace

import numpy as np

from evenstep.events import SharesPlanned
from evenstep.network import Aggregation, Links, OptimalShares, SharePlanner
from evenstep.network._plans._optimum import equal_shares
from evenstep.network.sim._shared_links import play_exchange

MBIT = 125_000


def collocated(size=4, num_bytes=8_000_000, num_chunks=16):
    """All are workers and servers."""
    return Aggregation(size, num_bytes, num_chunks=num_chunks)


def dedicated(workers=4, servers=4, num_bytes=8_000_000, num_chunks=16):
    """Workers first, then servers."""
    works = np.arange(workers + servers) < workers
    return Aggregation(
        workers + servers, num_bytes, num_chunks=num_chunks, is_worker=works, is_server=~works
    )


def mixed(workers=4, servers=2, num_bytes=8_000_000, num_chunks=16):
    """Workers, who sum too, then servers."""
    works = np.arange(workers + servers) < workers
    return Aggregation(workers + servers, num_bytes, num_chunks=num_chunks, is_worker=works)


def mbit(*rates):
    """Links of that many Mbit/s."""
    return Links(np.array(rates, np.float64) * MBIT)


def redrawn(size, *, seed, num_periods=6, period=20):
    """Links drawn from 20 to 155 Mbit/s every ``period`` steps."""
    random = np.random.default_rng(seed)
    drawn = [mbit(*random.uniform(20, 155, size)) for _ in range(num_periods)]
    return [links for links in drawn for _ in range(period)]


def equal_s(aggregation, links):
    """The seconds of each exchange with equal shares."""
    shares = equal_shares(aggregation)
    seconds = {id(each): play_exchange(aggregation, each, shares).exchange_s for each in links}
    return np.array([seconds[id(each)] for each in links])


def planned(report):
    """All changes of shares in what following links told."""
    return [event for event in report.events if isinstance(event, SharesPlanned)]


def errors(found, links):
    """How far the slower direction of each rank is off, as the logarithm of a ratio."""
    return np.log(found.bandwidth_bytes_per_s / links.bandwidth_bytes_per_s)


def followed_late(aggregation, links, *, delay, num_steps=50, factor=1.0):
    """Return a planner after some steps, and in which of them shares summed.

    Each plan begins so many steps after the exchange that it was made of. Exchanges by shares take
    ``factor`` times as long as the model says.
    """
    planner, generator = SharePlanner(OptimalShares(), aggregation), np.random.default_rng(0)
    plans, is_shared = [planner.plan], []
    for step in range(num_steps):
        plan = [each for each in plans if each.first_step <= step][-1]
        is_shared.append(plan.is_shared(step - plan.first_step))
        shares = plan.shares if is_shared[-1] else None
        done = play_exchange(
            aggregation, links, shares, plan_epoch=plan.epoch, noise=0.02, generator=generator
        )
        if shares is not None:
            done = replace(done, exchange_s=factor * done.exchange_s)
        planner.observe(step, done, next_step=step + delay)
        plans.append(planner.plan)
    return planner, is_shared
