"""An emulated worker takes its time and computes the same."""

from __future__ import annotations

import torch

from evenstep.demo._emulate import Emulation
from evenstep.demo._gpt import GPT, next_byte_loss
from evenstep.demo._training_job import Size

TINY = Size(width=16, num_layers=1, num_heads=2, context=8, batch_size=2)


class Clock:
    """Each look at it takes a millisecond, which stands for the real computing."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        self.now_s += 1e-3
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds


def gradients(seconds_per_sample):
    """One step's gradients, how long it took, and how often the emulation, if any, was late."""
    torch.manual_seed(0)
    gpt, tokens, clock = GPT(TINY), torch.randint(0, 256, (5, 9)), Clock()
    emulation = seconds_per_sample and Emulation(
        gpt, gpt.embed, seconds_per_sample, now=clock, sleep=clock.sleep
    )
    begin_s = clock()
    next_byte_loss(gpt(tokens[:, :-1]), tokens).backward()
    return (
        [parameter.grad for parameter in gpt.parameters()],
        clock() - begin_s,
        emulation and emulation.num_late,
    )


def test_a_step_lasts_as_long_as_its_samples_ask():
    """Five samples at 40 ms take 200 ms at least, and the real computing hides in them."""
    _, took_s, num_late = gradients(0.04)

    assert took_s >= 0.2
    assert num_late == 0


def test_computing_that_does_not_fit_is_counted():
    """Nobody takes a step for emulated that was as slow as the machine."""
    _, _, num_late = gradients(1e-9)

    assert num_late == 1


def test_the_gradient_stays_as_it_is():
    """Bit for bit: the emulation only waits."""
    emulated, _, _ = gradients(0.02)
    real, _, _ = gradients(None)

    assert all(torch.equal(one, other) for one, other in zip(emulated, real, strict=True))


def test_the_wait_comes_after_the_other_gradients():
    """DDP can average what is ready while the worker still takes its time."""
    torch.manual_seed(0)
    gpt, order = GPT(TINY), []
    emulation = Emulation(gpt, gpt.embed, 1e-9)
    gpt.blocks[0].attend.weight.register_hook(lambda grad: order.append(emulation.num_late))
    tokens = torch.randint(0, 256, (1, 9))
    next_byte_loss(gpt(tokens[:, :-1]), tokens).backward()

    assert order == [0]
    assert emulation.num_late == 1


def test_evaluation_takes_no_emulated_time():
    """Between a forward and its backward it moves nothing: one sample's time stays due."""
    gpt, clock = GPT(TINY), Clock()
    Emulation(gpt, gpt.embed, 0.05, now=clock, sleep=clock.sleep)
    tokens = torch.zeros(1, 9, dtype=torch.int64)
    loss = next_byte_loss(gpt(tokens[:, :-1]), tokens)
    with torch.no_grad():
        gpt(torch.zeros(1000, 8, dtype=torch.int64))
    loss.backward()

    assert 0.05 < clock() < 0.06
