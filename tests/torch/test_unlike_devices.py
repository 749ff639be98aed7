"""A CPU beside a CUDA card in one job, over gloo: each computes its part on its own device."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from evenstep.testing import run_workers
from evenstep.torch import Balancer

from .exactness import BATCH_SIZE, QUIET, order, samples
from .models import Mlp
from .plans import Restless

WORLD_SIZE = 2


def train(rank, devices):
    """Return the parameters after an epoch, the devices taking turns by rank."""
    device = torch.device(devices[rank])
    torch.manual_seed(0)
    model = DistributedDataParallel(Mlp().double().to(device))
    loader = DataLoader(samples(), batch_size=BATCH_SIZE, shuffle=True, generator=order())
    sizes = set()
    with Balancer(policy=Restless(), runtime=QUIET) as balancer:
        model, loader = balancer.prepare(model, loader)
        optimizer = torch.optim.AdamW(model.parameters())
        for x, y in loader:
            nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
            optimizer.zero_grad()
            sizes.add(balancer.batch_sizes)
    return [parameter.detach().cpu() for parameter in model.parameters()], sizes


def alone():
    """Return the parameters that one process has after the epoch, with torch's own loader."""
    torch.manual_seed(0)
    model = Mlp().double()
    optimizer = torch.optim.AdamW(model.parameters())
    size = BATCH_SIZE * WORLD_SIZE
    for x, y in DataLoader(samples(), batch_size=size, shuffle=True, generator=order()):
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize(
    "devices",
    [
        ("cpu", "cpu"),  # the same code where there is no card
        pytest.param(("cpu", "cuda:0"), marks=pytest.mark.gpu),
        pytest.param(("cuda:0", "cpu"), marks=pytest.mark.gpu),
    ],
    ids="-".join,
)
def test_parameters_are_those_of_one_process(devices):
    """Whatever computed which part, under plans that change at every step.

    Optimizers of unlike devices round differently, in plain DDP too.
    """
    (first, sizes), (second, _) = run_workers(WORLD_SIZE, train, devices)

    assert len(sizes) > 2
    for one, other, wanted in zip(first, second, alone(), strict=True):
        if len(set(devices)) == 1:
            assert torch.equal(one, other)
        torch.testing.assert_close(one, wanted, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(other, wanted, rtol=1e-9, atol=1e-12)
