"""An emulated worker takes its time and computes the same."""

from __future__ import annotations

import torch

from evenstep.demo._worker import GPT, loss_of, standard_library


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
    """The gradients of a step with five samples, how long it took, and how often it was late."""
    torch.manual_seed(0)
    clock = Clock()
    gpt, tokens = GPT(now=clock, sleep=clock.sleep), torch.randint(0, 256, (5, 9))
    gpt.seconds_per_sample = seconds_per_sample
    loss_of(gpt, tokens).backward()
    return [parameter.grad for parameter in gpt.parameters()], clock.now_s, gpt.num_late


def test_a_step_lasts_as_long_as_its_samples_ask():
    """Five samples at 40 ms; the gradient is bit for bit that of a worker that only computes."""
    emulated, took_s, num_late = gradients(0.04)
    real, _, was_late = gradients(1e-9)

    assert 0.2 <= took_s < 0.21
    assert (num_late, was_late) == (0, 1)  # what did not fit is counted
    assert all(torch.equal(one, other) for one, other in zip(emulated, real, strict=True))


def test_the_wait_comes_after_the_other_gradients():
    """DDP can average what is ready while the worker still takes its time."""
    gpt, order = GPT(), []
    weight = gpt.blocks.layers[0].linear1.weight
    weight.register_hook(lambda _: order.append(gpt.num_late))
    loss_of(gpt, torch.randint(0, 256, (1, 9))).backward()

    assert order == [0]
    assert gpt.num_late == 1


def test_no_byte_sees_a_later_one():
    """Changing the last byte leaves all earlier predictions as they are."""
    torch.manual_seed(0)
    gpt, tokens = GPT(), torch.randint(0, 256, (3, 8))
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 256
    before, after = gpt(tokens), gpt(changed)

    torch.testing.assert_close(before[:, :-1], after[:, :-1])
    assert not torch.equal(before[:, -1], after[:, -1])


def test_every_machine_has_enough_text():
    """The standard library holds more than the longest demo reads."""
    assert len(standard_library()) > 80 * 24 * 8
