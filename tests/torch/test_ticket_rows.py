"""Rows, memory and layout of a batch tell which forward is its own."""

import pytest
import torch

from evenstep.torch._step._batch_checks import UnknownBatch
from evenstep.torch._step._reductions import ForwardRecord, ReductionLedger
from evenstep.torch._step._tickets import StepState, Ticket, Tickets

from .test_tickets import matched, opened


@pytest.fixture
def tickets():
    return Tickets(identifies=True)


def test_a_size_that_fits_two_batches_tells_nothing(tickets):
    """Eight rows are one batch of eight, or two views of one of four."""
    opened(tickets, 0, 4)
    opened(tickets, 1, 8)

    assert matched(tickets, torch.ones(8, 3)) is None
    assert matched(tickets, torch.ones(4, 8, 3)) is None


@pytest.mark.parametrize(
    ("form", "share"),
    [
        (lambda x: x, 1.0),
        (lambda x: x[:, :2], 1.0),
        (lambda x: x[:2], 0.5),
        (lambda x: x[2:, 1:], 0.5),
        (lambda x: x[::2], 0.5),
        (lambda x: x.T, 1.0),
        (lambda x: x.T[:2], None),
    ],
    ids=[
        "all",
        "trimmed",
        "half",
        "half, trimmed",
        "every second",
        "transposed",
        "trimmed, transposed",
    ],
)
def test_a_share_is_one_of_rows(tickets, form, share):
    """Text is trimmed to its longest sample, which differs between ranks."""
    _, x = opened(tickets, 0, 4)

    assert tickets.match([form(x)]).share == share


def test_slices_of_one_tensor_are_batches_of_their_own(tickets):
    """In every epoch, however it is cut."""
    data = torch.randn(12, 3)
    for sizes in ((4, 8), (7, 5), (6, 6)):
        first = 0
        for number, size in enumerate(sizes):
            part = data[first : first + size]
            ticket, _ = opened(tickets, number, size, batch=part)
            match = tickets.match([part])
            assert (match.tickets, match.share) == ((ticket,), 1.0)
            ticket.is_trained = True
            tickets.retire(lambda one: one.is_trained)
            first += size


def test_a_batch_that_something_was_copied_into_is_a_buffer(tickets):
    """The first batch of a loop, say, into which all later ones are copied."""
    first, x = opened(tickets, 0, 4, key=1.0)
    first.is_trained = True
    tickets.retire(lambda ticket: ticket.is_trained)
    second, y = opened(tickets, 1, 4, key=2.0)
    x.copy_(y)

    assert matched(tickets, x) == [second]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "make",
    [torch.Tensor.to_sparse, lambda x: torch.nested.nested_tensor(list(x))],
    ids=["sparse", "nested"],
)
def test_what_has_no_rows_in_memory_tells_nothing(tickets, make):
    """As a batch, and as an input."""
    tensor = make(torch.ones(4, 3))
    ticket, _ = opened(tickets, 0, 4, batch=tensor)

    assert matched(tickets, tensor) == [ticket]


def test_a_buffer_that_is_filled_anew_belongs_to_the_newest_batch(tickets):
    """What it held before is gone."""
    buffer = torch.zeros(8, 3)
    opened(tickets, 0, 4, batch=buffer)
    tickets.retire(lambda ticket: True)
    second, _ = opened(tickets, 1, 8, batch=buffer)

    assert matched(tickets, buffer) == [second]


def test_a_constant_in_every_batch_says_nothing(tickets):
    """A mask, say: the other inputs tell."""
    mask = torch.ones(3, 3)
    batches = [opened(tickets, n, 3 + n, batch=(torch.randn(3 + n, 3), mask)) for n in range(12)]

    for ticket, (x, _) in batches:
        assert matched(tickets, x, mask) == [ticket]


