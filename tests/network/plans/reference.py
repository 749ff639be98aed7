"""What the closed forms are compared with: every message counted by itself, and its program."""

import itertools
from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from scipy.optimize import linprog

from evenstep.network import Aggregation, Links

# Every case takes a linear program, or several.
fewer = settings(max_examples=max(1, settings.default.max_examples * 2 // 5))


def from_pairs(pair):
    """Links of which only pairs are known: each rank's own carries their sum."""
    own = np.where(np.eye(len(pair), dtype=bool), 0.0, pair)
    return Links(own.sum(axis=1), own.sum(axis=0), pair_bytes_per_s=pair)


PHASES = ("push", "pull", "both")


@dataclass(frozen=True)
class Case:
    """An aggregation and its links."""

    aggregation: Aggregation
    links: Links


@st.composite
def roles(draw, kind):
    """Who works and who serves."""
    if kind == "any":
        num_ranks = draw(st.integers(1, 6))
        role = draw(st.lists(st.sampled_from("wsb"), min_size=num_ranks, max_size=num_ranks))
        works, serves = np.array([r != "s" for r in role]), np.array([r != "w" for r in role])
        works[0] |= not works.any()
        serves[-1] |= not serves.any()
        return works, serves
    num_workers = draw(st.integers(2, 6))
    num_helpers = 0 if kind == "collocated" else draw(st.integers(1, 4))
    works = np.arange(num_workers + num_helpers) < num_workers
    return works, ~works if kind == "dedicated" else np.ones(len(works), np.bool_)


@st.composite
def cases(draw, kind="any", *, chunks=(None, 1, 2, 5, 40), symmetric=None, pairs=None, half=None):
    """Networks of every kind, but for what is asked for; integers, so that links tie."""
    works, serves = draw(roles(kind))
    size = len(works)
    total = draw(st.integers(1, 10**9))

    def bandwidths(*shape):
        most = draw(st.sampled_from([3, 40, 1000]))
        number = int(np.prod(shape))
        drawn = st.lists(st.integers(1, most), min_size=number, max_size=number)
        return np.array(draw(drawn), np.float64).reshape(shape) * 1e7

    def wanted(choice):
        return draw(st.booleans()) if choice is None else choice

    alike = wanted(symmetric)
    pair = bandwidths(size, size) if wanted(pairs) else None
    if pair is not None and alike:
        pair = np.minimum(pair, pair.T)
    links = Links(
        bandwidths(size),
        None if alike else bandwidths(size),
        pair_bytes_per_s=pair,
        latency_s=draw(st.sampled_from([0.0, 1e-4])),
        half_duplex=wanted(half),
    )
    aggregation = Aggregation(
        size,
        total,
        num_chunks=draw(st.sampled_from(chunks)),
        is_worker=works,
        is_server=serves,
    )
    return Case(aggregation, links)


def messages(aggregation, phase):
    """Every message as source, target and whose share it carries."""
    ranks = range(aggregation.world_size)
    for worker, server in itertools.product(ranks, ranks):
        if worker != server and aggregation.is_worker[worker] and aggregation.is_server[server]:
            if phase in ("push", "both"):
                yield worker, server, server
            if phase in ("pull", "both"):
                yield server, worker, server


def link_rows(case, phase):
    """The seconds of every link as coefficients of the shares."""
    aggregation, links = case.aggregation, case.links
    size, total = aggregation.world_size, aggregation.num_bytes
    up, down, pair = np.zeros((size, size)), np.zeros((size, size)), np.zeros((size, size, size))
    for source, target, server in messages(aggregation, phase):
        up[source, server] += total / links.up_bytes_per_s[source]
        down[target, server] += total / links.down_bytes_per_s[target]
        if links.pair_bytes_per_s is not None:
            pair[source, target, server] += total / links.pair_bytes_per_s[source, target]
    own = up + down if links.half_duplex else np.concatenate([up, down])
    return np.concatenate([own, pair.reshape(-1, size)])


def counted_s(case, shares):
    """Seconds of the exchange, link by link."""
    push, pull, both = (float((link_rows(case, phase) @ shares).max()) for phase in PHASES)
    chunks, latency_s = case.aggregation.num_chunks, case.links.latency_s
    if chunks is None:
        return both + 2 * latency_s
    return ((chunks - 1) * both + push + pull) / chunks + (chunks + 1) * latency_s


def program_s(case, weights=None):
    """The least seconds that any shares take, by linear programming over every link."""
    aggregation, chunks = case.aggregation, case.aggregation.num_chunks
    size, latency_s = aggregation.world_size, 0.0
    if weights is None:
        weights = [0, 0, 1] if chunks is None else [1 / chunks, 1 / chunks, 1 - 1 / chunks]
        latency_s = case.links.latency_s * (2 if chunks is None else chunks + 1)
    rows = [link_rows(case, phase) for phase in PHASES]
    unit_s = max(max(float(row.max()) for row in rows), 1e-300)
    blocks = []
    for index, row in enumerate(rows):
        times = np.zeros((len(row), 3))
        times[:, index] = -1
        blocks.append(np.concatenate([row / unit_s, times], axis=1))
    table = np.concatenate(blocks)
    answer = linprog(
        [0.0] * size + list(weights),
        A_ub=table,
        b_ub=np.zeros(len(table)),
        A_eq=[[1.0] * size + [0.0] * 3],
        b_eq=[1.0],
        bounds=[(0, float(serves)) for serves in aggregation.is_server] + [(0, None)] * 3,
        method="highs",
    )
    assert answer.success, answer.message
    return answer.fun * unit_s + latency_s


def simple(up, down=None, *, helpers=0, dedicated=False, chunks=None, pair=None, half=False):
    """A case in bytes per second, 1000 bytes a step, the last ``helpers`` ranks only serving."""
    up = np.array(up, np.float64) * 1000
    works = np.arange(len(up)) < len(up) - helpers
    aggregation = Aggregation(
        len(up),
        1000,
        num_chunks=chunks,
        is_worker=works,
        is_server=~works if dedicated else None,
    )
    down = None if down is None else np.array(down, np.float64) * 1000
    pair = None if pair is None else np.array(pair, np.float64) * 1000
    return Case(aggregation, Links(up, down, pair_bytes_per_s=pair, half_duplex=half))


def mesh(size, usual, *others):
    """Pairs that carry ``usual`` both ways, but for ``others``, each (rank, rank, bandwidth)."""
    pair = np.full((size, size), float(usual))
    for one, other, bandwidth in others:
        pair[one, other] = pair[other, one] = bandwidth
    return pair * 1000
