"""One rank's steps seen from outside, by a clock that goes on when it is told to."""

import threading
import tracemalloc

import pytest
import torch
from torch import nn

from evenstep._diagnosis import Phase
from evenstep.watch._courier import RecordSender
from evenstep.watch._recorder import StepLog, StepRecorder
from evenstep.watch._start_watch import WatchSettings
from evenstep.watch._watch import Watch
from evenstep.watch._watched_run import CallSite, site_of


class HandClock:
    """Marks by a clock that is set by hand."""

    is_late = False

    def __init__(self, mark):
        self.mark = mark

    def seconds(self, begin, end):
        return end - begin


class Rank:
    """A training whose parts take as long as they say; all in microseconds."""

    def __init__(self):
        self.now_us = self.collected_us = 0
        self.model = nn.Linear(4, 1)
        self.heard = self.model  # what has its forwards heard of: the model, or what wraps it
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.log = StepLog(
            HandClock(lambda: self.now_us / 1e6),
            counted_s=lambda: (self.collected_us / 1e6, 0.0),
            guard=lambda call, *arguments: call(*arguments),
        )
        self.taken = []
        self.recorder = StepRecorder(self.log, self.taken.append)

    def records(self):
        """The steps that are over, and were not returned before."""
        self.recorder.catch_up()
        taken, self.taken[:] = list(self.taken), []
        return taken

    def spend(self, us):
        self.now_us += us

    def fetch(self, us, after=0):
        self.log.input_begins()
        self.spend(us)
        self.log.input_ends(is_there=True)
        self.spend(after)

    def forward(self, us, num_samples=2):
        inputs = torch.ones(num_samples, 4)
        self.log.forward_begins(self.heard, (inputs,))
        self.spend(us)
        output = self.model(inputs)
        self.log.forward_ends(output)
        return output.sum()

    def backward(self, loss, us, waited=0):
        """Others are waited for at its end, as DDP does: in a callback of the engine's."""

        def reached(_):
            self.spend(us)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self.spend(waited))

        handle = self.model.weight.register_hook(reached)
        loss.backward()
        handle.remove()

    def step(self, us=0):
        handle = self.optimizer.register_step_post_hook(lambda *_: self.spend(us))
        self.optimizer.step()
        handle.remove()


@pytest.fixture
def rank():
    made = Rank()
    yield made
    made.log.close()


def spent(record):
    """What a record has in phases that took time."""
    return {phase: us for phase, us in zip(Phase, record.spent_us, strict=True) if us}


def test_a_step_has_all_of_its_time(rank):
    """From one hand-out to the next: forward with what leads to it, backward, optimizer, input."""
    rank.fetch(7)
    for _ in range(2):
        rank.spend(0)
        loss = rank.forward(100)
        rank.spend(10)
        rank.backward(loss, 200, waited=60)
        rank.spend(3)
        rank.step(40)
        rank.spend(5)
        rank.collected_us += 9
        rank.fetch(20, after=30)

    _, second = rank.records()

    assert spent(second) == {
        Phase.FORWARD: 30 + 100 + 10,
        Phase.BACKWARD: 200,
        Phase.REDUCTION: 60,
        Phase.REST: 3 + 5,
        Phase.OPTIMIZER: 40,
        Phase.INPUT: 20,
    }
    assert (second.step, second.num_steps, second.num_samples) == (1, 1, 2)
    assert (second.clues.gc_us, second.clues.size) == (9, 8)


def test_micro_batches_and_two_optimizers_are_one_step(rank):
    """A step of an optimizer that had no backward before it ends none."""
    for _ in range(3):
        for _ in range(2):
            rank.fetch(1)
            rank.backward(rank.forward(10), 20)
        rank.step()
        rank.step()
    rank.fetch(1)
    rank.step()  # without a backward
    rank.fetch(1)

    steps = rank.records()

    assert [record.step for record in steps] == [0, 1, 2]
    assert spent(steps[1]) == {Phase.INPUT: 2, Phase.FORWARD: 20, Phase.BACKWARD: 40}
    assert steps[1].num_samples == 4


def test_evaluations_and_checkpoints_are_in_the_step_before(rank):
    """A loop without gradients in evaluation mode, and a block of saving."""
    rank.fetch(1)
    rank.backward(rank.forward(10), 20)
    rank.step()
    rank.model.eval()
    rank.fetch(100)
    with torch.no_grad():
        rank.forward(200, num_samples=5)
        rank.spend(50)
    rank.log.enter(Phase.CHECKPOINT)
    rank.spend(1000)
    rank.log.leave()
    rank.model.train()
    rank.fetch(1)

    (record,) = rank.records()

    assert spent(record) == {
        Phase.INPUT: 2,
        Phase.FORWARD: 10,
        Phase.BACKWARD: 20,
        Phase.EVALUATION: 350,
        Phase.CHECKPOINT: 1000,
    }
    assert record.num_samples == 2


def test_without_any_optimizer_that_is_seen_backwards_end_steps(rank):
    """As where one is compiled: after a while, each backward ends a step."""
    for _ in range(70):
        rank.fetch(1)
        rank.backward(rank.forward(10), 20)
    rank.fetch(1)

    records = rank.records()

    assert len(records) == 7
    assert all(spent(record)[Phase.BACKWARD] == 20 for record in records[1:])


