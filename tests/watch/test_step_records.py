"""What ranks report of steps: as bytes, in groups, through a store, put together; and long ones."""

import random

import numpy as np
import pytest
from msgspec import MsgspecError
from msgspec.msgpack import encode
from msgspec.structs import replace

from evenstep._diagnosis import HostClues, Phase, StepClues
from evenstep.watch._courier import RecordSender
from evenstep.watch._long_steps import long_steps, under_way, usual_s
from evenstep.watch._start_watch import WatchSettings
from evenstep.watch._step_records import (
    RankMail,
    RankMerger,
    RankReport,
    StepRecord,
    grouped,
    joined,
)


def record(step, num_steps=1, us=1000, size=7):
    """A record with as many microseconds in each phase for each of its steps."""
    spent_us = (us * num_steps,) * len(Phase)
    clues = StepClues(gc_us=num_steps, compile_us=2 * num_steps, size=size * num_steps)
    return StepRecord(step, num_steps, spent_us, clues, 3 * num_steps)


class DictStore:
    """A store that fails where a wait would begin."""

    def __init__(self):
        self.keys = {}
        self.most = 0

    def set(self, key, value):
        self.keys[key] = value
        self.most = max(self.most, len(self.keys))

    def check(self, keys):
        return all(key in self.keys for key in keys)

    def get(self, key):
        return self.keys[key]

    def delete_key(self, key):
        return self.keys.pop(key, None) is not None


def test_what_is_told_survives_the_way():
    """All of it comes back from the store, and a step takes less than 100 bytes."""
    host = HostClues(9, 1.0, 0.5, 0.25, 0.125, major_faults=3, alloc_retries=2)
    long = record(9, us=7_200_000_000)  # two hours, as after a suspend
    records = (*(record(step) for step in range(9)), long)
    told = RankReport(records, host, "node", "cpu", is_last=True)
    sender, reader = RankMail(store := DictStore()), RankMail(store)
    sender.send(1, RankReport(()))
    sender.send(1, told)

    assert list(reader.read(1)) == [RankReport(()), replace(told, number=1)]
    assert sender.num_bytes < 10 * 100 + 200


@pytest.mark.parametrize("damage", [b"", b"\x07" * 60, encode([4, [], None])])
def test_other_bytes_are_refused(damage):
    """A key of another version, or of something else, is an error and no record."""
    store = DictStore()
    store.set("1/0", damage)
    with pytest.raises(MsgspecError):
        list(RankMail(store).read(1))


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
    sender, reader = RankMail(store := DictStore()), RankMail(store)
    for rank, steps in ((1, (0, 1)), (2, (0,))):
        for step in steps:
            sender.send(rank, RankReport((record(step),)))

    assert [told.records[0].step for told in reader.read(1)] == [0, 1]
    assert [told.records[0].step for told in reader.read(2)] == [0]
    assert list(reader.read(1)) == []
    assert store.keys == {}


def test_a_store_that_is_not_read_does_not_grow():
    """Of a rank that rank 0 never hears, the newest few keys are there, and no more."""
    sender, reader = RankMail(store := DictStore()), RankMail(store)
    for step in range(100):
        sender.send(1, RankReport((record(step),)))

    steps = [told.records[0].step for told in reader.read(1)]

    assert store.most <= 16
    assert steps[-1] == 99
    assert steps == sorted(steps)


