"""What ranks tell of their steps: as bytes, in groups, through a store, and put together."""

import random

import pytest

from evenstep._diagnosis import HostClues, Phase, StepClues
from evenstep.watch._mail import RankHello, RankReader, RankSender
from evenstep.watch._merge import RankMerger
from evenstep.watch._step_records import RankTold, StepRecord, grouped, joined, unpacked

from .stores import DictStore


def record(step, num_steps=1, us=1000, size=7):
    """A record with as many microseconds in each phase for each of its steps."""
    spent_us = (us * num_steps,) * len(Phase)
    clues = StepClues(gc_us=num_steps, compile_us=2 * num_steps, size=size * num_steps)
    return StepRecord(step, num_steps, spent_us, clues, 3 * num_steps)


def test_what_is_told_survives_the_way():
    """All of it comes back from bytes, and a step takes less than 100 of them."""
    host = HostClues(9, 1.0, 0.5, 0.25, 0.125, major_faults=3, alloc_retries=2)
    told = RankTold(tuple(record(step) for step in range(9)), host, is_last=True)

    assert unpacked(told.packed()) == told
    assert unpacked(RankTold((), None).packed()) == RankTold((), None)
    assert len(told.packed()) < 9 * 100


def test_times_past_an_hour_do_not_break_the_form():
    """A step of two hours, as after a suspend, is told as the most that can be."""
    long = record(0, us=7_200_000_000)

    assert max(unpacked(RankTold((long,), None).packed()).records[0].spent_us) == 2**32 - 1


@pytest.mark.parametrize("damage", [b"", b"\x07" * 60, RankTold((record(1),), None).packed()[:-1]])
def test_other_bytes_are_refused(damage):
    """A key of another version, or one that was cut, is an error and no record."""
    with pytest.raises(ValueError, match="bytes"):
        unpacked(damage)


def test_groups_end_at_multiples_of_their_size():
    """So groups of all ranks fit into each other; what is not complete waits."""
    done, left = grouped([record(step) for step in range(3, 14)], 4)

    assert [(one.step, one.num_steps) for one in done] == [(3, 1), (7, 4), (11, 4)]
    assert left == [record(12), record(13)]
    assert done[1] == joined([record(step) for step in range(4, 8)]) == record(7, 4)


def test_ranks_with_other_groups_meet():
    """The coarser groups count; rows come in order, and each has as many steps on all ranks."""
    merger = RankMerger(3)
    singles = [record(step) for step in range(16)]
    for rank, size in enumerate((1, 2, 8)):
        merger.add(rank, grouped(singles, size)[0])

    rows = merger.take()

    assert [row[0].step for row in rows] == [7, 15]
    assert all({one.num_steps for one in row} == {8} for row in rows)
    assert rows[0] == (record(7, 8),) * 3


def test_a_row_waits_for_all_ranks():
    """It is there once the last rank has told of it."""
    merger = RankMerger(2)
    merger.add(0, [record(0), record(1)])
    assert merger.take() == []

    merger.add(1, [record(0)])

    assert merger.take() == [(record(0), record(0))]


def test_steps_that_a_rank_does_not_tell_of_are_left_out():
    """All rows are of the same steps; at most the group of a gap is lost, and the next one."""
    drawn = random.Random(0)
    for _ in range(200):
        merger, told = RankMerger(3), []
        for rank in range(3):
            lost = set(drawn.sample(range(64), drawn.randrange(8)))
            kept = [record(step) for step in range(64) if step not in lost]
            done, _ = grouped(kept, drawn.choice([1, 2, 4]))
            told.append(lost)
            merger.add(rank, done)

        rows = merger.take()

        for row in rows:
            assert len({(one.begin, one.step, one.num_steps) for one in row}) == 1
        whole = {number for row in rows for number in range(row[0].begin, row[0].step + 1)}
        bad = {4 * (step // 4) + k for lost in told for step in lost for k in range(8)}
        assert set(range(60)) - bad <= whole


def test_mail_comes_in_order_and_leaves_nothing():
    """What is read is deleted."""
    store = DictStore()
    senders = [RankSender(store, rank) for rank in (1, 2)]
    reader = RankReader(store, range(1, 3))
    for sender in senders:
        sender.hello(RankHello("node", "cpu"))
        sender.send(RankTold((record(0),), None))
    senders[0].send(RankTold((record(1),), None))

    assert list(reader.hellos()) == [(1, RankHello("node", "cpu")), (2, RankHello("node", "cpu"))]
    assert [(rank, told.records[0].step) for rank, told in reader.read()] == [
        (1, 0),
        (1, 1),
        (2, 0),
    ]
    assert list(reader.hellos()) == list(reader.read()) == []
    assert store.keys == {}


def test_a_store_that_is_not_read_does_not_grow():
    """Of a rank that rank 0 never hears, the newest few keys are there, and no more."""
    store = DictStore()
    sender, reader = RankSender(store, 1), RankReader(store, range(1, 2))
    for step in range(100):
        sender.send(RankTold((record(step),), None))

    steps = [told.records[0].step for _, told in reader.read()]

    assert store.most <= 16
    assert steps[-1] == 99
    assert steps == sorted(steps)
