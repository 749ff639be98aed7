"""One process without a group, and what is refused."""

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

from evenstep.network import Split
from evenstep.network.torch import ShardedOptimizer
from evenstep.network.torch._owned._kinds import is_dense

from . import runs


def stepped(model, optimizer, *steps):
    for step in steps:
        model.give_gradients(step, laid=True)
        optimizer.step()
    return model


@pytest.mark.parametrize("name", runs.MAKES)
def test_alone_it_is_the_optimizer_itself(name):
    """Also where that one has a state already, and where plans come."""
    model, plain = runs.Net(), runs.Net()
    reference = runs.MAKES[name](plain.groups())
    optimizer = runs.MAKES[name](model.groups())
    stepped(model, optimizer, 0)
    optimizer = ShardedOptimizer(optimizer)
    stepped(model, optimizer, 1)
    optimizer.replan(Split.of(np.ones(1), epoch=4))
    stepped(model, optimizer, 2)
    stepped(plain, reference, 0, 1, 2)

    assert runs.same(model, plain)
    assert runs.same_state(optimizer.state_dict(), reference.state_dict())
    begun = [parameter in optimizer.state for parameter in model.parameters()]
    assert begun == [
        name == "Adagrad" or not n.startswith("idle") for n, _ in model.named_parameters()
    ]


def test_parameters_that_were_moved_are_still_stepped_on():
    """To other memory, or to another type, as `load_state_dict(assign=True)` and `to` do."""
    model, plain = runs.Net(), runs.Net()
    optimizer = ShardedOptimizer(runs.MAKES["SGD"](model.groups()))
    reference = runs.MAKES["SGD"](plain.groups())
    for each in (model, plain):
        for parameter in each.parameters():
            parameter.data = parameter.data.double().clone()
    stepped(model, optimizer, 0, 1)
    stepped(plain, reference, 0, 1)

    assert runs.same(model, plain)


def test_a_state_that_is_refused_changes_nothing():
    """Another number of parameters in a group, or another shape."""
    model = runs.Net()
    optimizer = ShardedOptimizer(runs.MAKES["AdamW"](model.groups()))
    stepped(model, optimizer, 0)
    before = optimizer.state_dict()
    other = copy.deepcopy(before)
    other["state"][1]["exp_avg"] = torch.ones(5)
    with pytest.raises(ValueError, match=r"shape \(20, 8, 3, 3\) of parameter 1 in 'exp_avg', got"):
        optimizer.load_state_dict(other)
    other["param_groups"][0]["params"].pop()
    with pytest.raises(ValueError, match=r"must be of groups of \[6, 8\] parameters, got groups"):
        optimizer.load_state_dict(other)

    assert runs.same_state(optimizer.state_dict(), before)


def test_a_state_that_was_saved_or_loaded_is_nobody_elses():
    """Steps leave it alone."""
    model = runs.Net()
    optimizer = ShardedOptimizer(runs.MAKES["AdamW"](model.groups()))
    stepped(model, optimizer, 0)
    saved = optimizer.state_dict()
    kept = copy.deepcopy(saved)
    stepped(model, optimizer, 1)
    assert runs.same_state(saved, kept)
    optimizer.load_state_dict(saved)
    stepped(model, optimizer, 1)
    assert runs.same_state(saved, kept)


def test_a_backward_through_what_was_stepped_on_is_refused():
    """As with torch's own: its gradient would be wrong."""
    layer = nn.Linear(3, 3)
    x = torch.ones(1, 3, requires_grad=True)
    loss = layer(x).sum()
    loss.backward(retain_graph=True)
    ShardedOptimizer(optim.SGD(layer.parameters(), lr=0.1)).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_who_clears_the_state_begins_anew():
    """As a checkpoint does whose loading failed."""
    model, plain = runs.Net(), runs.Net()
    optimizer = ShardedOptimizer(runs.MAKES["AdamW"](model.groups()))
    stepped(model, optimizer, 0)
    optimizer.state.clear()
    model.load_state_dict(plain.state_dict())
    stepped(model, optimizer, 0)

    assert runs.same(model, stepped(plain, runs.MAKES["AdamW"](plain.groups()), 0))


class Own(optim.SGD):
    """Nobody knows what it does."""


