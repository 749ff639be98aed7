"""Which batch a forward belongs to is told by evidence; by the order, only for drawn indices."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from evenstep._nested_tensors import input_size
from evenstep.exceptions import EvenstepWarning
from evenstep.torch._step._batch_checks import UntrackedSteps
from evenstep.torch._step._reductions import OutputWatch, look_at
from evenstep.torch._step._tickets import StepState, Ticket, Tickets


@dataclass
class Graph:
    """A batch that is no container."""

    def __init__(self, x):
        self.x = x


@dataclass
class Linked:
    """A batch that refers to another one."""

    other: object = None
    x: torch.Tensor = field(init=False)


@pytest.fixture
def tickets():
    return Tickets(identifies=True)


def opened(tickets, number, size, *, key=None, batch=None):
    """Hand out a batch of ``size`` samples whose weight is its key; return ticket and batch."""
    weight = float(size if key is None else key)
    step = StepState(number, size, 12, 0.0, None)
    ticket = Ticket(step, size, weight, weight, is_last=True)
    batch = torch.randn(size, 3) if batch is None else batch
    tickets.open(ticket, batch)
    return ticket, batch


def matched(tickets, *tensors):
    """Return the tickets that a forward with these inputs may belong to; None if it is open."""
    match = tickets.match(tensors)
    if match is None:
        return []
    return None if callable(match.weight) else list(match.tickets)


@pytest.mark.parametrize(
    "form",
    [
        lambda x: x,
        lambda x: x[:2],
        lambda x: x.split(2)[1],
        lambda x: x.T,
        lambda x: x.view(-1),
        lambda x: x.detach(),
        lambda x: x.unsqueeze(1),
    ],
    ids=["itself", "slice", "split", "transposed", "flat", "detached", "unsqueezed"],
)
def test_what_shares_memory_with_a_batch_belongs_to_it(tickets, form):
    """Whichever batch was handed out last."""
    first, x = opened(tickets, 0, 4)
    second, y = opened(tickets, 1, 8)

    assert matched(tickets, form(x)) == [first]
    assert matched(tickets, form(y)) == [second]


def test_a_batch_that_was_kept_is_still_known_later(tickets):
    """Its ticket is retired, and no other weighs like it."""
    first, x = opened(tickets, 0, 4)
    tickets.retire(lambda ticket: True)
    opened(tickets, 1, 8)

    assert matched(tickets, x) == [first]


def test_batches_that_weigh_alike_need_not_be_told_apart(tickets):
    """The weight is known; who waits for a backward comes first."""
    first, _ = opened(tickets, 0, 4)
    second, _ = opened(tickets, 1, 4)

    assert matched(tickets, torch.ones(9)) == [first, second]
    first.num_backwards = 1
    assert matched(tickets, torch.ones(9)) == [second, first]


def test_a_size_that_only_one_batch_has_tells(tickets):
    """A copy on a device shares no memory, and has as many rows."""
    first, x = opened(tickets, 0, 5)
    second, _ = opened(tickets, 1, 8)

    assert matched(tickets, x.double()) == [first]
    assert matched(tickets, torch.ones(3, 8), torch.ones(8, 2)) == [second]
    assert matched(tickets, torch.ones(7, 8)) == [second]  # time first
    assert matched(tickets, torch.ones(10, 2)) == [first]  # two views


def test_a_stand_in_counts_as_the_one_sample_that_it_has(tickets):
    """Its weight is 0, its batch has one row."""
    first, x = opened(tickets, 0, 0, batch=torch.randn(1, 3))
    opened(tickets, 1, 8)

    assert matched(tickets, x.clone()) == [first]
    assert tickets.match([x.clone()]).weight == 0.0


@pytest.mark.parametrize(
    "form",
    [
        lambda x: x.clone(),
        lambda x: x.to(torch.bfloat16),
        lambda x: torch.cat([x, x + 1]),
        lambda x: x.t().contiguous().t(),
    ],
    ids=["copy", "cast", "views", "other strides"],
)
def test_a_copy_tells_by_its_values_where_sizes_do_not(tickets, form):
    """The short last batch may have as many rows as a full one, with another weight."""
    first, x = opened(tickets, 0, 4, key=1.0)
    second, y = opened(tickets, 1, 4, key=2.0)

    assert matched(tickets, form(x)) == [first]
    assert matched(tickets, form(y)) == [second]


def test_labels_that_are_alike_leave_it_to_the_other_inputs(tickets):
    """Every tensor that is a copy of any batch's has its say."""
    labels = torch.zeros(4, dtype=torch.int64)
    first, batch = opened(tickets, 0, 4, key=1.0, batch=(torch.randn(4, 3), labels))
    opened(tickets, 1, 4, key=2.0, batch=(torch.randn(4, 3), labels.clone()))

    assert matched(tickets, labels + 0, batch[0].clone()) == [first]


