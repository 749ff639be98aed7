"""What forecasts of links would save over `LinkTracker`, which takes links to stay as they are.

Simulated, and idealised for the forecasts: they see what every link carried in each step, up to 5 %
of noise, where the tracker has to tell it from the times of transfers. The shares of a step are the
best for links as they are expected. Shares for links that are known beforehand are the bound.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._common import Row, main, progress
from evenstep.network import Aggregation, Links, OptimalShares
from evenstep.network._following._link_tracker import LinkTracker, ObservedExchange
from evenstep.network.sim._played import play_exchange
from evenstep.prediction import Ar, Ema, Holt, LocalLevel, Seasonal, WindowMedian
from evenstep.sim import read_trace

NUM_BYTES, NUM_CHUNKS, NUM_WORKERS = 2_000_000, 8, 4
NOISE = 0.05  # standard deviation of the logarithm of a measured link
FIRST = 20  # steps before it, in which nothing is known, are left out
BYTES_PER_MBIT = 125e3
LEAST_GAIN = 0.05  # what new shares have to save before `SharePlanner` adopts them
TRACE = Path(__file__).parent / "traces" / "contention.csv"
PREDICTORS: dict[str, Any] = {
    "newest": Ema(1.0),
    "mean": Ema(0.3),
    "median": WindowMedian(5),
    "level": LocalLevel(),
    "trend": Holt(alpha=0.5, beta=0.2, damping=0.98),
    "ar": Ar(),
    "seasonal": Seasonal(),
}
Rates = Any  # Mbit/s, ``(num_steps, world_size)``


@dataclass(frozen=True)
class Changes:
    """How links change.

    Attributes:
        what: in words.
        make: returns the rates, given a generator, a number of steps and of hosts.
    """

    what: str
    make: Callable[[np.random.Generator, int, int], Rates]


def redrawn(every: int) -> Changes:
    """Return links that are redrawn from 20 to 155 Mbit/s."""

    def make(generator: np.random.Generator, num_steps: int, num_hosts: int) -> Rates:
        draws = generator.uniform(20, 155, (num_steps // every + 1, num_hosts))
        return draws.repeat(every, axis=0)[:num_steps]

    return Changes(f"redrawn every {every} steps", make)


def by_the_clock(period: int) -> Changes:
    """Return links that others use in two fifths of every period."""

    def make(generator: np.random.Generator, num_steps: int, num_hosts: int) -> Rates:
        free = generator.uniform(60, 155, num_hosts)
        used = free * generator.uniform(0.15, 0.5, num_hosts)
        phase = generator.integers(0, period, num_hosts)
        is_used = (np.arange(num_steps)[:, None] + phase) % period < 0.4 * period
        return np.where(is_used, used, free)

    return Changes(f"used by others with a period of {period} steps", make)


def waves(period: int) -> Changes:
    """Return links that become faster and slower by 60 %, smoothly."""

    def make(generator: np.random.Generator, num_steps: int, num_hosts: int) -> Rates:
        mean = generator.uniform(40, 120, num_hosts)
        turns = np.arange(num_steps)[:, None] / period + generator.uniform(0, 1, num_hosts)
        return mean * (1 + 0.6 * np.sin(2 * np.pi * turns))

    return Changes(f"waves of {period} steps", make)


def recorded() -> Changes:
    """Return links that change as recorded speeds of CPUs under contention did."""

    def make(generator: np.random.Generator, num_steps: int, num_hosts: int) -> Rates:
        speed = 1 / read_trace(TRACE).workload.slope_s
        begins = generator.integers(0, len(speed) - num_steps, num_hosts)
        columns = [
            speed[begin : begin + num_steps, host % speed.shape[1]]
            for host, begin in enumerate(begins)
        ]
        return 80 * np.stack(columns, axis=1) / speed.mean()

    return Changes("as speeds of CPUs were recorded", make)


CHANGES = (
    redrawn(10),
    redrawn(40),
    by_the_clock(10),
    by_the_clock(20),
    by_the_clock(60),
    waves(20),
    waves(60),
    recorded(),
)


def play(
    aggregation: Aggregation,
    links: Links,
    expected: Links,
    generator: np.random.Generator | None = None,
) -> ObservedExchange:
    """Return an exchange over links, by shares for links as they are expected.

    Its timings have noise where there is a generator. An exchange by all-reduce shows no links, so
    there are always shares.
    """
    policy = OptimalShares()
    shares = policy.update(aggregation, expected, policy.init(aggregation).state).shares
    noise = 0.0 if generator is None else NOISE
    return play_exchange(aggregation, links, shares, noise=noise, generator=generator)


def exchange_s(aggregation: Aggregation, rates: Rates, expected: Rates) -> float:
    """Return what such an exchange takes."""
    return play(aggregation, links_of(rates), links_of(expected)).exchange_s


def links_of(rates: Rates) -> Links:
    """Return links of so many Mbit/s, both ways."""
    return Links(rates * BYTES_PER_MBIT, rates * BYTES_PER_MBIT)


def over_bound(aggregation: Aggregation, rates: Rates, seed: int) -> dict[str, float]:
    """Return by which factor the exchanges of each way to plan take longer than the bound."""
    generator = np.random.default_rng(seed)
    states = {name: one.init(rates.shape[1]) for name, one in PREDICTORS.items()}
    took_s, least_s = dict.fromkeys(("tracker", *PREDICTORS), 0.0), 0.0
    tracker = LinkTracker.of(links_of(rates[0]))
    for step, now in enumerate(rates):
        if step >= FIRST:
            least_s += exchange_s(aggregation, now, now)
            for name, one in PREDICTORS.items():
                took_s[name] += exchange_s(aggregation, now, one.predict(states[name]))
        done = play(aggregation, links_of(now), tracker.links, generator)
        took_s["tracker"] += done.exchange_s if step >= FIRST else 0.0
        if done.transfers is not None:
            tracker = tracker.update(done.transfers, only_serves=~aggregation.is_worker)
        seen = now * np.exp(generator.normal(0, NOISE, len(now)))
        for name, one in PREDICTORS.items():
            states[name] = one.update(states[name], seen)
    return {name: seconds / least_s for name, seconds in took_s.items()}


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Compare forecasts on each kind of change, with and without dedicated servers."""
    num_steps, num_seeds = (60, 1) if options.quick else (300, 2)
    for kind, num_servers in (("collocated", 0), ("dedicated", 3)):
        world_size = NUM_WORKERS + num_servers
        works = np.arange(world_size) < NUM_WORKERS
        aggregation = Aggregation(
            world_size,
            NUM_BYTES,
            num_chunks=NUM_CHUNKS,
            is_worker=works,
            is_server=~works if num_servers else works,
        )
        for changes in CHANGES:
            progress(f"links {changes.what}, {kind}")
            runs = []
            for seed in range(num_seeds):
                generator = np.random.default_rng(100 + seed)
                rates = changes.make(generator, num_steps, world_size)
                runs.append(over_bound(aggregation, rates, seed))
            mean = {name: float(np.mean([run[name] for run in runs])) for name in runs[0]}
            best = min(PREDICTORS, key=lambda name: mean[name])
            yield Row(
                f"links {changes.what}, {kind}",
                f"reported: of use where a forecast saves {LEAST_GAIN:.0%}",
                {**mean, "best": best, "best_saves": 1 - mean[best] / mean["tracker"]},
            )


if __name__ == "__main__":
    main(__doc__, rows)
