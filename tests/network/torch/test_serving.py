"""Ranks without data in training: the same result, links followed, losses heard in time."""

import math
import signal
import threading
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import msgspec
import pytest
import torch
from torch.utils.data import DataLoader

from evenstep.exceptions import WorkerLostError
from evenstep.network._following._share_planner import SharesInForce
from evenstep.network._messages import Shares, SharesReport
from evenstep.network._torch._serving import ServerWatch
from evenstep.testing import run_workers
from evenstep.torch import Network, Runtime
from evenstep.torch._data._prepare import ServerEval
from evenstep.torch._data.loaders._eval import EvalLoader
from evenstep.torch._exchange._crew import Said, agreed_servers
from evenstep.torch._unequal_links import timeout_s

from ..._tiers import slow_but
from ...exchange.exchanges import PLAIN
from .networks import DrawnShares
from .serving import (
    NUM_STEPS,
    bereft,
    checkpointed,
    counting,
    drained,
    failing,
    followed,
    grouped,
    in_turn,
    left_open,
    measured,
    refused,
    served,
    stopping_early,
)

KILL, STOP = signal.SIGKILL, signal.SIGSTOP


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("servers", "how", "two"),
    slow_but(
        [((1, 4), "environment", False)],
        [((3,), "argument", False), ((1, 4), "environment", False), ((3, 4), "own DDP", True)],
    ),
)
def test_servers_change_nothing_but_who_sums(servers, how, two):
    """One script on all ranks, two epochs, plans drawn anew: the parameters of plain all-reduce.

    And rank 0 learns what every worker pushed to every server, as the servers timed it.
    """
    plain = run_workers(3, served, (), "plain", two)
    ranks = run_workers(3 + len(servers), served, servers, how, two)
    workers = [found for found in ranks if not found["is_server"]]
    helpers = [found for found in ranks if found["is_server"]]
    one, other = (torch.tensor(found["parameters"]) for found in (workers[0], plain[0]))

    assert [rank for rank, found in enumerate(ranks) if found["is_server"]] == list(servers)
    assert all(found["parameters"] == workers[0]["parameters"] for found in workers)
    assert float((one - other).norm() / other.norm()) <= 1e-12
    assert all(found["sent"] > 0 for found in ranks)
    assert [found["steps"] for found in workers] == [2 * NUM_STEPS] * 3
    assert [found["steps"] for found in helpers] == [0] * len(servers)
    assert {found["length"] for found in ranks} == {NUM_STEPS}
    assert {found["mean"] for found in workers} == {9.5}
    assert all(math.isnan(found["mean"]) for found in helpers)
    ranks_of_workers = [rank for rank, found in enumerate(ranks) if not found["is_server"]]
    assert workers[0]["own_mean"] == pytest.approx(sum(ranks_of_workers) / 3)
    exchanges = [exchange.transfers for _, exchange in workers[0]["seen"]]
    pushed = sum(each.num_bytes for each in exchanges if each is not None)
    assert (pushed[:3, 3:] > 0).all()
    assert not pushed[3:, 3:].any()


@pytest.mark.cluster
@pytest.mark.parametrize("only_servers", slow_but([False], [True, False]))
def test_links_of_servers_are_measured_and_planned_for(only_servers):
    """By equal shares, which give workers nothing if only servers sum."""
    links, plans = run_workers(4, measured, only_servers)[0]
    shared = [parts for parts in plans if parts is not None]

    assert links
    assert all(len(each.up_bytes_per_s) == len(each.down_bytes_per_s) == 4 for each in links)
    assert shared
    assert all(parts[3] > 0 for parts in shared)
    assert all((parts[0] == 0) == only_servers for parts in shared[:1])


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("victim", "number"), slow_but([(3, KILL), (1, STOP)], product((3, 1), (KILL, STOP)))
)
def test_whoever_is_gone_is_named_on_all_others(number, victim):
    """A server in the middle of a push, or a worker, on workers and servers alike."""
    gone = 5 if number == KILL else 4
    found = run_workers(5, bereft, victim, number, timeout_s=40, check=False, stop_after=gone)

    for rank in {0, 1, 2, 3, 4} - {victim}:
        assert f"Rank {victim}" in str(found[rank]), (rank, str(found[rank]))


@pytest.mark.cluster
def test_roles_that_cannot_be_are_refused_on_every_rank():
    """With the same words everywhere, and nobody waits."""
    for told in run_workers(3, refused):
        assert "`Network(servers=...)` must be ranks below 3" in told["beyond"]
        assert "leave at least 2 of 3 ranks to train" in told["too many"]
        assert "be the same on all ranks, got (1,) on rank 0 and (2,) on rank 1" in told["unlike"]
        assert "`EVENSTEP_ROLE` must leave rank 0 to train" in told["first"]
        assert "\"server\", got 'sever' on rank 2" in told["no role"]
        assert "`EVENSTEP_ROLE` must be set with shares" in told["no network"]
        assert "`Balancer(network=...)` must be given on all ranks or on none" in told["some"]
        assert "DDP(model, process_group=balancer.workers)" in told["wide"]
        assert told["overruled"] == "nothing"
        assert "EVENSTEP_ROLE=server in their environment" in told["none"]