@pytest.mark.parametrize(
    "inputs",
    [(torch.ones(9, 3),), (torch.ones(4, 3), torch.ones(8)), ()],
    ids=["other size", "two sizes", "no tensors"],
)
def test_what_nothing_tells_is_an_error_in_the_backward(tickets, inputs):
    """With the explicit form as its remedy; a forward without a backward may do without."""
    opened(tickets, 0, 4)
    opened(tickets, 1, 8)

    match = tickets.match(inputs)

    with pytest.raises(RuntimeError, match=r"\[4, 8\] samples.*`with balancer\.step\(batch\)"):
        match.weight()


def test_two_batches_in_one_forward_are_an_error_if_they_weigh_differently(tickets):
    """No single weight would be right."""
    _, x = opened(tickets, 0, 4)
    _, y = opened(tickets, 1, 8)

    assert matched(tickets, x, y) is None


def test_rows_of_another_batch_in_one_tensor_are_an_error(tickets):
    """As in experience replay; several views of one batch, or a part of it, are none."""
    first, x = opened(tickets, 0, 4)

    assert matched(tickets, torch.cat([x, torch.ones(3, 3)])) is None
    assert matched(tickets, torch.cat([x, x + 1])) == [first]
    assert matched(tickets, x[:3].clone()) == [first]
    assert matched(tickets, torch.ones(7, 3)) == [first]


def test_a_batch_that_may_be_meant_stays_in_use(tickets):
    """A batch is trained on twice while the next one is fetched: nobody takes that one for used."""
    first, _ = opened(tickets, 0, 4)
    second, y = opened(tickets, 1, 4)
    for _ in range(2):
        match = tickets.match([torch.randn(4, 3)])
        match.tickets[0].num_backwards += 1
        match.tickets[0].is_trained |= match.is_certain
    tickets.retire(lambda ticket: ticket.is_trained)
    opened(tickets, 2, 8)

    assert matched(tickets, y.clone() * 3) == [first, second]


def test_objects_that_refer_to_each_other_are_looked_at_once(tickets):
    """And what is not set is no tensor."""
    one, other = Linked(), Linked()
    one.other, other.other, one.x = other, one, torch.randn(4, 3)
    ticket, _ = opened(tickets, 0, 4, batch=one)

    assert matched(tickets, one.x) == [ticket]


def test_memory_that_was_freed_is_nobodys(tickets):
    """A tensor made later is no batch of ours, even at the same address."""
    for number in range(200):
        _, x = opened(tickets, number, 4)
        tickets.retire(lambda ticket: True)
        del x

        assert not matched(tickets, torch.randn(4, 3))


def test_books_do_not_grow_with_batches_that_are_freed(tickets):
    """A long run keeps what is alive, and a little more."""
    for number in range(500):
        opened(tickets, number, 4)
        tickets.retire(lambda ticket: True)

    assert len(tickets._memory) < 20


