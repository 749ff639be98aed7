"""What is random in a sample follows from the sample, and not from which rank computes it."""

import random
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from evenstep.testing import run_workers
from evenstep.torch import Balancer, Runtime

from .._tiers import Groups, slow_but
from .sample_seed_runs import LOOPS, Loop, broken_off, resumed, train, trained

SEEDED = Runtime(line_every=None, sample_seed=5)
FIRST = ("plain", "claims", "no seed")  # of `make test`
EXACT = [name for name in LOOPS if name != "no seed"]


@pytest.fixture(scope="module")
def alone():
    """The parameters that one process trains."""
    names = ("plain", "two loaders", "no seed")
    return trained(0, {name: LOOPS[name] for name in names}, plans=0)


@pytest.fixture(scope="module")
def split():
    """Those that 2 and 3 processes train, under unlike plans that change at every step."""
    return Groups(FIRST, LOOPS, on_ranks)


def on_ranks(names):
    """Return the parameters by the case and the number of ranks."""
    loops = {name: LOOPS[name] for name in names}
    found = {num: run_workers(num, trained, loops, num)[0] for num in (2, 3)}
    return {name: {num: found[num][name] for num in found} for name in names}


@pytest.mark.cluster
@pytest.mark.parametrize("loop", slow_but(FIRST, EXACT))
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_split_does_not_matter(alone, split, loop, num_ranks):
    """Augmentation and dropout included, the parameters are those of one process."""
    wanted = alone["plain"] if loop != "two loaders" else alone[loop]

    assert (split[loop][num_ranks] - wanted).abs().max() <= 1e-12


@pytest.mark.cluster
def test_without_a_seed_it_would(alone, split):
    """The control: each rank's own numbers give other parameters."""
    assert (split["no seed"][2] - alone["no seed"]).abs().max() > 1e-3


@pytest.mark.cluster
def test_a_run_goes_on_as_if_it_had_not_been_broken_off(alone, tmp_path):
    """In the middle of an epoch, and on another number of ranks."""
    run_workers(3, broken_off, Loop(), str(tmp_path))
    after = run_workers(2, resumed, Loop(), str(tmp_path))[0]

    assert (after - alone["plain"]).abs().max() <= 1e-12


def test_another_seed_draws_other_numbers(alone):
    """And the same one the same numbers, whatever torch's own seed is."""
    assert torch.equal(train(1, Loop()), alone["plain"])
    assert not torch.allclose(train(0, Loop(seed=8)), alone["plain"])


class Drawn(Dataset):
    """Samples that are nothing but drawn."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.tensor([float(torch.rand(())), np.random.rand(), random.random()])


class Batched(Drawn):
    """Likewise, for a data set that fetches several in one go."""

    def __getitems__(self, indices):
        return [self[index] for index in reversed(indices)][::-1]


def samples_of(data):
    """The samples of an epoch."""
    with Balancer(runtime=SEEDED) as balancer:
        _, loader = balancer.prepare(nn.Linear(3, 1), DataLoader(data, batch_size=4))
        return torch.cat(list(loader))


def test_samples_that_are_fetched_together_draw_by_themselves():
    """In whatever order the data set reads them."""
    assert torch.equal(samples_of(Batched()), samples_of(Drawn()))


def states():
    """The states of the generators that scripts draw from."""
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()


def test_the_random_states_of_the_script_stay():
    """Whatever samples draw."""
    with Balancer(runtime=SEEDED) as balancer:
        _, loader = balancer.prepare(nn.Linear(3, 1), DataLoader(Drawn(), batch_size=4))
        batches = iter(loader)
        drawn, before = [next(batches)], states()
        drawn.extend(batches)

        assert states() == before
    assert len(set(torch.cat(drawn).flatten().tolist())) == 36


class Stream(IterableDataset):
    """Without an index."""

    def __iter__(self):
        return iter(torch.ones(8, 1))


def test_streams_and_compiled_models_are_refused():
    """By ``prepare``: their samples have no place, and what they draw cannot be seen."""
    with Balancer(runtime=SEEDED) as balancer:
        with pytest.raises(ValueError, match="be left out with a stream"):
            balancer.prepare(nn.Linear(1, 1), DataLoader(Stream()), stream="same")
        with pytest.raises(ValueError, match=re.escape("compiled by `torch.compile`")):
            balancer.prepare(torch.compile(nn.Linear(1, 1), backend="eager"))


@pytest.mark.parametrize("seed", [-1, 1 << 63, True, 1.0, "sample"])
def test_a_seed_is_an_integer_in_range(seed):
    """All else is refused where it is given."""
    with pytest.raises(ValueError, match="from 0 to 2\\^63 - 1"):
        Runtime(sample_seed=seed)
