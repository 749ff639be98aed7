"""The largest forward that fits is found by trial, and the trial leaves no trace."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from evenstep.torch._data._protocols import MicroBatch
from evenstep.torch._memory._layout import Layout
from evenstep.torch._memory._retries import probe

from .._tiers import slow_but


class Alone:
    """A model in no DDP."""

    def __init__(self, model):
        self.model = model

    def modules(self):
        return [self.model]

    def no_sync(self):
        return nullcontext()

    def forget_forward(self):
        """Nothing to undo."""


def limit(fits, *, held=4, most=64, smallest=1, model=None):
    """Return what ``probe`` finds where ``fits`` samples do, and the sizes that it tried."""
    model = model or nn.Linear(3, 1)
    sizes = []

    def closure(batch):
        sizes.append(len(batch))
        if len(batch) > fits:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return model(batch).mean()

    found = probe(
        MicroBatch(torch.randn(held, 3), held),
        closure,
        lambda loss: loss.backward(),
        most=most,
        smallest=smallest,
        layout=Layout(torch.ones),
        models=Alone(model),
    )
    return found, sizes


@pytest.mark.parametrize("fits", slow_but([1, 17], [1, 2, 3, 5, 17, 40, 63]))
def test_the_limit_is_found_within_a_tenth(fits):
    """Never above what fits, with a tenth left free, and near it."""
    found, _ = limit(fits)

    assert found <= fits
    assert found >= max(1, int(0.9 * 0.9 * fits) - 1)


def test_no_limit_where_all_fits():
    """No more is tried than is worth knowing."""
    found, sizes = limit(1000)

    assert found is None
    assert max(sizes) == 64


def test_one_that_fits_nothing_is_an_error():
    """Less than the smallest forward that is possible."""
    with pytest.raises(RuntimeError, match="Not even 2 samples"):
        limit(1, smallest=2)


def test_other_errors_pass():
    """An error of the user's own ends the trial."""
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        limit(1000, model=nn.Linear(5, 1))


def test_the_trial_leaves_no_trace():
    """Gradients, running statistics and the random state are what they were."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1))
    model(torch.randn(8, 3)).sum().backward()
    grads = [parameter.grad.clone() for parameter in model.parameters()]
    buffers = [buffer.clone() for buffer in model.buffers()]
    state = torch.get_rng_state()

    # The batch of the trial is drawn before it begins.
    torch.randn(4, 3)
    after_draw = torch.get_rng_state()
    torch.set_rng_state(state)
    limit(9, model=model, smallest=2)

    assert torch.equal(torch.get_rng_state(), after_draw)
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        assert torch.equal(parameter.grad, grad)
    for buffer, value in zip(model.buffers(), buffers, strict=True):
        assert torch.equal(buffer, value)
