"""A balancer's state: taken up by a new run, and refused where it comes too late."""

from __future__ import annotations

import io

import pytest
import torch

from evenstep.testing import run_workers
from evenstep.torch import Balancer

from .restarts import speeds


def written_and_read(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.cluster
def test_a_restarted_run_begins_with_the_sizes_it_had():
    """Its first step is balanced, where a new run's is not."""
    (state, before, nothing), (elsewhere, _, _) = run_workers(2, speeds, None, 1)
    assert nothing == []
    assert before[0] == (12, 12)
    assert before[-1][1] < 8
    assert elsewhere == {}  # rank 0 plans, and writes checkpoints

    (_, after, (event,)), _ = run_workers(2, speeds, written_and_read(state), 1)
    assert (event.policy, event.known) == ("resumed", (True, True))
    assert after[0] == event.batch_size
    assert after[0][1] < 8

    unused = Balancer()  # a run that is stopped before it has begun forgets nothing
    unused.load_state_dict(state)
    assert unused.state_dict() == state


def test_before_a_run_there_is_nothing_to_know():
    """A state of nothing loads, and changes nothing."""
    state = written_and_read(Balancer().state_dict())
    balancer = Balancer()
    balancer.load_state_dict(state)

    assert balancer.state_dict() == state


@pytest.mark.parametrize(
    "state",
    [
        *(None, [], {}, {"format": "x"}, {"format": "evenstep-balancer-1"}),
        *({"estimates": 3}, {"estimates": "{"}, {"estimates": "[]"}),
    ],
)
def test_something_else_is_refused(state):
    """With what to do instead."""
    with pytest.raises(ValueError, match=r"Balancer.load_state_dict.*measured again within"):
        Balancer().load_state_dict(state)


def test_a_run_under_way_takes_no_state():
    """It would come too late."""
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    with Balancer() as balancer:
        loader = DataLoader(TensorDataset(torch.randn(8, 2)), batch_size=4)
        model, loader = balancer.prepare(nn.Linear(2, 1), loader)
        for (x,) in loader:
            model(x).mean().backward()
        with pytest.raises(ValueError, match="come before the first loop"):
            balancer.load_state_dict(Balancer().state_dict())