def test_a_step_that_never_ends_takes_no_more_memory(rank):
    """As of a compiled model, whose backward is not heard: it is left out, and the next are not."""
    sizes = []
    tracemalloc.start()
    for _ in range(2):
        for _ in range(5_000):
            rank.fetch(1)
            rank.log.enter(Phase.OPTIMIZER)
            rank.log.leave()
            rank.recorder.catch_up()
        sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert sizes[1] < 1.2 * sizes[0]

    for _ in range(2):
        rank.backward(rank.forward(10), 20)
        rank.step()
        rank.fetch(1)

    (record,) = rank.records()

    assert (record.step, spent(record)[Phase.BACKWARD]) == (1, 20)


def test_a_long_evaluation_is_in_its_step(rank):
    """However many batches it has; of many marks in one step, those of an evaluation are few."""
    rank.fetch(1)
    rank.backward(rank.forward(10), 20)
    rank.step()
    rank.model.eval()
    for _ in range(10_000):
        rank.fetch(1)
        with torch.no_grad():
            rank.forward(2)
    rank.model.train()
    rank.fetch(1)

    (record,) = rank.records()

    assert spent(record)[Phase.EVALUATION] == 30_000


def test_steps_may_be_made_on_another_thread_and_late(rank):
    """What was heard tells all: steps are the same, as is where the loop is by now."""
    for _ in range(3):
        rank.fetch(1)
        rank.backward(rank.forward(10), 20)
        rank.log.enter(Phase.CHECKPOINT)
        rank.spend(5)
        rank.log.leave()
        rank.step(40)
    rank.fetch(1)
    rank.collected_us += 7  # in the step under way
    taken = []

    thread = threading.Thread(target=lambda: taken.extend(rank.records()))
    thread.start()
    thread.join()

    assert rank.recorder.step == 3
    assert [record.step for record in taken] == [0, 1, 2]
    assert all(record.clues.gc_us == 0 for record in taken)
    assert spent(taken[1]) == {
        Phase.INPUT: 1,
        Phase.FORWARD: 10,
        Phase.BACKWARD: 20,
        Phase.CHECKPOINT: 5,
        Phase.OPTIMIZER: 40,
    }
    assert rank.records() == []


def test_a_backward_is_heard_by_any_output_of_a_node(rank):
    """Also where a model's output is the second of a node that has several."""
    rank.fetch(1)
    rank.log.forward_begins(rank.model, (torch.ones(2, 4),))
    output = rank.model(torch.ones(2, 4)).unbind()[1]
    rank.log.forward_ends(output)
    rank.backward(output.sum(), 20)
    rank.step()
    rank.fetch(1)

    (record,) = rank.records()

    assert spent(record)[Phase.BACKWARD] == 20
    assert output._backward_hooks is None


def test_gradients_are_the_same_bit_by_bit(rank):
    """With a hook on the graph and without: nothing is added, and nothing is returned."""
    rank.fetch(1)
    rank.forward(1, num_samples=3).backward()
    seen = rank.model.weight.grad.clone()
    rank.model.weight.grad = None
    rank.model(torch.ones(3, 4)).sum().backward()

    assert torch.equal(seen, rank.model.weight.grad)


@pytest.mark.parametrize(
    ("inputs", "num_samples", "size"),
    [
        ((torch.ones(3, 4),), 3, 12),
        ((torch.ones(()),), 0, 0),
        ((torch.ones(3, 4), torch.ones(3, 2, dtype=torch.long)), 3, 6),
        (((), {"x": torch.ones(3, 4)}), 3, 12),
    ],
)
def test_inputs_have_samples_and_a_size(rank, inputs, num_samples, size):
    """Of one tensor, of none to count in, of tokens beside others, and by name."""
    rank.fetch(1)
    rank.log.forward_begins(rank.model, inputs)
    rank.log.forward_ends(loss := rank.model.weight.sum())
    rank.backward(loss, 20)
    rank.step()
    rank.fetch(1)

    (record,) = rank.records()

    assert (record.num_samples, record.clues.size) == (num_samples, size)


def test_the_line_of_the_users_own_is_found():
    """Past torch and a library, which is named; where the user's own line is the caller, none."""
    torch_file = "/x/site-packages/torch/nn/parallel/distributed.py"
    library = "/x/lib/python3.11/site-packages/accelerate/accelerator.py"

    assert site_of("DDP", [(torch_file, 3), ("/home/u/train.py", 12)]) == CallSite(
        "DDP", "/home/u/train.py", 12, ""
    )
    assert site_of("DDP", [(torch_file, 3), (library, 9), ("/u/a.py", 7)]) == CallSite(
        "DDP", "/u/a.py", 7, "accelerate"
    )
    assert site_of("DDP", [(torch_file, 3), (library, 9)]) == CallSite("DDP", "", 0, "accelerate")


def test_a_device_that_cannot_be_timed_is_named(capsys):
    """In words of the watch's own: the script calls nothing of evenstep's."""
    watch = Watch(RecordSender(None, 3, 4, WatchSettings()), loaders=[])

    watch.courier.guard(
        watch.model_made, "DDP", "DistributedDataParallel", torch.device("meta"), []
    )

    said = capsys.readouterr().err
    assert "off on rank 3, training goes on" in said
    assert "steps on meta cannot be timed" in said
    assert "prepare" not in said