def test_rows_lie_where_they_do_in_the_batch(tickets):
    """A number of features may equal the samples of another batch in use."""
    first, _ = opened(tickets, 0, 11, batch=torch.randn(11, 4))
    second, _ = opened(tickets, 1, 4, batch=torch.randn(4, 4))

    assert matched(tickets, torch.randn(11, 4)) == [first]
    assert matched(tickets, torch.randn(8, 4)) == [second]  # two views


def test_time_may_come_first_in_a_batch(tickets):
    """As many steps of time as another batch has samples are no rows."""
    first, _ = opened(tickets, 0, 6, batch=torch.randn(7, 6, 2))
    second, _ = opened(tickets, 1, 5, batch=torch.randn(7, 5, 2))

    assert matched(tickets, torch.randn(7, 5, 2)) == [second]
    assert matched(tickets, torch.randn(7, 6, 2)) == [first]


def packed(*lengths):
    """Return samples of these lengths in one row, as transformers' collators make it."""
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return {"input_ids": torch.randint(1, 99, (1, sum(lengths))), "cu_seq_lens_q": ends}


def copied(batch):
    """Return a copy, as on another device."""
    return [tensor.clone() for tensor in batch.values()]


def test_a_packed_row_with_its_ends_is_one_batch(tickets):
    """There is one end more than samples, and as many as were handed out."""
    ticket, batch = opened(tickets, 0, 3, batch=packed(5, 2, 4))

    assert matched(tickets, *copied(batch)) == [ticket]
    assert matched(tickets, torch.cat([batch["cu_seq_lens_q"], torch.ones(3)])) is None


def test_one_packed_row_is_no_batch_of_one_sample(tickets):
    """Copies are told by their values; one of which that says nothing is left open."""
    three, row = opened(tickets, 0, 3, batch=packed(5, 2, 4))
    one, single = opened(tickets, 1, 1, batch=packed(9))

    assert matched(tickets, *copied(row)) == [three]
    assert matched(tickets, *copied(single)) == [one]
    assert matched(tickets, row["input_ids"][:, 1:].clone()) is None


def indices(number):
    """Return a batch of nothing but indices."""
    return torch.arange(number)


def test_inputs_made_from_indices_belong_to_the_oldest_unused_batch(tickets):
    """Their other sizes say nothing, nor do batches of which they could be views."""
    first, _ = opened(tickets, 0, 3, batch=indices(3))
    second, _ = opened(tickets, 1, 9, batch=indices(9))
    third, _ = opened(tickets, 2, 6, batch=indices(6))

    assert matched(tickets, torch.randn(3, 6)) == [first]
    first.num_backwards = 1
    assert matched(tickets, torch.randn(9, 6)) == [second]
    second.num_backwards = 1
    assert matched(tickets, torch.randn(6, 9)) == [third]


def test_two_views_of_indices_are_not_taken_for_another_batch(tickets):
    """Eight rows may be two views of the oldest unused batch, of four."""
    opened(tickets, 0, 4, batch=indices(4))
    opened(tickets, 1, 8, batch=indices(8))

    assert matched(tickets, torch.randn(8, 3)) is None


def test_a_batch_of_indices_that_a_loop_left_behind_is_passed_over(tickets):
    """The loop that fetched it has ended; the next one uses its own."""
    opened(tickets, 0, 4, batch=indices(4))
    tickets.end_loop()
    second, _ = opened(tickets, 1, 4, batch=indices(4))

    assert matched(tickets, torch.randn(4, 3)) == [second]


@pytest.mark.parametrize(
    ("rows", "units", "count"),
    [(3, None, 1), (3, 7.0, 0), (1, None, 0), (4, None, 0), (8, None, 0)],
)
def test_samples_that_a_collate_fn_leaves_out_are_warned_of(rows, units, count, recwarn):
    """They are weighted by the plan; not where units are counted, and one row may be packed."""
    tickets = Tickets(identifies=True, counts_rows=True)
    step = StepState(0, 4, 12, 0.0, None, units=units)

    for held in (4, rows, rows):
        batch = torch.ones(held, 3), torch.ones(held)
        tickets.open(Ticket(step, 4, 1.0, 1.0, is_last=True), batch)

    assert len(recwarn) == count


