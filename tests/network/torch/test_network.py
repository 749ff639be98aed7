"""Gradients summed by shares in training: the same result, plans at the same step, losses named."""

import signal
import threading

import pytest
import torch

from evenstep.events import SharesPlanned
from evenstep.network import EqualShares, OptimalShares, ProportionalShares
from evenstep.network._messages import Shares, SharesReply, SharesReport
from evenstep.testing import run_workers
from evenstep.torch import Balancer, Network

from ...exchange.exchanges import pairs, report, reports_of
from .networks import (
    NUM_STEPS,
    DrawnShares,
    accumulated,
    bereft,
    named,
    refused,
    trained,
    trained_twice,
)

SIZES = 2, 5, 8


def apart(one, other):
    one, other = torch.tensor(one), torch.tensor(other)
    return float((one - other).norm() / other.norm())


@pytest.mark.cluster
def test_shares_change_nothing_but_who_sums():
    """Drawn anew at every step, as batch sizes are: the parameters of plain all-reduce."""
    plain = run_workers(3, trained, None, SIZES, False)
    drawn = run_workers(3, trained, Network(), SIZES, True)
    parameters, epochs, _, sent, sizes = zip(*drawn, strict=True)

    assert parameters[0] == parameters[1] == parameters[2]
    assert apart(parameters[0], plain[0][0]) <= 1e-12
    assert epochs[0] == epochs[1] == epochs[2]
    assert len(set(epochs[0])) >= NUM_STEPS // 3  # as fast as rank 0 comes to plan
    assert all(sent)
    planned = [[step for step, _ in row] for row in sizes]
    assert planned[0] == planned[1] == planned[2]
    assert len(set(planned[0])) == 3
    assert all(own == step[rank] for rank, row in enumerate(sizes) for step, own in row)
    assert not any(row[3] for row in plain)


@pytest.mark.cluster
def test_on_equal_links_shares_end_where_they_began():
    """There is a look at the links; then plain all-reduce goes on, and the log says why."""
    found = run_workers(3, trained, Network(), SIZES, False)
    _, epochs, told, *_ = found[0]

    assert sum(epoch is not None for epoch in epochs) >= 1
    assert epochs[0] is None
    assert told[0].step == 0
    assert "measure what shares have to beat" in told[0].reason
    assert "probing the links" in told[1].reason
    # Plans come later than what they were made of: a probe does not go on until then.
    assert epochs.count(told[1].plan_epoch) == 1


@pytest.mark.cluster
def test_a_step_that_only_accumulates_is_no_exchange():
    """Under `no_sync` nothing is sent: that is no all-reduce of some microseconds."""
    measured, planned = run_workers(3, accumulated, 4)[0]

    assert len(measured) >= 3
    assert all((event.step + 1) % 4 == 0 for event in measured)
    probe = planned[1]  # it lasts for an exchange, whichever step has one
    assert "probing the links" in probe.reason
    assert probe.plan_epoch in {event.plan_epoch for event in measured}
    assert "could be read" not in planned[2].reason


@pytest.mark.cluster
def test_two_workers_are_told_that_shares_bring_nothing():
    """And sum by all-reduce."""
    found = run_workers(2, trained, Network(), (3, 5), False)

    assert found[0][1] == [None] * NUM_STEPS
    assert "so few workers" in found[0][2][0].reason


@pytest.mark.cluster
@pytest.mark.parametrize(("number", "answers"), [(signal.SIGKILL, 3), (signal.SIGSTOP, 2)])
def test_a_worker_that_is_gone_in_the_exchange_is_named(number, answers):
    """On the others, in the middle of their backward; a stopped one after the deadline."""
    found = run_workers(3, bereft, number, timeout_s=40, check=False, stop_after=answers)

    assert "Rank 2" in found[0]
    assert "Rank 2" in found[1]


@pytest.mark.cluster
def test_what_cannot_be_shared_out_is_refused():
    """A model whose own hook sums, and one that is no DDP's."""
    for told in run_workers(2, refused):
        assert "have no communication hook yet" in told[0]
        assert "be used with models in DDP" in told[1]
        assert "must have dense gradients, got sparse ones of 'embedding'" in told[2]


@pytest.mark.cluster
def test_a_model_goes_on_after_its_balancer_is_closed():
    """With another balancer, then with none: as if nobody had ever shared anything out."""
    plain = run_workers(3, trained_twice, None)
    shared = run_workers(3, trained_twice, Network())

    assert apart(shared[0][0], plain[0][0]) <= 1e-12
    assert all(row[0] == shared[0][0] for row in shared)
    assert all(sent > 0 for row in shared for sent in row[1])


@pytest.mark.cluster
def test_ranks_are_numbered_as_in_the_balancers_group():
    """As heartbeats do, which may be the first to name the same one."""
    assert run_workers(4, named) == [None, 2, 2, 2]


class Broken(DrawnShares):
    """A planner that raises."""

    def observe(self, step, exchange, *, next_step):
        raise ArithmeticError("no")


