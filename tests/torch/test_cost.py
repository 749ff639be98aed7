"""Samples assigned by cost: the same gradient, each sample once, and errors that say what to do."""

import logging
import re
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from evenstep.claims import Hybrid
from evenstep.exceptions import EvenstepWarning
from evenstep.testing import WorkerFailed, run_workers
from evenstep.torch import Balancer, Bounds, Cost, Runtime

from .._tiers import Groups, slow_but
from .cost_runs import LENGTH, NUM_SAMPLES, lengths_in, train

NUM_STEPS = -(-NUM_SAMPLES // 24)
LOOPS = {
    "plain": {},
    "steps, loader workers": {"kind": "steps", "workers": 1},
    "mean over tokens": {"tokens": True},
    "FSDP2, mean over tokens": {"tokens": True, "kind": "fsdp2"},
    "FSDP2": {"kind": "fsdp2"},
}
COSTS = {
    "additive": Cost(LENGTH, padded=False),
    "padded": Cost(LENGTH, padded=True),
    "lengths seen in batches": Cost(from_batch=lengths_in),
}
RUNS = list(product(LOOPS, COSTS))
FIRST = [
    ("plain", "additive"),
    ("steps, loader workers", "lengths seen in batches"),
    ("mean over tokens", "padded"),
    ("FSDP2, mean over tokens", "additive"),
]


def runs(cost, world_size=3, **settings):
    """Train on some ranks; return what each found."""
    return run_workers(
        world_size, _train, cost, settings | {"world_size": world_size}, timeout_s=120
    )


def _train(rank, cost, settings):
    return train(rank, cost, **settings)


@pytest.fixture(scope="module")
def trained():
    """What each of three ranks found by a loop and a cost, and what one process did."""

    def run(cases):
        ranks = run_workers(3, _train_all, cases, timeout_s=150)
        loops = list(dict.fromkeys(loop for loop, _ in cases))
        (alone,) = run_workers(1, _train_alone, loops)
        by_case = zip(cases, zip(*ranks, strict=True), strict=True)
        return {(loop, cost): (found, alone[loop]) for (loop, cost), found in by_case}

    return Groups(FIRST, RUNS, run)


def _train_all(rank, cases):
    return [train(rank, COSTS[cost], **LOOPS[loop]) for loop, cost in cases]


def _train_alone(rank, loops):
    plain = {"kind": "plain", "workers": 0, "world_size": 1}
    return {loop: train(rank, None, **LOOPS[loop] | plain) for loop in loops}


@pytest.mark.cluster
@pytest.mark.parametrize(("loop", "cost"), slow_but(FIRST, RUNS))
def test_training_is_that_of_one_process(trained, loop, cost):
    """Parameters after two epochs within 1e-12, each sample once in each, as plans change."""
    found, alone = trained[loop, cost]

    for parameters, _, _ in found:
        error = (parameters - alone[0]).norm() / alone[0].norm()
        assert error <= 1e-12
    for step, whole in enumerate(alone[1]):
        assert sorted(index for one in found for index in one[1][step]) == sorted(whole)
    assert found[0][2] or "FSDP2" in loop


@pytest.mark.cluster
def test_no_forward_exceeds_its_cap():
    """Tokens of a forward, where one sample alone may be as long as that."""
    cap = int(LENGTH.max())

    assert max(max(rank) for rank in run_workers(2, _largest, cap)) <= cap


def _largest(rank, cap):
    sizes = []
    with Balancer(cost=Cost(LENGTH, max_size=cap), runtime=Runtime(line_every=None)) as balancer:
        stock = DataLoader(TensorDataset(torch.tensor(LENGTH)), batch_size=12)
        model, loader = balancer.prepare(nn.Linear(1, 1), stock)
        for step in loader.steps():
            for (length,) in step:
                sizes.append(int(length.sum()))
                model(length[:, None].float()).mean().backward()
    return sizes


def test_samples_that_have_become_longer_than_the_cap_are_warned_of():
    """Lengths are read once: where a collator laid as many tokens into a row, and lays more now."""
    lengths = [20, 30, 40, 10] * 4
    stock = DataLoader(lengths, batch_size=8, collate_fn=lambda own: torch.ones(1, sum(own)))
    cost, sizes = Cost(lengths, max_size=80), []
    with Balancer(cost=cost, runtime=Runtime(line_every=None)) as balancer:
        _, loader = balancer.prepare(nn.Linear(1, 1), stock)
        sizes += [tokens.numel() for step in loader.steps() for tokens in step]
        lengths[:] = [length + 70 for length in lengths]
        with pytest.warns(
            EvenstepWarning, match=r"size of \d+ where `Cost\(max_size=80\)`"
        ) as told:
            sizes += [tokens.numel() for step in loader.steps() for tokens in step]

    assert max(sizes[: len(sizes) // 2]) <= 80 < max(sizes)
    assert len(told) == 1
    assert "`balancer.close()`" in str(told[0].message)


@pytest.mark.cluster
def test_a_run_goes_on_with_other_ranks(tmp_path):
    """Three ranks, then two: none lost, none twice, and the parameters of one process."""
    cost = Cost(LENGTH)
    before = runs(cost, epochs=1, folder=tmp_path, stop_after=3)
    after = runs(cost, world_size=2, epochs=1, folder=tmp_path)
    (alone,) = runs(None, world_size=1, epochs=1)

    steps = [step for found in (before, after) for _, seen, _ in found for step in seen]
    trained = [index for step in steps for index in step]
    assert sorted(trained) == list(range(NUM_SAMPLES))
    assert (after[0][0] - alone[0]).norm() <= 1e-12 * alone[0].norm()


@pytest.mark.cluster
def test_lengths_that_differ_between_ranks_are_refused():
    """In `prepare`, by name."""
    with pytest.raises(WorkerFailed, match=r"`Balancer\(cost=\.\.\.\)` .*rank 1"):
        run_workers(2, _unlike)


def _unlike(rank):
    stock = DataLoader(TensorDataset(torch.zeros(8, 1)), batch_size=2)
    lengths = np.arange(8) + rank
    with Balancer(cost=lengths, runtime=Runtime(line_every=None)) as balancer:
        balancer.prepare(nn.Linear(1, 1), stock)


class Table:
    """A data set with columns, as Hugging Face's have them."""

    column_names = ["length", "text"]  # noqa: RUF012

    def __len__(self):
        return 5

    def __getitem__(self, key):
        return {"length": [3, 1, 4, 1, 5], "text": list("abcde")}[key]


@pytest.mark.parametrize(
    ("of", "dataset"),
    [
        ([3, 1, 4, 1, 5], range(5)),
        ("length", Table()),
        (lambda index: [3, 1, 4, 1, 5][index], range(5)),
        ("length", Subset(Subset(Table(), [4, 3, 2, 1, 0]), [4, 3, 2, 1, 0])),
    ],
    ids=["array", "column", "function", "column of a subset"],
)
def test_lengths_come_from_where_they_are(of, dataset):
    """Features of some samples: 1, L and its square."""
    found = Cost(of).table(dataset).features(np.array([4, 0]))

    assert found.tolist() == [[1, 5, 25], [1, 3, 9]]


@pytest.mark.parametrize(("padded", "sizes"), [(False, [3, 5, 4]), (True, [5, 5, 5])])
def test_samples_add_up_to_the_size_of_their_forward(padded, sizes):
    """As `max_size` counts it: where they are padded, each as long as the longest."""
    costs = Cost([3, 5, 4], padded=padded).table(range(3))
    features = costs.features(np.arange(3))

    assert costs.sizes(features).tolist() == sizes
    assert costs.total([features])[1] == sum(sizes)


@pytest.mark.parametrize("kind", [np.int64, np.uint64, np.uint8])
def test_features_of_ones_own_stand_beside_the_count(kind):
    """Nodes and edges, say; whole numbers of any kind."""
    table = np.array([[2, 7], [3, 9]], kind)
    found = Cost(table).table(range(2)).features(np.array([1]))

    assert found.tolist() == [[1, 3, 9]]
    assert found.dtype == np.int64


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Cost([1.5, 2.0]), r"`Cost\(of=\.\.\.\)` must be integers of at least 0.*float64"),
        (lambda: Cost([1, 1 << 25]), r"must be at most 16777216, .*33554432.*larger unit"),
        (lambda: Cost([[1 << 49]]), r"must be at most 281474976710656, .*larger unit"),
        (lambda: Cost([1, -2]), r"integers of at least 0, got int64 from -2 on"),
        (lambda: Cost([]), r"one length for each sample.*shape \(0,\)"),
        (lambda: Cost(3), r"one length for each sample.*shape \(\)"),
        (lambda: Cost([[1, 2]], padded=True), "where nothing is padded"),
        (lambda: Cost([1], max_size=0), r"`Cost\(max_size=\.\.\.\)` .*at least 1, got 0"),
        (lambda: Cost([1], max_samples=0), r"`Cost\(max_samples=\.\.\.\)` .*at least 1, got 0"),
        (lambda: Cost([1], max_size=8e3), r"an integer of at least 1, got 8000\.0"),
        (lambda: Cost([1], max_size="8192"), r"an integer of at least 1, got '8192'"),
        (lambda: Cost([1, 2]).table(range(3)), "one entry for each of the data set's 3 samples"),
        (
            lambda: Cost([3, 99, 4], max_size=50).table(range(3)),
            "50 where sample 1 has 99. Cut the sample, leave it out, or raise",
        ),
        (lambda: Cost([1], from_batch="length"), r"`Cost\(of=\.\.\.\)` must be left out"),
        (lambda: Cost(from_batch=[1]), r"must name a field, or be a function .*got \[1\]"),
        (lambda: Cost(from_batch="length", max_size=9), "be left out with `from_batch`.*got 9"),
        (
            lambda: Balancer().prepare_eval(_parts()[1], cost=Cost(from_batch="length")),
            r"be known before an evaluation.*got Cost\(from_batch=length",
        ),
        (lambda: Cost("size").table(Table()), r"name a column.*'size' for a Table"),
        (lambda: Cost("size").table(range(3)), r"'size' for a range with no columns"),
        (lambda: Balancer(cost=[1], policy="lbb"), r"`Balancer\(policy=\.\.\.\)` must be left out"),
        (lambda: Balancer(cost=[1], bounds=Bounds(min=2)), r"`Balancer\(bounds=\.\.\.\)`"),
        (
            lambda: Balancer(cost=[1], runtime=Runtime(claims=Hybrid())),
            r"`Runtime\(claims=\.\.\.\)` must be left out",
        ),
        (lambda: Balancer(cost="length").prepare(*_parts()), "with no columns"),
    ],
)
def test_bad_input_is_refused(make, words):
    """By the argument's name, with the value and the remedy."""
    with pytest.raises(ValueError, match=re.compile(words, re.DOTALL)):
        make()