@pytest.mark.cluster
@pytest.mark.slow
def test_a_script_that_never_closes_releases_its_servers():
    """At its end, or when it has destroyed its groups before: nobody waits for a last order."""
    assert run_workers(3, left_open, False) == [5, 5, 0]
    assert run_workers(3, left_open, True) == [5, 5, 0]


@pytest.mark.cluster
@pytest.mark.slow
def test_loops_of_a_server_after_training():
    """Where workers stop early they are over at once; `while step < last` is ended, by code 0."""
    after = "what comes after the loop"

    assert run_workers(3, stopping_early) == [(2, after), (2, after), (8, after)]
    assert run_workers(3, counting) == ["trained", "trained", "exit 0"]


@pytest.mark.cluster
@pytest.mark.slow
def test_workers_save_in_the_middle_of_a_loop(tmp_path):
    """Where no server could join in; after it, servers save nothing, and all load the same."""
    saved = run_workers(3, checkpointed, str(tmp_path))
    loaded = run_workers(3, checkpointed, str(tmp_path))

    assert [found[0] for found in saved] == [0, 0, 0]
    assert [found[0] for found in loaded] == [3, 3, 3]
    assert loaded[0][1] == loaded[1][1] == loaded[2][1]
    assert {found[2] for found in saved} == {"step-00000003"}


@pytest.mark.cluster
def test_a_server_that_is_told_to_stop_has_all_stop():
    """As of a spot instance's notice: all workers leave after the same step, and it ends too.

    At once, though an order may be far away, as while plain all-reduce is in force.
    """
    (one, heard), (other, _), (helper, _) = run_workers(3, drained)

    assert heard
    assert one == other
    assert 3 <= one < 400
    assert helper == 0


@pytest.mark.cluster
@pytest.mark.parametrize("victim", [0, 1])
def test_a_script_that_fails_is_no_end_of_training(victim):
    """Not to a server either, which would end with exit code 0 and be missed after a restart."""
    found = run_workers(3, failing, victim)

    assert found.pop(victim) == "of the script's own"
    assert all(f"Rank {victim} " in told for told in found), found


@pytest.mark.cluster
@pytest.mark.slow
def test_balancers_in_turn_have_servers_each():
    """Groups of the second have names that none of the first had, whose keys are in the store."""
    assert run_workers(3, in_turn) == [[5, 5], [5, 5], [0, 0]]


@pytest.mark.cluster
def test_a_subgroup_has_servers_of_its_own():
    """Numbered within it; whoever has another number in errors is named by both."""
    names = [" (rank 1 of all)", " (rank 3 of all)", ", a server"]

    assert run_workers(4, grouped) == [None, (3, names), (0, names), (3, names)]


@pytest.mark.cluster
def test_mixed_precision_and_clipping_go_on():
    """With a gradient scaler, in float32: all workers end with the same parameters."""
    one, other, helper = run_workers(3, followed)

    assert one == other
    assert one != helper


class Collected(DrawnShares):
    """Plans nothing; keeps what it is shown."""

    def observe(self, step, exchange, *, next_step):
        """Keep it."""
        events = super().observe(step, exchange, next_step=next_step)
        self.plan = SharesInForce(0, 0, None, None, "as ever")
        return events


def shares_of(num_workers, num_servers):
    """Shares of rank 0 with a planner that only looks, and what closes them."""
    shares = Shares(
        num_workers,
        send_all=lambda message: None,
        lag=0,
        emit=lambda event: None,
        num_servers=num_servers,
    )
    planner = Collected(num_workers + num_servers)
    shares.lead(planner)
    return shares, planner


def note(shares, rank, step, rows, waited_s=0.5):
    """Have a rank's note arrive; a server's has no end of a wait."""
    shares.received(rank, SharesReport(step, 1, waited_s, rows, 0.1))


def test_an_exchange_is_complete_with_the_servers_rows():
    """In whichever order they come; what a plain all-reduce took is the workers' own."""
    shares, planner = shares_of(2, 1)
    note(shares, 0, 0, None)
    note(shares, 1, 0, None)
    note(shares, 2, 1, [[0, 2, 10.0, 0.1]], math.inf)
    note(shares, 0, 1, [])
    note(shares, 1, 1, [])
    note(shares, 0, 2, [])
    note(shares, 1, 2, [])
    note(shares, 2, 2, [[1, 2, 30.0, 0.1]], math.inf)
    shares._thread.shutdown()

    assert [step for step, _ in planner.seen] == [0, 1, 2]
    assert planner.seen[1][1].transfers.num_bytes[0, 2] == 10.0
    assert planner.seen[2][1].transfers.num_bytes[1, 2] == 30.0
    assert planner.seen[2][1].exchange_s == 0.5


