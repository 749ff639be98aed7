"""Networks that change, for what follows them."""

import numpy as np

from evenstep.events import SharesPlanned
from evenstep.network import Aggregation, Links
from evenstep.network._plans._optimum import equal_shares
from evenstep.network.sim._played import play_exchange

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
