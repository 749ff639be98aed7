"""Streams that cannot be balanced as they are: an error or a warning, on all ranks, no hang."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from evenstep.exceptions import EvenstepWarning
from evenstep.testing import run_workers
from evenstep.torch._data._step import StepCount

from . import stream_runs
from .loader_fakes import Items
from .stream_fakes import Numbers, Sized, lone, once

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # on a single core
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
]


def test_streams_of_unlike_lengths_are_an_error_on_all_ranks():
    """Not a hang of those that have more."""
    with pytest.raises(RuntimeError, match=r"different lengths: \[2, 4\] .*stream='sharded'"):
        once(lambda rank: DataLoader(Numbers(10 + 5 * rank)))


def test_unlike_numbers_of_workers_are_an_error_on_all_ranks():
    """A stream that splits itself among them has another order with another number."""
    with pytest.raises(RuntimeError, match=r"as many loader workers, and they have \[1, 2\]"):
        once(lambda rank: DataLoader(Numbers(32), num_workers=1 + rank))


def test_streams_that_begin_unlike_are_warned_about():
    """With the kind that fits."""
    with pytest.warns(EvenstepWarning, match="first ones differ.*stream='sharded'"):
        once(lambda rank: DataLoader(Numbers(rank, rank + 8)))


def test_shards_that_begin_alike_are_warned_about():
    """Each sample would count once for every rank."""
    with pytest.warns(EvenstepWarning, match="same on all.*stream='same'"):
        once(lambda rank: DataLoader(Numbers(8)), kind="sharded")


def test_a_shard_without_a_sample_is_an_error_on_all_ranks():
    """Its rank has nothing to run beside the others."""
    with pytest.raises(RuntimeError, match=r"shards of ranks \[1\] have not a single sample"):
        once(lambda rank: DataLoader(Numbers(8 * (1 - rank))), kind="sharded")


def test_a_length_is_told_where_there_is_one():
    """As torch's loader does, in global steps; and a TypeError where nobody knows it."""
    assert len(lone(DataLoader(Sized(10)))) == 3
    assert len(lone(DataLoader(Sized(10), drop_last=True))) == 2
    with pytest.raises(TypeError, match="has no len"):
        len(lone(DataLoader(Numbers(10))))
    with pytest.raises(TypeError, match="depend on the plans"):
        len(lone(DataLoader(Sized(10)), kind="sharded"))


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda: DataLoader(Items(8)), "be left out with data that is read by index, got Items"),
        (lambda: DataLoader(Numbers(8), batch_size=None), "got batch_size=None. Let the stream"),
    ],
)
def test_loaders_that_cannot_be_balanced_are_refused(make, rule):
    """With the rule and the remedy."""
    with pytest.raises(ValueError, match=rule):
        lone(make())


def test_only_one_iteration_at_a_time():
    """An older one cannot go on, and says so."""
    loader = lone(DataLoader(Numbers(8)))
    older, newer = iter(loader), None
    next(older)
    newer = iter(loader)
    assert next(newer).tolist() == [0, 1, 2, 3]

    with pytest.raises(RuntimeError, match="iterated anew"):
        next(older)
    assert next(newer).tolist() == [4, 5, 6, 7]


def test_loaders_cannot_be_mixed_within_a_loop():
    """The step of one would be taken for the other's."""
    count = StepCount()
    one, other = (lone(DataLoader(Numbers(20)), count=count) for _ in range(2))

    with pytest.raises(RuntimeError, match="loaders take turns"):
        list(zip(one, other, strict=True))


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_pinning_without_an_accelerator_says_that_it_does_nothing():
    """As torch's loader does."""
    with pytest.warns(UserWarning, match="pin_memory=True.* no effect"):
        lone(DataLoader(Numbers(8), pin_memory=True))


def fail(_):
    raise OSError("not today")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_in_the_users_code_reaches_the_loop(num_workers):
    """With its type."""
    options = {"worker_init_fn": fail} if num_workers else {"collate_fn": fail}
    with pytest.raises(OSError, match="not today"):
        list(lone(DataLoader(Numbers(8), num_workers=num_workers, **options)))


@pytest.mark.cluster
def test_what_is_not_said_is_not_guessed():
    """Nothing in an IterableDataset tells who reads what; and BatchNorm needs full steps."""
    assert (
        'be "same" or "sharded" for the Numbers, got None. Say who'
        in (run_workers(1, stream_runs.unsaid)[0])
    )
    assert "drop_last=True" in run_workers(2, stream_runs.norms)[0]
