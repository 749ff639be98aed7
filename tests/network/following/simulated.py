"""The figures on following links: ``python -m tests.network.following.simulated``."""

import numpy as np

from evenstep.network import OptimalShares
from evenstep.network.sim import follow_links, known_links

from .networks import collocated, dedicated, equal_s, redrawn

BEST = OptimalShares(margin=0)


def followed(aggregation, *, period, noise, num_seeds=4, num_periods=8):
    """Parts of the knowing plan's gain over equal shares: had, and possible one step late."""
    had, ceiling = [], []
    for seed in range(num_seeds):
        size = aggregation.world_size
        links = redrawn(size, seed=seed, num_periods=num_periods, period=period)
        equal, known = equal_s(aggregation, links), known_links(BEST, aggregation, links)
        found = follow_links(BEST, aggregation, links, noise=noise, seed=seed).exchange_s
        late = known.copy()
        late[::period] = found[::period]
        had.append((equal - found).sum() / (equal - known).sum())
        ceiling.append((equal - late).sum() / (equal - known).sum())
    return np.mean(had), np.mean(ceiling)


def main():
    """Print what the page on shares says."""
    for name, aggregation in (("collocated", collocated()), ("dedicated", dedicated())):
        for period, noise in ((20, 0.1), (20, 0.2), (20, 0.3), (10, 0.1), (40, 0.1)):
            had, ceiling = followed(aggregation, period=period, noise=noise)
            print(f"{name}, every {period} steps, noise {noise}: {had:.1%}, ceiling {ceiling:.1%}")


if __name__ == "__main__":
    main()