def shared(both, lag=0, emitted=None):
    """Both ranks' shares, carried by their exchanges."""
    found = []
    for exchange in both:
        emit = print if emitted is None else emitted.put
        shares = Shares(2, send_all=exchange.send_to_workers, lag=lag, emit=emit)
        exchange.add(shares)
        found.append(shares)
    return found


def play(both, shared, num_steps):
    """Return the epoch of the shares that each rank has at every step, running free."""
    told = [[], []]

    def go(rank):
        for step in range(num_steps):
            plan = both[rank].at(step)
            shares = shared[rank].at(step)
            told[rank].append(None if shares is None else shares.epoch)
            report(both[rank], step, reports_of(rank, step, plan.batch_size[rank]))
            rows = ((1 - rank, rank, 1e6, 0.5),)
            epoch = 0 if shares is None else shares.epoch
            shared[rank].note(SharesReport(step, epoch, 0.5 + rank, rows, 0.0, 2.0 - rank))

    threads = [threading.Thread(target=go, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return told


@pytest.mark.parametrize("lag", [0, 1])
def test_both_ranks_switch_at_the_same_step(lag):
    """Whenever rank 0 has decided: planning has a thread of its own."""
    with pairs() as make:
        both, _ = make(lag=lag)
        planner, shares = DrawnShares(2), shared(both, lag)
        shares[0].lead(planner)
        mine, theirs = play(both, shares, 300)

    assert mine == theirs
    assert mine[:2] == [None, None]
    assert len(set(mine)) > 20
    step, exchange = planner.seen[-1]
    assert step > 0
    assert exchange.exchange_s == 0.5  # from when the later one, rank 0, was done computing
    assert exchange.transfers.num_bytes.tolist() == [[0.0, 1e6], [1e6, 0.0]]


def test_a_planner_that_fails_ends_in_plain_all_reduce(caplog):
    """For good, on all ranks from the same step on, and said once: training goes on."""
    with pairs() as make:
        both, emitted = make()
        shares = shared(both, emitted=emitted)
        shares[0].lead(Broken(2))
        mine, theirs = play(both, shares, 20)
        events = [emitted.get_nowait() for _ in range(emitted.qsize())]

    assert mine == theirs
    assert set(mine) == {None, 1}
    planned = [event for event in events if isinstance(event, SharesPlanned)][1:]
    assert [(event.plan_epoch, event.parts) for event in planned] == [(1, None)]
    assert "internal fault of evenstep (ArithmeticError: no)" in planned[0].reason
    assert "plain all-reduce for the rest of the run" in caplog.text


def test_a_plan_holds_from_its_first_step_on():
    """Also where several arrived before."""
    shares = Shares(2, send_all=print, lag=0, emit=print)
    for epoch, first_step in ((1, 4), (2, 7)):
        shares.received(0, SharesReply((epoch, first_step, None, None, "", None)))
    found = [shares.at(step) for step in range(3, 9)]

    assert [None if plan is None else plan.epoch for plan in found] == [None, 1, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"shares": "fair"}, r"Network\(shares=...\)"),
        ({"shares": None}, r"Network\(shares=...\)"),
        ({"shares": [0.5, 0.25, 0.25]}, r"Network\(shares=...\)"),
        ({"margin": -0.1}, r"Network\(margin=...\)"),
        ({"margin": float("nan")}, r"Network\(margin=...\)"),
        ({"margin": float("inf")}, r"Network\(margin=...\)"),
        ({"chunk_bytes": 10}, r"Network\(chunk_bytes=...\)"),
        ({"chunk_bytes": 1e6}, r"Network\(chunk_bytes=...\)` must be an integer"),
        ({"wire": torch.float64}, r"Network\(wire=...\)"),
    ],
)
def test_what_is_no_setting_is_refused(settings, words):
    """By name, at once."""
    with pytest.raises(ValueError, match=words):
        Network(**settings)


@pytest.mark.parametrize("network", [True, "auto", Network])
def test_a_network_is_a_value(network):
    """What is not one is refused with the remedy."""
    with pytest.raises(ValueError, match=r"Balancer\(network=...\)"):
        Balancer(network=network)


def test_shares_go_by_name():
    """Or by value."""
    kinds = {"optimal": OptimalShares, "proportional": ProportionalShares, "equal": EqualShares}
    for name, kind in kinds.items():
        assert isinstance(Network(shares=name).policy, kind)
    own = EqualShares()
    assert Network(shares=own).policy is own


@pytest.mark.parametrize(
    ("num_bytes", "chunk_bytes"),
    [(1000, 1 << 16), (8_000_000, 500_000), (10**9, 1 << 22)],
)
def test_chunks_are_a_sixteenth_within_bounds(num_bytes, chunk_bytes):
    """Few would overlap little, and each costs its messages."""
    assert Network().chunk_bytes_of(num_bytes) == chunk_bytes
    assert Network(chunk_bytes=70_000).chunk_bytes_of(num_bytes) == 70_000