def trained(tickets, strange, ticket, *forwards):
    """Have forwards of a step look at their rows, and a backward go through them."""
    matches = [tickets.match([tensor]) for tensor in forwards]
    uses = [
        ForwardRecord(match, match.tickets[0], match.weight, 0, None, False) for match in matches
    ]
    for use, tensor in zip(uses, forwards, strict=True):
        if use.match.other_rows:
            strange.look(use, [tensor])
    ReductionLedger().add(uses)
    ticket.num_backwards, ticket.is_trained = 1, True


@pytest.mark.parametrize(
    ("forwards", "count"),
    [
        (lambda x: (torch.randn(4, 3), x), 1),
        (lambda x: (torch.randn(4, 3), x + 0.1), 1),
        (lambda x: (torch.randn(4, 3),), 1),
        (lambda x: (x[:4].clone(),), 1),
        (lambda x: (torch.randn(8, 3) * 2, x[:2]), 1),
        (lambda x: (x[:4] + 0.1, x[4:] + 0.1), 0),
        (lambda x: (x[:5] + 0.1, x[5:] + 0.1), 0),
        (lambda x: (torch.randn(30, 3), x), 0),
        (lambda x: (torch.randn(6, 3), x), 0),
        (lambda x: (torch.randn(1, 18), x), 0),
        (lambda x: (torch.randn(16), x), 0),
        (lambda x: (torch.randn(4, 3, requires_grad=True) * 2, x), 0),
    ],
    ids=[
        "of another loader",
        "of another loader, the batch changed",
        "of a memory alone",
        "some of the batch",
        "beside parts of the batch",
        "parts of a copy",
        "parts of a copy, one of a single row",
        "views",
        "noise",
        "a packed row",
        "packed",
        "outputs",
    ],
)
def test_rows_of_no_batch_are_warned_of_once(tickets, forwards, count, recwarn):
    """They get its weight, which is wrong for rows with a loss of their own."""
    strange = UnknownBatch()
    for number in range(12):
        ticket, x = opened(tickets, number, 6)
        trained(tickets, strange, ticket, *forwards(x))

    assert len(recwarn) == count


def test_nodes_of_graphs_are_not_warned_of(tickets, recwarn):
    """Each batch has another number of them, and what is forwarded is a copy on the device."""
    strange = UnknownBatch()
    for number in range(40):
        nodes, labels = torch.randn(13 + number, 3), torch.randn(6)
        ticket, _ = opened(tickets, number, 6, batch=(nodes, labels))
        trained(tickets, strange, ticket, nodes.clone())

    assert len(recwarn) == 0


def test_rows_of_two_batches_that_are_both_used_up_are_outside_of_a_step(tickets):
    """None is in use, so the forward is outside of a step; it ended with an `IndexError`."""
    batches = []
    for number in range(2):
        ticket, x = opened(tickets, number, 4)
        ticket.is_trained = True
        batches.append(x)
    tickets.end_loop()

    assert tickets.match(batches) is None


def test_rows_of_no_batch_are_of_no_matter_where_sizes_are_equal_or_a_rank_is_alone(recwarn):
    """The weight is 1 then, which is right for any loss."""
    for identifies, weight in ((True, 1.0), (False, 6.0)):
        tickets, strange = Tickets(identifies=identifies), UnknownBatch()
        for number in range(8):
            ticket, x = opened(tickets, number, 6, key=weight)
            trained(tickets, strange, ticket, x, torch.randn(4, 3))

    assert not recwarn


def test_values_are_looked_at_in_the_first_forwards_alone(tickets, monkeypatch):
    """On a device each look waits for it: nodes of graphs would be looked at for ever."""
    looks = []
    monkeypatch.setattr(Ticket, "may_hold", lambda ticket, tensors: looks.append(ticket) or True)
    strange = UnknownBatch()
    for number in range(100):
        ticket, _ = opened(tickets, number, 6)
        trained(tickets, strange, ticket, torch.randn(4, 3))

    assert 0 < len(looks) <= 32
