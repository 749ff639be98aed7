"""What shares gain on links drawn at random: ``python -m tests.network.plans.simulated``."""

import numpy as np

from evenstep.network import (
    Aggregation,
    Links,
    OptimalShares,
    ProportionalShares,
    exchange_s,
    optimal_shares,
    plan_shares,
)

from .reference import from_pairs

NUM_DRAWS = 300


def gains_on_meshes(size):
    """How many times as fast as equal shares: proportional and optimal, medians over meshes."""
    random = np.random.default_rng(size)
    aggregation = Aggregation(size, 10**6, num_chunks=None)
    gains = []
    for _ in range(NUM_DRAWS):
        above = np.triu(random.uniform(20, 155, (size, size)), 1)
        links = from_pairs(above + above.T + np.eye(size))
        equal_s = exchange_s(aggregation, links, shares=np.full(size, 1 / size))
        decisions = (
            policy.update(aggregation, links, policy.init(aggregation))
            for policy in (ProportionalShares(), OptimalShares(margin=0))
        )
        gains.append(
            [equal_s / exchange_s(aggregation, links, shares=each.shares) for each in decisions]
        )
    return np.median(gains, axis=0)


def losses_by_error(error):
    """Times over the optimum with bandwidths measured wrong, and with equal shares: means."""
    random = np.random.default_rng(8)
    aggregation, losses = Aggregation(8, 10**6, num_chunks=None), []
    for _ in range(NUM_DRAWS):
        bandwidths = random.uniform(10, 40, 8)
        measured = bandwidths * np.exp(random.normal(0, error, 8))
        links = Links(bandwidths)
        best, wrong = (optimal_shares(aggregation, Links(each)) for each in (bandwidths, measured))
        seconds = [
            exchange_s(aggregation, links, shares=shares)
            for shares in (best, wrong, np.full(8, 1 / 8))
        ]
        losses.append([seconds[1] / seconds[0], seconds[2] / seconds[0]])
    return np.mean(losses, axis=0)


def plans_by_chunks(bandwidths):
    """The gain of a plan over a ring, and whether it is carried out, chunk by chunk."""
    links = Links(np.array(bandwidths, np.float64))
    for chunks in (1, 2, 4, 8, 64, None):
        aggregation = Aggregation(len(bandwidths), 10**6, num_chunks=chunks)
        shares = optimal_shares(aggregation, links)
        plan = plan_shares(aggregation, links, shares=shares)
        yield chunks, plan.gain, plan.falls_back


def main():
    """Print what the page on shares says."""
    for size in (4, 6, 9, 16):
        print(f"mesh of {size}: proportional, optimal", gains_on_meshes(size).round(2))
    for error in (0.1, 0.25, 0.5):
        print(f"error {error}: wrong, equal", losses_by_error(error).round(2))
    for bandwidths in ([10] * 4, [10, 10, 10, 1], [10, 10, 8, 8], [100] * 4 + [25] * 4):
        for chunks, gain, falls_back in plans_by_chunks(bandwidths):
            print(bandwidths, chunks, f"{gain:.2f}", "falls back" if falls_back else "")


if __name__ == "__main__":
    main()
