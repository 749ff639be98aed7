"""The figures on following links and on planning jointly: ``python -m tests.control.simulated``."""

import numpy as np

from evenstep import AffineTime, Cluster
from evenstep.control import plan_jointly
from evenstep.sharding import Aggregation, Links, OptimalShares
from evenstep.sim import follow_links, known_links

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


def jointly(size, samples, chunks, overlap, num_cases=40):
    """Separate over joint step times: median, most, and how often joint plans are taken."""
    random, ratios = np.random.default_rng(1), []
    for _ in range(num_cases):
        links = Links(random.uniform(3, 20, size) * 1e6)
        times = AffineTime(
            np.zeros(size), np.exp(random.uniform(np.log(0.005), np.log(0.04), size))
        )
        aggregation = Aggregation(size, 10**6, num_chunks=chunks)
        plan = plan_jointly(times, Cluster(size, samples), aggregation, links, overlap=overlap)
        ratios.append(plan.separate_s / plan.step_s)
    return np.median(ratios), np.max(ratios), np.mean(np.array(ratios) > 1)


def main():
    """Print what the page on shares says."""
    for name, aggregation in (("collocated", collocated()), ("dedicated", dedicated())):
        for period, noise in ((20, 0.1), (20, 0.2), (20, 0.3), (10, 0.1), (40, 0.1)):
            had, ceiling = followed(aggregation, period=period, noise=noise)
            print(f"{name}, every {period} steps, noise {noise}: {had:.1%}, ceiling {ceiling:.1%}")
    for case in ((4, 64, 8, 0.0), (4, 64, 8, 2 / 3), (8, 256, 16, 0.0)):
        median, most, taken = jointly(*case)
        print(f"joint {case}: median {median:.3f}, most {most:.3f}, taken {taken:.0%}")


if __name__ == "__main__":
    main()