class Odd(torch.Tensor):
    """Nobody knows where its elements are."""


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (optim.LBFGS, "must compute every element .* got LBFGS: it searches along a direction"),
        (optim.Adafactor, "got Adafactor: it averages over rows and columns"),
        (optim.SparseAdam, "got SparseAdam: its gradients are sparse"),
        (Own, "must be an element-wise optimizer of torch's, got Own. Give `element_wise=True`"),
        (lambda p: optim.Adam(p, differentiable=True), "must be not differentiable"),
    ],
)
def test_what_cannot_be_cut_is_refused(make, problem):
    """By name, with the reason."""
    with pytest.raises(ValueError, match=problem):
        ShardedOptimizer(make(nn.Linear(3, 3).parameters()))


def test_who_vouches_for_an_optimizer_may_use_it():
    """One of a class of their own."""
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    ShardedOptimizer(Own([parameter], lr=1.0), element_wise=True).step()

    assert not parameter.any()


def test_muon_is_refused():
    """It takes matrices alone."""
    with pytest.raises(ValueError, match="got Muon: it makes matrices orthogonal"):
        ShardedOptimizer(optim.Muon([nn.Parameter(torch.ones(3, 3))]))


@pytest.mark.parametrize(
    ("parameter", "problem"),
    [
        (nn.Parameter(torch.ones(3, 1).expand(3, 4)), r"one of shape \(3, 4\) that does not, at 0"),
        (nn.Parameter(torch.ones(8)[::2]), r"one of shape \(4,\) that does not"),
        (torch.ones(3).as_subclass(Odd), "must hold plain parameters, got a Odd at 0"),
    ],
)
def test_parameters_that_cannot_be_cut_are_refused(parameter, problem):
    """Those that share memory within, leave gaps, or are of other classes."""
    with pytest.raises(ValueError, match=problem):
        ShardedOptimizer(optim.SGD([parameter], lr=0.1))


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.ones(2, 3), True),
        (torch.ones(2, 3).t(), True),
        (torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.ones(3, 1, 2).transpose(0, 1), True),
        (torch.ones(0, 3), True),
        (torch.tensor(1.0), True),
        (torch.ones(4, 4)[:, :2], False),
        (torch.ones(1, 4).expand(4, 4), False),
    ],
)
def test_what_fills_a_piece_of_memory(tensor, dense):
    """In whatever order."""
    assert is_dense(tensor) is dense


def test_mistakes_are_named():
    """Each with what to do about it."""
    model = nn.Linear(3, 3)
    plain = optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"timeout_s=...\)` must be positive, got 0"):
        ShardedOptimizer(plain, timeout_s=0)
    with pytest.raises(ValueError, match=r"must have a part for each of 1 ranks, got 2 parts"):
        ShardedOptimizer(plain, Split.of(np.ones(2) / 2))
    optimizer = ShardedOptimizer(plain, Split.of(np.ones(1), epoch=3))
    with pytest.raises(ValueError, match="must be called before it is sharded, got a new group"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    with pytest.raises(ValueError, match="must be of a later epoch than 3, which is in force"):
        optimizer.replan(Split.of(np.ones(1), epoch=2))
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copy.deepcopy(optimizer)
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][:1]
    with pytest.raises(RuntimeError, match="holds other parameters than it was made with"):
        optimizer.step()


def test_a_scheduler_of_the_wrapped_one_is_refused():
    """It would set learning rates that nobody reads."""
    plain = optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1)
    optim.lr_scheduler.StepLR(plain, 2)
    with pytest.raises(ValueError, match="must have no scheduler yet, got one that has"):
        ShardedOptimizer(plain)


def test_sparse_gradients_are_refused():
    """Before anything is changed."""
    embedding = nn.Embedding(5, 2, sparse=True)
    optimizer = ShardedOptimizer(optim.SGD(embedding.parameters(), lr=0.1))
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="cannot take the sparse gradient of parameter 0"):
        optimizer.step()


def test_a_process_group_that_comes_later_is_noticed(tmp_path):
    """It would own everything, on every rank."""
    model = runs.Net()
    optimizer = ShardedOptimizer(runs.MAKES["SGD"](model.groups()))
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="Make it after `init_process_group`"):
            optimizer.step()
    finally:
        dist.destroy_process_group()
