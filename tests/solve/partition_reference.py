"""Dull references for partitions: all assignments, a mixed-integer program, all orders of runs."""

from itertools import permutations, product

import numpy as np
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from evenstep.solve import WorkerCosts


@st.composite
def problem(draw, most_samples=40, most_workers=5, padded=False):
    """Lengths with the features L and L**2, and workers of unlike speeds."""
    num_workers = draw(st.integers(1, most_workers))
    length = np.array(draw(st.lists(st.integers(1, 3000), min_size=1, max_size=most_samples)))
    slope = np.array(
        [draw(st.tuples(st.integers(1, 9), st.integers(0, 3))) for _ in range(num_workers)]
    )
    intercept = np.array([draw(st.integers(0, 2000)) for _ in range(num_workers)])
    features = length if padded == "one" else np.stack([length, length**2 // 512], 1)
    return features, WorkerCosts(slope, intercept)


def by_enumeration(features, workers):
    """Return the earliest end over all assignments that leave no worker empty."""
    cost = features @ workers.slope.T
    best = None
    for owner in product(range(workers.world_size), repeat=len(features)):
        if len(set(owner)) < min(workers.world_size, len(features)):
            continue
        load = workers.intercept.copy()
        np.add.at(load, list(owner), cost[np.arange(len(features)), list(owner)])
        best = load.max() if best is None else min(best, load.max())
    return best


def by_integer_program(features, workers):
    """Return a time that no end is before, within 0.5 % of the earliest one, by `milp`.

    One switch per sample and worker, of `scipy.optimize.milp`.
    """
    cost = features @ workers.slope.T
    num_samples, num_workers = cost.shape
    num_switches = num_samples * num_workers
    goal = np.zeros(num_switches + 1)
    goal[-1] = 1
    once = np.zeros((num_samples, num_switches + 1))
    ends = np.zeros((num_workers, num_switches + 1))
    some = np.zeros((num_workers, num_switches + 1))
    for sample, rank in product(range(num_samples), range(num_workers)):
        switch = sample * num_workers + rank
        once[sample, switch] = some[rank, switch] = 1
        ends[rank, switch] = cost[sample, rank]
    ends[:, -1] = -1
    least = 1 if num_samples >= num_workers else 0
    found = milp(
        goal,
        integrality=np.append(np.ones(num_switches), 0),
        bounds=Bounds(0, np.append(np.ones(num_switches), np.inf)),
        constraints=[
            LinearConstraint(once, 1, 1),
            LinearConstraint(ends, -np.inf, -workers.intercept),
            LinearConstraint(some, least, np.inf),
        ],
        options={"mip_rel_gap": 0.005},
    )
    return found.mip_dual_bound


def by_runs(features, workers):
    """Return the earliest end over all runs of the sorted samples and orders of the workers."""
    cost = (features @ workers.slope.T)[np.lexsort(features.T)[::-1]]
    num_samples, num_workers = cost.shape
    least = 1 if num_samples >= num_workers else 0
    best = np.inf
    for order in permutations(range(num_workers)):
        end = np.full(num_samples + 1, np.inf)  # with the first so many samples dealt out
        end[0] = 0
        for rank in order:
            now = np.full(num_samples + 1, np.inf)
            for first, last in product(range(num_samples + 1), repeat=2):
                if last - first >= least:
                    took = workers.intercept[rank]
                    took += (last - first) * cost[first, rank] if last > first else 0
                    now[last] = min(now[last], max(end[first], took))
            end = now
        best = min(best, end[-1])
    return best
