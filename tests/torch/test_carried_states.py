"""A state that goes from batch to batch: exact where sizes stay, refused where they change."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from evenstep.policies import Fixed
from evenstep.testing import WorkerFailed, run_workers
from evenstep.torch import Balancer

from .plans import Restless

pytestmark = pytest.mark.cluster

COLUMNS, BATCHES, TOKENS, FEATURES = 8, 6, 3, 4


class Reader(nn.Module):
    """Predicts the next row of every column; returns its state beside that.

    Args:
        cell: whether one `LSTMCell` takes the tokens one by one, and not an `LSTM` all of them.
    """

    def __init__(self, *, cell=False):
        super().__init__()
        kind = nn.LSTMCell if cell else nn.LSTM
        self.layer, self.head = kind(FEATURES, 5), nn.Linear(5, FEATURES)
        self.cell = cell

    def forward(self, x, state):
        """Time comes first, as in `nn.LSTM` by default."""
        if not self.cell:
            out, state = self.layer(x, state)
            return self.head(out), state
        states = []
        for token in x:
            state = self.layer(token, state)
            states.append(state[0])
        return self.head(torch.stack(states)), state


def reader(*, cell=False):
    """The same model on every rank."""
    torch.manual_seed(0)
    return Reader(cell=cell).double()


def text():
    """Sample `k * COLUMNS + c` is what batch `k` has of column `c`."""
    torch.manual_seed(1)
    return TensorDataset(
        torch.randn(BATCHES * COLUMNS, TOKENS + 1, FEATURES, dtype=torch.float64),
    )


def learn(model, batches, *, carry=True):
    """Train as word_language_model does: the state is detached, and carried on."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    state = None
    for (columns,) in batches:
        rows = columns.transpose(0, 1)
        out, state = model(rows[:-1], state)
        ((out - rows[1:]) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        state = tuple(part.detach() for part in state) if carry else None
    return [parameter.detach().clone() for parameter in model.parameters()]


def alone():
    """What one process with whole batches ends with."""
    return learn(reader(), DataLoader(text(), COLUMNS))


def balanced(rank, policy, *, cell=False, carry=True):
    """The same on two ranks."""
    with Balancer(policy=policy) as balancer:
        model, loader = balancer.prepare(reader(cell=cell), DataLoader(text(), COLUMNS // 2))
        return learn(model, loader, carry=carry)


def after_the_end(rank):
    """Whether layers are free of hooks once the balancer is closed."""
    model = reader()
    with Balancer() as balancer:
        balancer.prepare(model, DataLoader(text(), COLUMNS // 2))
        watched = len(model.layer._forward_pre_hooks)
    return watched, len(model.layer._forward_pre_hooks)


def test_a_carried_state_is_exact_where_sizes_stay():
    """A rank has the same columns in each batch, however unlike the sizes."""
    expected = alone()
    for found in run_workers(2, balanced, Fixed((6, 2))):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("cell", [False, True], ids=["LSTM", "LSTMCell"])
def test_a_carried_state_is_refused_where_sizes_change(cell):
    """The error says whose rows the state has, and how to keep the sizes."""
    name = "LSTMCell" if cell else "LSTM"
    rule = rf"`{name}.forward\(hx=\.\.\.\)` must have as many rows as its input, \d+, got \d+\. "
    with pytest.raises(WorkerFailed, match=rule + r"A state that is carried .*policy=Fixed"):
        run_workers(2, restless, cell)


def restless(rank, cell):
    return balanced(rank, Restless(), cell=cell)


def test_a_new_state_for_each_batch_goes_with_any_sizes():
    """Recurrent models as such are balanced like others."""
    plain, moved = (run_workers(2, fresh, policy)[0] for policy in (Fixed((4, 4)), Restless()))

    torch.testing.assert_close(moved, plain, rtol=0, atol=1e-12)


def fresh(rank, policy):
    return balanced(rank, policy, carry=False)


def test_the_watch_on_states_ends_with_the_balancer():
    """A model that goes on without it has its layers as they were."""
    assert run_workers(2, after_the_end) == [(1, 0), (1, 0)]