def test_caps_are_refused_where_a_rank_has_one_forward():
    """A plain loop: what a rank gets may not fit into it."""
    quiet = Runtime(line_every=None)
    with Balancer(cost=Cost([1] * 4, max_size=9), runtime=quiet) as balancer:
        _, loader = balancer.prepare(*_parts())
        with pytest.raises(ValueError, match=r"be used in a loop over `loader.steps\(\)`"):
            next(iter(loader))


def _parts():
    return nn.Linear(1, 1), DataLoader(TensorDataset(torch.zeros(4, 1)), batch_size=2)


@pytest.mark.cluster
@pytest.mark.parametrize("workers", [0, 2])
def test_large_steps_are_assigned_ahead_and_alike(workers):
    """4,096 samples on 2 ranks: each once, by the loader's thread or by one ahead of it."""
    steps = zip(*run_workers(2, _large, workers), strict=True)

    for step in steps:
        assert len(set().union(*step)) == sum(map(len, step)) == 4096


def _large(rank, workers):
    length = np.arange(3 * 4096) % 97 + 1
    stock = DataLoader(
        TensorDataset(torch.arange(len(length))), batch_size=2048, num_workers=workers
    )
    with Balancer(cost=length, runtime=Runtime(line_every=None)) as balancer:
        model, loader = balancer.prepare(nn.Linear(1, 1), stock)
        seen = []
        for (index,) in loader:
            seen.append(index.tolist())
            model(index[:, None].float()).mean().backward()
    return seen


