"""What a rank notices beside its times names the cause, where it says something."""

import pytest

from evenstep._diagnosis import HostClues, StepClues
from evenstep._host import GarbageClock, HostReader
from evenstep._run._clue_reader import ClueReader
from evenstep.testing import run_workers

from .clue_runs import LATE, diagnosed_run, nested_run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "cause", "rank", "words"),
    [
        ("garbage", "garbage collection", LATE, "Python's garbage collector takes"),
        ("busy", "contention", LATE, "it waits for a core for"),
        ("lengths", "lengths of samples", -1, "goes with the size of the inputs"),
    ],
)
def test_a_clue_names_cause_and_rank(tmp_path, kind, cause, rank, words):
    """By times alone: what the loop does, a rank that is slow throughout, one that rotates."""
    found, _ = run_workers(2, diagnosed_run, str(tmp_path), kind, 60)
    last = found[-1]
    causes = list(zip(last.causes, last.ranks, last.evidence, strict=True))
    first = next(one for one in causes if one[0] != "network")  # its part of such short steps

    assert first[:2] == (cause, rank), last
    assert words in first[2]


@pytest.mark.slow
def test_inputs_without_a_shape_train():
    """What explains waiting is looked at in every loop, and is no reason to end one."""
    assert run_workers(2, nested_run, 10) == [10, 10]


class World:
    """A process whose time and collector go as they are told."""

    def __init__(self, root):
        self.now_s = 0.0
        self.num_looks = 0
        self.callbacks = []
        self.root = root
        self.garbage = GarbageClock(now=self.now, callbacks=self.callbacks)
        self.compiling = GarbageClock(now=self.now, callbacks=[])
        self.garbage.open()
        self.clues = self.reader()

    def reader(self, **options):
        return ClueReader(self.garbage, self.compiling, now=self.now, host=self.host, **options)

    def now(self):
        return self.now_s

    def host(self, *, thread_id, alloc_retries):
        self.num_looks += 1
        return HostReader(
            root=self.root,
            now=self.now,
            cpu_s=lambda: 0.5 * self.now_s,
            major_faults=lambda: 0,
            alloc_retries=alloc_retries,
        )

    def collect(self, seconds):
        for phase in ("start", "stop"):
            for heard in self.callbacks:
                heard(phase, {})
            self.now_s += seconds * (phase == "start")

    def told(self, begin, end, go=lambda step: None):
        """What is told of the steps that are over, one after the other."""
        found = []
        for step in range(begin, end):
            self.clues.begin_step(step, self.garbage.total_s, self.compiling.total_s, 1)
            go(step)
            self.now_s += 1 / 64
            found += self.clues.told(step - 1)
        return found


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def test_a_quiet_step_is_none_to_tell_of(world):
    """Nothing is sent of it, with inputs of whatever batch size."""
    assert world.told(0, 50, lambda step: world.clues.saw_inputs(3 + step, 7 * (3 + step))) == []


def test_garbage_and_compiling_are_told_of_their_step(world):
    """And once."""

    def go(step):
        if step == 3:
            world.collect(0.004)
        if step == 4:
            world.compiling.total_s += 0.5

    assert [(one.step, one.clues) for one in world.told(0, 8, go)] == [
        (3, StepClues(gc_us=4000)),
        (4, StepClues(compile_us=500_000)),
    ]


def test_small_collections_are_told_together(world):
    """Their sum is right; most steps have nothing to send."""
    found = world.told(0, 32, lambda step: world.collect(0.00007))

    assert [one.step for one in found] == list(range(2, 31, 3))
    assert {one.clues.gc_us for one in found} == {210}


def test_lengths_are_what_is_above_the_mean_of_so_many_samples(world):
    """A batch that is larger and no longer has none."""

    def go(step):
        world.clues.saw_inputs(4 + step % 2, (4 + step % 2) * (16 if step == 20 else 10))

    found = world.told(0, 24, go)

    assert (found[0].step, found[0].clues) == (20, StepClues(size=64 - 4 * 10 - 1))
    assert all(abs(one.clues.size) <= 2 for one in found[1:])  # the mean was moved a little


def test_samples_by_cost_are_compared_with_the_ranks_own_mean(tmp_path):
    """More of them that are shorter are as much."""
    world = World(tmp_path)
    world.clues = world.reader(by_cost=True)

    assert world.told(0, 20, lambda step: world.clues.saw_inputs(1 + step % 5, 600)) == []


def test_the_machine_is_looked_at_once_a_second(world):
    """The first look is only compared with."""
    found = world.told(0, 200)

    assert [type(one.clues) for one in found] == [HostClues] * 3
    assert [one.clues.step for one in found] == [64, 128, 192]
    assert found[0].clues.lasted_s == pytest.approx(1.0)
    assert found[0].clues.cpu_s == pytest.approx(0.5)
    assert world.num_looks == 1


def test_what_cannot_be_read_is_logged_once(world, caplog):
    """Training goes on."""
    world.clues = world.reader(alloc_retries=lambda: 1 / 0)
    world.told(0, 3)

    (record,) = caplog.records
    assert "causes of waiting are found by times alone" in record.getMessage()
