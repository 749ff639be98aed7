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


def test_several_updates_on_one_batch_are_one_step(rank):
    """As where a discriminator learns from a batch, and then a generator: a hand-out ends it."""
    for _ in range(10):
        rank.fetch(5)
        for num_samples in (128, 64):
            rank.backward(rank.forward(10, num_samples=num_samples), 20)
            rank.step(1)
    steps = rank.records()

    assert [record.num_samples for record in steps] == [128 + 64] * 9
    assert spent(steps[1]) == {
        Phase.INPUT: 5,
        Phase.FORWARD: 20,
        Phase.BACKWARD: 40,
        Phase.OPTIMIZER: 2,
    }


def test_the_last_batch_of_a_loader_that_fetches_ahead_is_a_step(rank):
    """One batch ahead, as Accelerate's: the loader has ended before the last batch is used."""
    for _ in range(2):
        rank.fetch(1)
        for number in range(3):
            if number < 2:
                rank.fetch(1)
            else:
                rank.log.input_begins()
                rank.log.input_ends(is_there=False)
            rank.backward(rank.forward(10), 20)
            rank.step()
    steps = rank.records()

    assert [spent(record)[Phase.BACKWARD] for record in steps] == [20] * 5


def test_a_batch_that_was_taken_for_an_evaluation_begins_a_step(rank):
    """Where `model.train()` comes after the hand-out, as in `Trainer` after an evaluation."""
    for _ in range(3):
        rank.fetch(1)
        for _ in range(2):
            rank.model.train()
            rank.backward(rank.forward(10), 20)
            rank.step()
            rank.model.eval()
            rank.fetch(1)
    steps = rank.records()

    assert [spent(record)[Phase.BACKWARD] for record in steps] == [20] * 5


def test_batches_that_were_read_before_are_steps_too(rank):
    """One batch for all of the training: updates are taken for those of a batch at first alone."""
    rank.fetch(1)
    for _ in range(40):
        rank.backward(rank.forward(10), 20)
        rank.step()
    steps = rank.records()

    assert len(steps) > 30
    assert all(spent(record)[Phase.BACKWARD] == 20 for record in steps[1:])


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
    _, step = rank.records()

    assert spent(step)[Phase.EVALUATION] == 3 * 107
    assert spent(step)[Phase.INPUT] == 1


def test_a_model_that_trains_in_evaluation_mode_trains(rank, ddp):
    """As to keep the statistics of its norms: its batches are no evaluation's."""
    rank.heard, _ = ddp, rank.model.eval()
    for _ in range(3):
        rank.fetch(1)
        rank.backward(rank.forward(10), 20)
        rank.step()
    _, step = rank.records()

    assert spent(step) == {Phase.INPUT: 1, Phase.FORWARD: 10, Phase.BACKWARD: 20}
