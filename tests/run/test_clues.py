"""What a rank notices beside its times names the cause, where it says something."""

from __future__ import annotations

import gc
import threading
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from evenstep._diagnosis import StepClues
from evenstep._host import GarbageClock, HostReader
from evenstep._run._machine_reader import ClueReader
from evenstep.events import WaitingDiagnosed
from evenstep.testing import run_workers
from evenstep.torch import Balancer, Runtime

LATE = 1  # the rank


class Texts(torch.utils.data.Dataset[torch.Tensor]):
    """So many samples, all as long or each of another length."""

    def __init__(self, num_samples: int, *, is_unlike: bool) -> None:
        lengths = torch.randint(50, 1000, (num_samples,)) if is_unlike else [500] * num_samples
        self.lengths = [int(length) for length in lengths]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(self.lengths[index], dtype=torch.int64)


class Slow(torch.nn.Module):
    """A layer that takes a while for each token, on ``LATE`` longer where it waits for a core."""

    def __init__(self, waits_s: float, file: Path) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.waits_s, self.file = waits_s, file
        self.delay_s = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sleep(1e-5 * x.numel() + self.waits_s)
        if self.waits_s:
            self.delay_s += self.waits_s
            self.file.write_text(f"1 {round(self.delay_s * 1e9)} 1\n")
        return self.layer(x[:, :4].float())


def nested_run(rank: int, num_steps: int) -> int:
    """Train on tensors whose sizes torch does not tell; return how many steps there were."""
    torch.manual_seed(0)
    texts = [torch.randn(1 + index % 5, 4) for index in range(8 * num_steps)]
    data = DataLoader(texts, batch_size=4, collate_fn=torch.nested.nested_tensor)
    number = 0
    with Balancer(runtime=Runtime(line_every=None)) as balancer:
        model, loader = balancer.prepare(Rows(), data)
        for x in loader:
            model(x).square().mean().backward()
            number += 1
    return number


class Rows(torch.nn.Module):
    """A layer for each text by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.layer(text).mean() for text in x.unbind()])


def diagnosed_run(rank: int, folder: str, kind: str, num_steps: int) -> list[WaitingDiagnosed]:
    """Return what is said of a run of so many steps: of its causes, on rank 0.

    Args:
        rank: this process.
        folder: where each rank has a root of its own, for the files that Linux has.
        kind: of trouble: ``"garbage"``, ``"busy"`` or ``"lengths"``; anything else is none.
        num_steps: in the run.
    """
    torch.manual_seed(0)
    root = Path(folder) / str(rank)
    schedule = root / f"proc/self/task/{threading.get_native_id()}/schedstat"
    schedule.parent.mkdir(parents=True)
    schedule.write_text("1 0 1\n")
    is_late = rank == LATE
    gc.freeze()  # what torch has made is not looked through each time
    junk: Any = [{"n": [n]} for n in range(100_000 * (is_late and kind == "garbage"))]
    heard: list[Any] = []
    runtime = Runtime(line_every=None, hooks=(heard.append,))
    texts = Texts(8 * num_steps, is_unlike=kind == "lengths")
    data = DataLoader(texts, batch_size=4, collate_fn=partial(pad_sequence, batch_first=True))
    model: Any = Slow(0.015 * (is_late and kind == "busy"), schedule)
    with Balancer(policy="equal", runtime=runtime) as balancer:
        # Files of the test's own, looked at ten times a second.
        balancer._parts.clues = partial(
            ClueReader, host=partial(HostReader, root=root), now=lambda: 10 * monotonic()
        )
        model, loader = balancer.prepare(model, data)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for x in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if junk:
                gc.collect()
    return [event for event in heard if isinstance(event, WaitingDiagnosed)]


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
        self.looks = []
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
            clues, host = self.clues.take(step - 1)
            found += [] if clues is None else [(step - 1, clues)]
            self.looks += [] if host is None else [host]
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

    assert world.told(0, 8, go) == [
        (3, StepClues(gc_us=4000)),
        (4, StepClues(compile_us=500_000)),
    ]


def test_small_collections_are_told_together(world):
    """Their sum is right; most steps have nothing to send."""
    found = world.told(0, 32, lambda step: world.collect(0.00007))

    assert [step for step, _ in found] == list(range(2, 31, 3))
    assert {clues.gc_us for _, clues in found} == {210}


def test_lengths_are_what_is_above_the_mean_of_so_many_samples(world):
    """A batch that is larger and no longer has none."""

    def go(step):
        world.clues.saw_inputs(4 + step % 2, (4 + step % 2) * (16 if step == 20 else 10))

    found = world.told(0, 24, go)

    assert found[0] == (20, StepClues(size=64 - 4 * 10 - 1))
    assert all(abs(clues.size) <= 2 for _, clues in found[1:])  # the mean was moved a little


def test_samples_by_cost_are_compared_with_the_ranks_own_mean(tmp_path):
    """More of them that are shorter are as much."""
    world = World(tmp_path)
    world.clues = world.reader(by_cost=True)

    assert world.told(0, 20, lambda step: world.clues.saw_inputs(1 + step % 5, 600)) == []


def test_the_machine_is_looked_at_once_a_second(world):
    """The first look is only compared with."""
    assert world.told(0, 200) == []
    assert [look.step for look in world.looks] == [64, 128, 192]
    assert world.looks[0].lasted_s == pytest.approx(1.0)
    assert world.looks[0].cpu_s == pytest.approx(0.5)
    assert world.num_looks == 1


def test_what_cannot_be_read_is_logged_once(world, caplog):
    """Training goes on."""
    world.clues = world.reader(alloc_retries=lambda: 1 / 0)
    world.told(0, 3)

    (record,) = caplog.records
    assert "causes of waiting are found by times alone" in record.getMessage()
