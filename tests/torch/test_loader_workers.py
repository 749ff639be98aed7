"""Loader workers: fetch ahead, hand out by the newest plan, start and stop as torch's do."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
from collections import Counter
from itertools import product

import pytest
import torch
from torch.utils.data import DataLoader, default_collate, get_worker_info

from evenstep._planner import Plan
from evenstep.torch import Balancer, Runtime

from .._tiers import slow_but
from .loader_fakes import (
    Batched,
    FixedPlan,
    Items,
    RandomPlans,
    Ranks,
    Recorder,
    Rich,
    Workers,
    alone,
    flat,
    loader_threads,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # on a single core
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    """No loader leaves a thread or a process."""
    yield
    gc.collect()

    assert not loader_threads()
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("persistent", "collate"),
    slow_but([(False, None), (True, list)], product([False, True], [None, list])),
    ids=lambda value: {None: "packed", list: "own-collate"}.get(value),
)
def test_every_plan_is_in_force_at_its_step(persistent, collate):
    """Under a new plan at every step: its sizes, every sample once, fetched in workers alone."""
    plans = RandomPlans(2, 12, tail=4)
    ranks = Ranks(
        lambda rank: DataLoader(
            Items(100, item_s=0.001),
            shuffle=True,
            num_workers=2,
            collate_fn=collate,
            persistent_workers=persistent,
        ),
        plans,
        world_size=2,
        size=12,
    )
    with ranks:
        for epoch in range(2):
            seen: list[int] = []
            for number, step in enumerate(ranks.epoch()):
                plan = plans.plans[9 * epoch + number]
                sizes = [listener.sizes()[-1] for listener in ranks.listeners]
                assert tuple(sizes) == (plan.tail if number == 8 else plan.batch_size)
                for batch, size in zip(step, sizes, strict=True):
                    indices, processes = zip(*batch, strict=True) if collate else batch
                    assert len(indices) == max(size, 1)
                    assert os.getpid() not in list(processes)
                    seen += list(map(int, indices))[:size]

            assert Counter(seen) == Counter(range(100))


def test_same_plans_give_the_same_batches():
    """However fast or slow the workers are, samples come in the order of their positions."""

    def run(item_s):
        ranks = Ranks(
            lambda rank: DataLoader(Items(60, item_s=item_s), num_workers=2),
            RandomPlans(2, 12, seed=4),
            world_size=2,
            size=12,
        )
        with ranks:
            return list(ranks.counted())

    fast, slow = run(0.0), run(0.003)

    assert fast == slow
    assert all(part == sorted(part) for step in fast for part in step)


class Counted(Items):
    """Counts how often each sample was fetched."""

    def __init__(self, length, **options):
        super().__init__(length, **options)
        self.fetched = torch.zeros(length, dtype=torch.int64).share_memory_()

    def __getitem__(self, index):
        self.fetched[index] += 1
        return super().__getitem__(index)


def fetched(ranks):
    return [int(loader.dataset.fetched.sum()) for loader in ranks.loaders]


def test_under_a_fixed_plan_nothing_is_fetched_in_vain():
    """As many samples as are used."""
    ranks = Ranks(
        lambda rank: DataLoader(Counted(50), num_workers=2), FixedPlan(3, 5, tail=(0, 2)),
        world_size=2, size=8,
    )  # fmt: skip
    with ranks:
        assert len(list(ranks.counted())) == 7

    # Rank 0 has no part in the last step, and fetches one sample to stand in.
    assert fetched(ranks) == [6 * 3 + 1, 6 * 5 + 2]


def test_what_is_fetched_in_vain_had_changed_hands():
    """Only samples that a rank owned at the time are asked for, and once each."""
    plans = RandomPlans(2, 16, seed=3)
    ranks = Ranks(
        lambda rank: DataLoader(Counted(320, item_s=0.001), num_workers=2), plans,
        world_size=2, size=16,
    )  # fmt: skip
    with ranks:
        list(ranks.counted())

    for rank, num_fetched in enumerate(fetched(ranks)):
        sizes = [plan.batch_size[rank] for plan in plans.plans]
        unused = num_fetched - sum(max(size, 1) for size in sizes)
        # With two ranks and one boundary, the larger share includes the smaller one.
        changed = [max(sizes[max(k - 4, 0) : k + 1]) - sizes[k] for k in range(20)]
        assert 0 < unused <= sum(changed)


def set_up(worker):
    get_worker_info().dataset.offset = 100 + worker


@pytest.mark.parametrize("context", slow_but(["fork"], ["fork", "spawn"]))
def test_workers_are_set_up_as_torch_sets_them_up(context):
    """Number, seeds and `worker_init_fn` with the data set it looks for, under any context."""

    num_workers = 2 if context == "fork" else 1  # a spawned one takes its time to import torch

    def make(context):
        return DataLoader(
            Workers(),
            batch_size=2,
            num_workers=num_workers,
            worker_init_fn=set_up,
            multiprocessing_context=context,
            generator=torch.Generator().manual_seed(8),
        )

    def rows(loader):
        return {tuple(row) for batch in loader for row in torch.stack(batch, 1).tolist()}

    ours = rows(alone(make(context)))

    assert ours <= rows(make("fork"))
    assert {(row[0], row[4]) for row in ours} == {(k, 100 + k) for k in range(num_workers)}


@pytest.mark.parametrize("persistent", [False, True])
def test_persistent_workers_live_on(persistent):
    """The same processes in every epoch, or others if not asked for."""
    loader = alone(
        DataLoader(Items(16), batch_size=4, num_workers=1, persistent_workers=persistent)
    )
    processes = [{int(pid) for batch in loader for pid in batch[1]} for _ in range(2)]
    loader.close()

    assert (processes[0] == processes[1]) == persistent


def test_workers_of_a_loop_that_was_left_give_way():
    """Somebody may still refer to it: the next loop has workers of its own all the same."""
    loader = alone(DataLoader(Items(16), batch_size=4, num_workers=1))
    loops = [iter(loader), iter(loader)]
    processes = {int(next(loop)[1][0]) for loop in loops}
    loader.close()

    assert len(processes) == 2


def pop(samples):
    return default_collate([{"label": sample.pop("label"), "more": len(sample)} for sample in
                            samples])  # fmt: skip


def test_a_collate_fn_may_change_its_samples():
    """A batch that is made again for a newer plan gets fresh ones."""
    plans = RandomPlans(1, 4, tail=3)
    loader = alone(DataLoader(Rich(), batch_size=4, num_workers=2, collate_fn=pop), plans)

    assert flat(batch["label"].tolist() for batch in loader) == list(range(23))


class Noting:
    """A `collate_fn` that takes note of what it was called with."""

    def __init__(self):
        self.calls = []
        self.called = threading.Semaphore(0)

    def __call__(self, samples):
        self.calls.append([index for index, _ in samples])
        self.called.release()
        return samples


def test_the_next_batch_is_made_while_the_loop_computes():
    """In the background, and made again only for a share that changed."""
    plans, collate = RandomPlans(2, 8), Noting()
    plans.draw = lambda step: Plan(step, step, (4, 4) if step < 2 else (6, 2))
    ranks = Ranks(
        lambda rank: DataLoader(
            Items(32), num_workers=1, prefetch_factor=8, collate_fn=collate if rank == 0 else list
        ),
        plans,
        world_size=2,
        size=8,
    )
    with ranks:
        steps = ranks.epoch()
        for _ in range(2):
            next(steps)
            assert collate.called.acquire(timeout=30)
        # The third step's is made under the plan that has it start at 4 samples...
        assert collate.called.acquire(timeout=30)
        assert collate.calls == [[0, 1, 2, 3], [8, 9, 10, 11], [16, 17, 18, 19]]
        # ... and again under the one that is in force when it is asked for.
        assert [index for index, _ in next(steps)[0]] == [16, 17, 18, 19, 22, 23]


class Large(Items):
    def __getitem__(self, index):
        return torch.full((200_000,), index, dtype=torch.float32)


@pytest.mark.parametrize("collate", [None, torch.stack], ids=["packed", "own-collate"])
def test_large_samples_travel_in_shared_memory(collate):
    """And arrive whole."""
    loader = alone(DataLoader(Large(12), batch_size=5, num_workers=2, collate_fn=collate))
    batches = list(loader)

    assert [batch.shape for batch in batches] == [(5, 200_000), (5, 200_000), (2, 200_000)]
    assert torch.equal(torch.cat(batches)[:, ::199_999], torch.arange(12.0)[:, None].expand(12, 2))


def test_a_batch_has_memory_of_its_own():
    """Changing one in place changes nothing that is handed out later."""
    loader = alone(DataLoader(Rich(), batch_size=4, num_workers=2))
    for number, batch in enumerate(loader):
        assert torch.equal(batch["label"], torch.arange(4 * number, min(4 * number + 4, 23)))
        batch["label"].zero_()
        batch["image"].fill_(-1)


def test_many_samples_in_one_go():
    """`__getitems__` is used where the data set has it, as by torch's loader."""
    for num_workers in (0, 2):
        loader = alone(DataLoader(Batched(20), batch_size=5, num_workers=num_workers))

        assert flat(batch[0].tolist() for batch in loader) == list(range(20))


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_pinning_without_an_accelerator_says_that_it_does_nothing():
    """As torch's loader does."""
    with pytest.warns(UserWarning, match="pin_memory=True.* no effect"):
        loader = alone(DataLoader(Items(8), batch_size=4, num_workers=1, pin_memory=True))
    assert not next(iter(loader))[0].is_pinned()