@pytest.mark.cluster
@pytest.mark.parametrize("lockstep", [False, True])
def test_an_evaluation_is_shared_out_by_cost(lockstep):
    """Each sample once, batches within the loader's size, and ranks within 5 % of each other."""
    found = run_workers(3, _evaluated, lockstep)
    indices = [index for batches in found for batch in batches for index in batch]
    tokens = [sum(LENGTH[index] for batch in batches for index in batch) for batches in found]

    assert sorted(indices) == list(range(NUM_SAMPLES))
    assert max(len(batch) for batches in found for batch in batches) <= 16
    assert max(tokens) <= 1.05 * min(tokens)
    assert len({len(batches) for batches in found}) == 1 or not lockstep


def _evaluated(rank, lockstep):
    held_out = DataLoader(TensorDataset(torch.arange(NUM_SAMPLES)), batch_size=16)
    with Balancer(runtime=Runtime(line_every=None)) as balancer:
        evaluation = balancer.prepare_eval(held_out, lockstep=lockstep, cost=LENGTH)
        batches = [index.tolist()[: evaluation.count] for (index,) in evaluation]
        assert len(batches) == len(evaluation)
    return batches


@pytest.mark.parametrize(
    ("first", "second", "counted"),
    [([7] * 8, [7] * 7 + [8], True), ([7] * 7 + [8], [7] * 8, False)],
    ids=["all of the first loader alike", "one of them longer"],
)
def test_samples_that_cost_the_same_are_counted(caplog, first, second, counted):
    """A plan by cost says nothing else, and takes more time; the first loader decides for all."""
    with (
        caplog.at_level(logging.INFO, "evenstep"),
        Balancer(cost=Cost("length", padded=False), runtime=Runtime(line_every=None)) as balancer,
    ):
        model = balancer.prepare(nn.Linear(1, 1))
        loaders = [
            balancer.prepare(DataLoader([{"length": one} for one in some], batch_size=4))
            for some in (first, second)
        ]
        for batch in loaders[0]:
            model(batch["length"][:, None].float()).mean().backward()

    said = [one for one in caplog.records if "cost the same" in one.getMessage()]
    assert len(said) == counted
    assert [loader.costs is None for loader in loaders] == [counted, counted]


def test_samples_that_cost_the_same_may_have_caps():
    """Those are by cost."""
    with Balancer(cost=Cost([7] * 8, max_size=14), runtime=Runtime(line_every=None)) as balancer:
        _, loader = balancer.prepare(nn.Linear(1, 1), DataLoader(torch.ones(8, 1), batch_size=8))
        sizes = [[len(batch) for batch in step] for step in loader.steps()]

    assert sizes == [[2, 2, 2, 2]]
