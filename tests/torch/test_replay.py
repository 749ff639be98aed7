"""A recorded run is repeated bit by bit: every plan in the step it was for."""

import json

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from evenstep.events import RunStarted, StepMeasured, to_record
from evenstep.policies import Deadband, Replay
from evenstep.testing import WorkerFailed, run_workers
from evenstep.torch import Balancer, Bounds, Runtime

from .replay_runs import NUM_EPOCHS, WORLD_SIZE, Loop, train

LOOPS = {
    "a plain loop": Loop(),
    "micro-batches": Loop(by_steps=True),
    "fetched ahead": Loop(num_workers=1),
    "two loaders": Loop(num_loaders=2),
}


def run(folder, loop, *, replayed=None, seed=0):
    """Return sizes of every step and the bits of all parameters, the same on all ranks."""
    record = None if replayed is None else str(replayed)
    results = run_workers(WORLD_SIZE, train, loop, str(folder), record, seed, timeout_s=100)
    assert len({bits for _, bits in results}) == 1
    return results[0]


def events(folder, kind):
    """The events of one kind in a run's file."""
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == kind]


def recorded(folder, sizes, *, first_step=0):
    """Return a folder with the record of a run that never changed its sizes."""
    folder.mkdir()
    names = ("a",) * len(sizes)
    step = StepMeasured(
        first_step, 0, sizes, *[(0.1,) * len(sizes)] * 3, 0.1, 0.0, None, None, None
    )
    told = [RunStarted(len(sizes), sum(sizes), 5, "Auto()", names, names), step]
    lines = "".join(json.dumps(to_record(event)) + "\n" for event in told)
    (folder / "events.jsonl").write_text(lines)
    return folder


@pytest.mark.cluster
def test_a_replayed_run_has_the_same_parameters_bit_by_bit(tmp_path):
    """Though sizes changed after every step."""
    sizes, bits = run(tmp_path / "first", Loop())

    assert len(set(sizes)) > len(sizes) / 2
    assert run(tmp_path / "again", Loop(), replayed=tmp_path / "first") == (sizes, bits)


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_a_replay_of_a_replay_is_the_same_too(tmp_path, name):
    """In all kinds of loops; other sizes give other bits."""
    loop = LOOPS[name]
    sizes, bits = run(tmp_path / "first", loop)
    _, other = run(tmp_path / "other", loop, seed=1)

    assert other != bits
    assert run(tmp_path / "again", loop, replayed=tmp_path / "first") == (sizes, bits)
    assert run(tmp_path / "third", loop, replayed=tmp_path / "again") == (sizes, bits)
    assert events(tmp_path / "third", "SizesHeld") == []


@pytest.mark.cluster
@pytest.mark.slow
def test_a_record_that_ends_early_keeps_its_last_sizes_and_says_so(tmp_path):
    """All steps that it has are repeated; the rest go on."""
    short, _ = run(tmp_path / "short", Loop(cut_at=8))
    sizes, _ = run(tmp_path / "long", Loop(), replayed=tmp_path / "short")

    assert sizes[:8] == short
    assert len(sizes) == 6 * NUM_EPOCHS
    (held,) = events(tmp_path / "long", "SizesHeld")
    assert held["step"] == 8
    assert "ends with step 7" in held["problem"]
    assert len({size for size in sizes[9:] if sum(size) == sum(sizes[0])}) == 1


@pytest.mark.cluster
@pytest.mark.slow
def test_a_run_that_was_resumed_is_repeated_from_the_same_checkpoint(tmp_path):
    """Its first sizes are those that were restored; from the beginning it is refused."""
    run(tmp_path / "begun", Loop(cut_at=8, saves=str(tmp_path / "state")))
    resumed = Loop(loads=str(tmp_path / "state"))
    first = run(tmp_path / "resumed", resumed)

    assert events(tmp_path / "resumed", "EstimatesRestored")
    assert run(tmp_path / "again", resumed, replayed=tmp_path / "resumed") == first
    with pytest.raises(WorkerFailed, match="from step 0 on, where this run begins, got one from s"):
        run(tmp_path / "refused", Loop(), replayed=tmp_path / "resumed")


@pytest.mark.cluster
def test_a_record_of_other_workers_is_refused_by_name_on_every_rank(tmp_path):
    """Before the first step, so that none waits for another."""
    three = recorded(tmp_path / "three", (8, 8, 8))
    failed = run_workers(2, train, Loop(), str(tmp_path / "two"), str(three), check=False)

    assert all(isinstance(each, WorkerFailed) for each in failed)
    rule = "`Replay(run=...)` must be of 2 workers and a global batch of 16, got 3 workers and 24"
    assert all(rule in str(each) for each in failed)


@pytest.mark.parametrize(
    ("size", "first_step", "settings", "words"),
    [
        (4, 0, {}, r"global batch of 8, got 1 workers and 4"),
        (8, 5, {}, r"record from step 0 on, where this run begins, got one from step 5 on"),
        (8, 0, {"wrap": True}, r"`Replay` by itself.*Use `Replay\(run="),
        (8, 0, {"cost": len}, r"`Balancer\(policy=...\)` must be left out where samples are assig"),
    ],
    ids=["another batch", "another begin", "wrapped", "by cost"],
)
def test_what_cannot_be_repeated_is_refused(tmp_path, size, first_step, settings, words):
    """With what would do, rather than repeated in another way."""
    replay = Replay(recorded(tmp_path / "run", (size,), first_step=first_step))
    policy = Deadband(replay, 0.1) if settings.pop("wrap", False) else replay
    samples = TensorDataset(torch.randn(16, 4))

    def begin():
        with Balancer(policy=policy, runtime=Runtime(line_every=None), **settings) as balancer:
            _, loader = balancer.prepare(torch.nn.Linear(4, 4), DataLoader(samples, batch_size=8))
            next(iter(loader))

    with pytest.raises(ValueError, match=words):
        begin()


def test_caps_of_forwards_are_repeated_too(tmp_path):
    """As they were, though nothing of memory is known now."""
    folder = recorded(tmp_path / "run", (8,))
    file = folder / "events.jsonl"
    changed = {"event": "Rebalanced", "step": 1, "plan_epoch": 1, "batch_size": [8], "reason": ""}
    start, first = file.read_text().splitlines()
    change = json.dumps({**changed, "max_forward": [3]})
    second = json.dumps({**json.loads(first), "step": 1})
    file.write_text("".join(f"{line}\n" for line in (start, first, change, second)))
    samples = TensorDataset(torch.randn(16, 4))
    runtime, cuts = Runtime(line_every=None), []
    with Balancer(policy=Replay(folder), bounds=Bounds(max=5), runtime=runtime) as balancer:
        model, loader = balancer.prepare(torch.nn.Linear(4, 4), DataLoader(samples, batch_size=8))
        for step in loader.steps():
            cuts.append([])
            for (x,) in step:
                model(x).mean().backward()
                cuts[-1].append(len(x))

    assert cuts == [[4, 4], [3, 3, 2]]