@pytest.mark.gpu
@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_are_pinned(num_workers):
    """In the background where there are workers."""
    loader = alone(DataLoader(Rich(), batch_size=8, num_workers=num_workers, pin_memory=True))
    for batch in loader:
        assert batch["image"].is_pinned()
        assert batch["label"].cuda(non_blocking=True).is_cuda


def test_announced_plans_are_fetched_for_before_the_plan_point():
    """A plan known early costs no waiting: what it adds is there when the step is asked for."""
    plans = RandomPlans(1, 8)
    plans.shape = (2, 8, 0)
    listener = Recorder()
    loader = alone(DataLoader(Items(64), batch_size=8, num_workers=2), plans, listener=listener)
    for number, _ in enumerate(loader):
        plans.announce(number + 1)

    assert listener.sizes() == [plans.plans[k].batch_size[0] for k in range(8)]


class Parents:
    """Garbage with a destructor that only the process which made it may run, as process groups."""

    def __init__(self, file):
        self.file, self.pid, self.itself = file, os.getpid(), self

    def __del__(self):
        if os.getpid() != self.pid:
            self.file.touch()


class Collecting:
    """Samples whose reading looks for garbage, as any reading may."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        gc.collect()
        return torch.tensor(index)


class Ending(Items):
    """Samples of which one ends its worker, as some libraries do, without a word."""

    def __getitem__(self, index):
        return super().__getitem__(index) if index < 6 else os._exit(0)


def test_a_worker_that_ends_is_reported_with_its_exit_code():
    """Torch has no word on 0, and finds it after 5 s."""
    loader = alone(DataLoader(Ending(12), batch_size=4, num_workers=1))
    with pytest.raises(RuntimeError, match=r"exited unexpectedly. Exit codes by pid: {\d+: 0}"):
        list(loader)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="workers are forked where there is a fork")
def test_workers_collect_no_garbage_of_their_parent(tmp_path):
    """The destructor of a process group waits in a forked worker for a thread of its parent's."""
    before = gc.get_threshold()
    gc.set_threshold(0)  # of this process: a worker looks for garbage from its first object on
    os.register_at_fork(after_in_child=lambda: gc.get_threshold()[0] or gc.set_threshold(1))
    try:
        Parents(tmp_path / "collected")
        with Balancer(runtime=Runtime(line_every=None)) as balancer:
            stock = DataLoader(
                Collecting(), batch_size=4, num_workers=1, multiprocessing_context="fork"
            )
            _, loader = balancer.prepare(torch.nn.Linear(1, 1), stock)
            batches = [batch.tolist() for batch in loader]
    finally:
        gc.set_threshold(*before)

    assert batches == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert not (tmp_path / "collected").exists()
