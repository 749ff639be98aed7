"""The demo's model is a GPT: causal, with one matrix at both ends."""

from __future__ import annotations

import torch

from evenstep.demo._gpt import GPT, next_byte_loss
from evenstep.demo._training_job import Size

TINY = Size(width=16, num_layers=2, num_heads=2, context=8, batch_size=2)


def test_no_byte_sees_a_later_one():
    """Changing the last byte leaves all earlier predictions as they are."""
    torch.manual_seed(0)
    gpt, tokens = GPT(TINY), torch.randint(0, 256, (3, 8))
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 256
    before, after = gpt(tokens), gpt(changed)

    torch.testing.assert_close(before[:, :-1], after[:, :-1])
    assert not torch.equal(before[:, -1], after[:, -1])


def test_the_embedding_learns_from_both_ends():
    """Its gradient reaches bytes that were read and bytes that were only predicted."""
    gpt = GPT(TINY)
    tokens = torch.full((1, 9), 7)
    next_byte_loss(gpt(tokens[:, :-1]), tokens).backward()
    rows = gpt.embed.weight.grad.abs().sum(dim=1)

    assert rows[7] > 0
    assert rows[200] > 0


def test_an_untrained_model_knows_nothing():
    """It starts near ln 256, all bytes alike."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 256, (4, 9))

    assert abs(next_byte_loss(GPT(TINY)(tokens[:, :-1]), tokens).item() - 5.545) < 0.1
