"""Steps of loops that read, update and evaluate in other orders than the usual one."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from evenstep._diagnosis import Phase

from .test_recorder import Rank, spent


@pytest.fixture
def rank():
    made = Rank()
    yield made
    made.log.close()


@pytest.fixture
def ddp(rank):
    """The rank's model, in a DDP of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DistributedDataParallel(rank.model)
    dist.destroy_process_group()


@pytest.mark.parametrize("wrapped", [lambda ddp: ddp, partial(torch.compile, backend="eager")])
def test_the_model_within_ddp_tells_that_it_evaluates(rank, ddp, wrapped):
    """`Trainer` calls `eval()` on that one alone, and has gradients at each hand-out."""
    rank.heard = wrapped(ddp)
    for _ in range(2):
        rank.fetch(1)
        rank.backward(rank.forward(10), 20)
        rank.step()
    rank.model.eval()
    for _ in range(3):
        rank.fetch(100, after=7)
    rank.model.train()
    rank.fetch(1)
    _, step = rank.recorder.take_records()

    assert spent(step)[Phase.EVALUATION] == 3 * 107
    assert spent(step)[Phase.INPUT] == 1


def test_a_model_that_trains_in_evaluation_mode_trains(rank, ddp):
    """As to keep the statistics of its norms: its batches are no evaluation's."""
    rank.heard, _ = ddp, rank.model.eval()
    for _ in range(3):
        rank.fetch(1)
        rank.backward(rank.forward(10), 20)
        rank.step()
    _, step = rank.recorder.take_records()

    assert spent(step) == {Phase.INPUT: 1, Phase.FORWARD: 10, Phase.BACKWARD: 20}
