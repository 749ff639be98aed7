"""What cannot be profiled, or not at that time, is refused; what was loaded is left in force."""

import json

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from evenstep.torch import Balancer, Bounds

from .profiles import QUIET, alone


class Stream(IterableDataset):
    """Samples that are gone once they are read."""

    def __iter__(self):
        yield from torch.randn(24, 4)


def steps(batch):
    """A closure that trains, by mistake."""
    with torch.no_grad():
        weight.add_(1.0)
    return weight.sum()


weight = nn.Parameter(torch.ones(2))


class Own(nn.Module):
    """A model of that one parameter."""

    def __init__(self):
        super().__init__()
        self.weight = weight


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"closure": 3}, r"`Balancer.profile\(closure=...\)` must be callable, got 3"),
        ({"repeats": 0}, r"`Balancer.profile\(repeats=...\)` must be at least 1, got 0"),
        ({"repeats": 1.5}, r"must be at least 1, got 1.5"),
        ({"samples": []}, r"`Balancer.profile\(samples=...\)` must hold a sample"),
        (
            {"sizes": [4]},
            r"`Balancer.profile\(sizes=...\)` must hold at least two sizes, got \[4\]",
        ),
        ({"sizes": [4, 4]}, "must hold at least two sizes"),
        ({"sizes": [0, 4]}, r"must be a list of integers of at least 1, got \[0, 4\]"),
        ({"sizes": [2.0, 4.0]}, "must be a list of integers"),
        ({"sizes": 4}, "must be a list of integers"),
        (
            {"sizes": [4, 6], "bounds": Bounds(vary="count", granularity=4)},
            "must be multiples of 4 with",
        ),
    ],
)
def test_what_cannot_be_profiled_is_refused(asked, message):
    """By name, with the rule and the remedy."""
    with pytest.raises(ValueError, match=message):
        alone(**asked)


def test_a_file_that_is_no_profile_is_refused(tmp_path):
    """By its name, with what is wrong with it."""
    path = tmp_path / "profile.json"
    path.write_text('{"schema": "evenstep.profile"}')

    with pytest.raises(ValueError, match=r"path=...\)` must .*profile.json.*Delete it"):
        alone(path=path)


def test_a_closure_that_trains_is_refused():
    """Rather than a profile that has changed the model unnoticed."""
    with pytest.raises(RuntimeError, match="changed parameters"):
        alone(steps, model=Own())


def test_a_stream_is_not_read():
    """What it gave would be missing in training; given samples will do."""
    with Balancer(16, runtime=QUIET) as balancer:
        stock = DataLoader(Stream(), batch_size=16)
        model, loader = balancer.prepare(nn.Linear(4, 1), stock, stream="same")
        with pytest.raises(ValueError, match=r"`Balancer.profile\(samples=...\)` must be given"):
            balancer.profile(lambda batch: model(batch).mean())

        found = balancer.profile(
            lambda batch: model(batch).mean(), samples=list(torch.randn(3, 4)), sizes=[1, 16]
        )
        assert found.sizes.tolist() == [1, 16]
        assert sum(len(batch) for batch in loader) == 24


def test_there_is_a_time_for_it():
    """After `prepare`, before the first loop, and not after `close`."""
    balancer = Balancer(runtime=QUIET)

    def closure(batch):
        return model(batch[0]).mean()

    with balancer:
        with pytest.raises(RuntimeError, match="`prepare` the model and the loader first"):
            balancer.profile(closure)
        stock = DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=16)
        model, loader = balancer.prepare(nn.Linear(4, 1), stock)
        balancer.profile(closure)
        for batch in loader:
            closure(batch).backward()
        with pytest.raises(RuntimeError, match="before the first loop"):
            balancer.profile(closure)
    with pytest.raises(RuntimeError, match="was closed"):
        balancer.profile(closure)


def test_a_loaded_state_outlives_a_profile():
    """It comes from steps that were run; a second profile replaces the first."""
    stock = DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=16)

    def closure(batch):
        return model(batch[0]).mean()

    with Balancer(runtime=QUIET) as balancer:
        model, loader = balancer.prepare(nn.Linear(4, 1), stock)
        balancer.profile(closure)
        first = _learnt(balancer)
        balancer.profile(closure)
        assert _learnt(balancer) is not None
        for batch in loader:
            closure(batch).backward()
        trained, policy = balancer.state_dict(), _learnt(balancer)["policy"]
    assert first["policy"] == ""

    with Balancer(runtime=QUIET) as balancer:
        model, loader = balancer.prepare(nn.Linear(4, 1), stock)
        balancer.load_state_dict(trained)
        balancer.profile(closure)
        assert _learnt(balancer)["policy"] == policy != ""


def _learnt(balancer):
    return json.loads(balancer.state_dict()["estimates"])["learnt"]