def test_the_attributes_of_an_object_are_its_tensors(tickets):
    """A graph with its features, say."""
    first, batch = opened(tickets, 0, 4, batch=Graph(torch.randn(4, 3)))
    opened(tickets, 1, 8)

    assert matched(tickets, batch.x) == [first]


def test_the_user_may_say_it(tickets):
    """By the batch, or by a part of it; what was not handed out is refused."""
    first, x = opened(tickets, 0, 4)
    opened(tickets, 1, 8)

    assert tickets.of((x, "and more")).tickets == (first,)
    with pytest.raises(ValueError, match=r"`Balancer\.step\(batch\)` must be one batch as the lo"):
        tickets.of(x.clone())


def test_after_the_loop_only_its_own_batches_are_weighted(tickets):
    """What is fetched ahead is used after the loop has ended; what is none of it has no weight."""
    first, x = opened(tickets, 0, 4)
    tickets.end_loop()
    assert matched(tickets, torch.ones(9)) == [first]  # it waits still
    first.num_backwards = 1

    assert matched(tickets, x.clone()) == [first]
    assert matched(tickets, torch.ones(9)) == []


@pytest.mark.parametrize(
    ("tensors", "found"),
    [
        ([torch.ones(3, 4, 5), torch.ones(3, dtype=torch.int64)], (3, 60)),
        ([torch.ones(2, 9, dtype=torch.int64), torch.ones(2, 99)], (2, 18)),
        ([torch.ones(())], (0, 0)),
        ([], (0, 0)),
    ],
)
def test_what_a_forward_was_given(tensors, found):
    """Tokens where there are some, else the largest tensor."""
    assert input_size(tensors) == found


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_nested_tensor_has_a_size_though_no_shape():
    """Its numbers are counted, and its samples."""
    nested = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(5, 4)])

    assert input_size([nested]) == (2, 28)


def test_fetching_while_the_optimizer_steps_is_no_training_without_weights(recwarn):
    """A thread may fetch many batches between a backward and the optimizer's step."""
    version = [0]
    watch = UntrackedSteps(lambda: version[0])
    for step in range(2, 6):
        watch.handed_out(step, 0, lambda: 1)
    version[0] += 1  # the step that belongs to the newest backward
    for step in range(6, 20):
        watch.handed_out(step, 0, lambda: 1)
    assert not recwarn
    version[0] += 1  # another one, without a backward that was weighted

    with pytest.warns(EvenstepWarning, match="No backward came"):
        watch.handed_out(20, 0, lambda: 1)


@pytest.mark.parametrize(("units", "compares"), [(None, False), (300.0, True)])
def test_by_cost_means_over_samples_are_not_compared(units, compares):
    """A rank with fewer samples has longer ones, and what those give is no matter of their number.

    Means over tokens are: all ranks have many.
    """
    plan = SimpleNamespace(batch_size=(16, 16), costs="of lengths")
    step = StepState(0, 20, 32, 0.0, None, units=units, plan=plan)
    OutputWatch(None, compares=True).begin_step(step)

    assert step.compares is compares


@pytest.mark.parametrize("size", [1e-170, 1.0, 1e170])
def test_gradients_of_any_size_are_compared_or_left_out(size):
    """In double precision, the square of a small number is 0 and that of a large one infinite."""
    sent, looks = [], []
    watch = OutputWatch(SimpleNamespace(send=sent.extend), compares=True)
    step = StepState(0, 4, 8, 0.0, None)
    look_at(torch.full((4, 3), size, dtype=torch.float64), looks, output=0)
    watch.note(0, Ticket(step, 4, 1.0, 1.0, is_last=True), looks)
    watch.read()
    watch.report()

    rows = [row for told in sent for row in told.rows]
    assert len(rows) == (size < 1e100)
    assert all(row[2] == pytest.approx(12 * size) and 0 <= row[4] < 1 for row in rows)