class SizedStore(DictStore):
    """Notes how large keys are."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def set(self, key, value):
        super().set(key, value)
        self.sizes.append(len(value))


def told_of(num_steps, every_s=10.0):
    """What rank 1 tells rank 0 of that many steps at its end, and the sizes of its keys."""
    store = SizedStore()
    courier = RecordSender(store, 1, 2, WatchSettings(every_s))
    courier.records.extend(record(step) for step in range(num_steps))
    courier.open("cpu", lambda step: HostClues(step, 5.0))
    courier.close("DDP", ())
    return list(RankMail(store).read(1)), store.sizes


@pytest.mark.parametrize("num_steps", [0, 50, 64, 65, 200, 320])
def test_steps_come_in_keys_of_six_kilobytes_at_most(num_steps):
    """All of them, in order; the look at the machine and the end come with the last key."""
    told, sizes = told_of(num_steps)

    assert [record.step for one in told for record in one.records] == list(range(num_steps))
    assert [one.is_last for one in told] == [False] * (len(told) - 1) + [True]
    assert [one.clues is not None for one in told] == [one.is_last for one in told]
    assert len(sizes) <= max(1, -(-num_steps // 64))
    assert max(sizes) <= 6000


@pytest.mark.parametrize(("every_s", "num_keys"), [(10.0, 10), (1.0, 1)])
def test_short_steps_are_summed(every_s, num_keys):
    """Of a thousand steps since the last telling: a key a second at most, and none is left out."""
    told, _ = told_of(1024, every_s)

    assert len(told) <= num_keys
    assert sum(record.num_steps for one in told for record in one.records) == 1024


@pytest.mark.parametrize(
    ("line_s", "every_s"),
    [(0.0, 10.0), (0.5, 1.0), (2.0, 2.0), (10.0, 10.0), (12.0, 6.0), (60.0, 10.0)],
)
def test_it_tells_in_step_with_the_lines(line_s, every_s):
    """At least every ten seconds, and at most once a second."""
    for rank in (0, 1):
        assert RecordSender(DictStore(), rank, 2, WatchSettings(line_s)).every_s == every_s


WHO = ["rank 0 (ann)", "rank 1 (bob)", "rank 2 (cy)"]


def rows(num_steps, *, long=(), phase=Phase.INPUT, seconds=1.0, together=1, shared=False):
    """Return steps of 0.1 s of three ranks; in long ones, rank 1 is so long in a phase."""
    found = []
    for at in range(num_steps):
        spent_us = np.zeros((3, len(Phase)), np.int64)
        spent_us[:, Phase.FORWARD] = 80_000 * together
        spent_us[:, Phase.REDUCTION] = 20_000 * together
        if at in long:
            spent_us[1, phase] += round(seconds * 1e6)
            spent_us[[0, 2], phase if shared else Phase.REDUCTION] += round(seconds * 1e6)
        step = (at + 1) * together - 1
        found.append(
            tuple(StepRecord(step, together, tuple(us), StepClues(), 4) for us in spent_us.tolist())
        )
    return found


def at(*phases, step=60, lasted_s=20.0, late=()):
    """Return the newest report of ranks in these phases; late ones are a step behind."""
    return [
        RankReport((), step=step - (rank in late), phase=phase, lasted_s=lasted_s)
        for rank, phase in enumerate(phases)
    ]


WAITS, INPUT, FORWARD = Phase.REDUCTION, Phase.INPUT, Phase.FORWARD


@pytest.mark.parametrize(
    ("phases", "late", "said"),
    [
        ((WAITS, INPUT, WAITS), (), "step 60 has lasted 20 s, and 0.1 s is usual: rank 1 (bob) is"),
        ((INPUT, FORWARD, WAITS), (1,), "usual: rank 1 (bob) is in the forward, and others wait"),
        ((WAITS, Phase.MEETING, WAITS), (), "all ranks wait for each other"),
    ],
)
def test_a_step_that_lasts_is_said_with_who_keeps_others_waiting(phases, late, said):
    """Of ranks that are in two steps, the one behind does."""
    lasted_s, found = under_way(at(*phases, late=late), 0.1, WHO)

    assert lasted_s == 20.0
    assert said in found


@pytest.mark.parametrize(
    ("newest", "usual"),
    [
        (at(WAITS, INPUT, WAITS, lasted_s=9.0), 0.1),
        (at(WAITS, INPUT, WAITS, lasted_s=40.0), 5.0),
        (at(WAITS, INPUT, WAITS, lasted_s=29.0), 0.0),
        (at(Phase.EVALUATION, Phase.EVALUATION, Phase.EVALUATION, lasted_s=900.0), 0.1),
    ],
    ids=["short", "as usual", "the first", "shared"],
)
def test_a_step_that_keeps_none_waiting_for_long_is_not_said(newest, usual):
    assert under_way(newest, usual, WHO) is None


def test_a_first_step_has_more_time_as_it_compiles():
    """A barrier before it, say."""
    _, found = under_way(at(Phase.REST, Phase.MEETING, WAITS, step=0, lasted_s=35.0), 0.0, WHO)

    assert found == (
        "step 0 has lasted 35 s: rank 0 (ann) is in what the loop does beside, and others wait"
    )


def test_a_single_pause_is_named_at_the_end():
    """Means would say that one rank or another waits for the network."""
    (said,) = long_steps(rows(200, long=[60], seconds=45.0), WHO)

    assert said == (
        "step 60 took 45 s, where 0.1 s is usual: rank 1 (bob) was waiting for input, and others "
        "waited, 69 % of the run"
    )


@pytest.mark.parametrize("together", [1, 4])
def test_pauses_of_one_rank_in_one_phase_are_counted_together(together):
    """Also where short steps are reported together."""
    long = [20, 60, 100]
    (said,) = long_steps(rows(120, long=long, phase=FORWARD, together=together, seconds=3.0), WHO)

    assert "usual (3 steps were long so)" in said
    assert "rank 1 (bob) was in the forward" in said


@pytest.mark.parametrize(
    "seen",
    [
        rows(200),
        rows(200, long=[60], phase=Phase.CHECKPOINT, seconds=45.0, shared=True),
        rows(200, long=[0], seconds=45.0),
        rows(200, long=[60], seconds=0.4),
        rows(8, long=[4], seconds=45.0),
    ],
    ids=["none", "shared", "the first", "short", "too few"],
)
def test_no_other_step_is_named(seen):
    assert long_steps(seen, WHO) == []


def test_the_usual_step_is_the_median():
    assert usual_s(rows(20, long=range(3), seconds=9.0, together=4)) == pytest.approx(0.1)
    assert usual_s([]) == 0.0