def test_rows_that_never_come_hold_up_nothing():
    """The next step that everybody noted is shown, and nothing is kept of those before."""
    shares, planner = shares_of(2, 1)
    for step in range(1000):
        note(shares, 0, step, [])
        note(shares, 1, step, [])
    assert len(shares._arrived) < 20
    note(shares, 2, 999, [[0, 2, 10.0, 0.1]], math.inf)
    note(shares, 2, 998, [[0, 2, 10.0, 0.1]], math.inf)
    shares._thread.shutdown()

    assert [step for step, _ in planner.seen] == [999]
    assert not shares._arrived


def test_a_worker_that_notes_nothing_fills_no_memory():
    """As of a rank whose backward nobody noticed."""
    shares, planner = shares_of(2, 0)
    for step in range(1000):
        note(shares, 0, step, [])
    shares._thread.shutdown()

    assert len(shares._arrived) < 20
    assert not planner.seen


@pytest.mark.parametrize(
    ("servers", "words"),
    [
        ((0, 2), "leave rank 0 to train"),
        ((1, 1), "name each rank once"),
        ((-1,), "be ranks"),
        ((1.0,), "be ranks"),
        (3, "be ranks"),
        ("34", "be ranks"),
    ],
)
def test_what_are_no_servers_is_refused(servers, words):
    """By name, at once."""
    with pytest.raises(ValueError, match=rf"Network\(servers=...\).*{words}"):
        Network(servers=servers)


def test_servers_are_kept_in_order():
    """A list will do, so that two scripts that say the same agree."""
    assert Network(servers=[5, 4]).servers == (4, 5)
    assert agreed_servers([Said(True, (2,), "server")] * 3 + [Said(True, (2,), "worker")]) == (2,)


def test_an_evaluation_on_a_server_has_no_part():
    """No batch, and NaN under any name, so that nothing looks like a result."""
    validation = ServerEval(DataLoader(range(2)))
    validation.add("loss", 1.0)
    public = {name for name in vars(EvalLoader) if not name.startswith("_")}

    assert not list(validation)
    assert len(validation) == 0
    assert all(hasattr(validation, name) for name in public)
    assert math.isnan(validation.mean()["loss"])


def watching(errors, **options):
    """A server's watch over a reducer that is in the middle of a sum, and notes how it failed."""
    reducer = SimpleNamespace(fail=errors.append, is_idle=False)
    options = {"grace_s": -1.0, "framework": PLAIN, **options}
    return ServerWatch(["a", "b"], reducer, None, **options), reducer


def test_a_server_hears_of_the_end_once():
    """Rank 0 that leaves after its goodbye is no loss, and a server that is not told ends too."""
    errors = []
    watch, reducer = watching(errors)
    watch.received(0, msgspec.msgpack.encode([["Goodbye", 7, 7, 2, None]]))
    watch.lost(0, "its connection closed")
    watch.tick()
    assert not errors  # the last sums are on their way to a worker with a slow link
    reducer.is_idle = True
    watch.tick()

    assert watch.num_loops == 2
    assert [str(error) for error in errors] == ["Training has ended."]
    watch.check()


def test_a_server_stuck_with_a_lost_rank_is_ended():
    """Its own thread could tell nobody; and what is lost is told to whoever sums, once."""
    losses, ended = [], []
    here = replace(PLAIN, is_stuck=lambda thread_id: thread_id == threading.get_ident())
    watch, _ = watching(losses, framework=here, abort=ended.append)
    watch.received(
        0, msgspec.msgpack.encode([["Answer", 7, 9, 6, False], ["RankLost", 1, "it is silent", 6]])
    )
    watch.received(0, msgspec.msgpack.encode([["Goodbye", 6, 6, 2, [0, "rank 0 ended"]]]))
    watch.tick()
    assert not ended  # outside of a collective it comes by to hear of it
    watch.enter_collective()
    watch.tick()

    assert [loss.rank for loss in losses] == [1]
    assert "Rank 1 on b was lost: it is silent. The last step complete" in ended[0]
    with pytest.raises(WorkerLostError, match="on all ranks is 6"):
        watch.check()


def test_a_step_may_take_as_long_as_the_user_says():
    """Sums are given up after those who watch the steps would have."""
    assert timeout_s(Runtime(hang_s=10.0, deadline_s=5.0)) == 35.0
    assert timeout_s(Runtime(hang_s=None)) > 1e7


@pytest.mark.parametrize(
    ("row", "words"),
    [(["Units", 3, 7.0], "`Units`"), (["LaterKind"], "LaterKind")],
)
def test_a_message_that_a_server_has_no_use_for_ends_the_run_by_name(row, words):
    """It is never dropped: a later version may mean something by it."""
    losses = []
    watch, _ = watching(losses)
    watch.received(0, msgspec.msgpack.encode([row]))

    with pytest.raises(WorkerLostError, match=rf"Rank 0 on a was lost: it sent .*{words}"):
        watch.check()
    assert len(losses) == 1
