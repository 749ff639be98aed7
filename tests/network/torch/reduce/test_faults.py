"""Ranks that die, stop, leave or part in the middle of the exchange."""

import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

from evenstep.exceptions import WorkerLostError
from evenstep.network import Split
from evenstep.network._torch._reducer import ShardedReducer
from evenstep.testing import run_workers

from . import faults
from .memory import MemoryTransport, Network, on_threads

pytestmark = pytest.mark.cluster

KILL, STOP = signal.SIGKILL, signal.SIGSTOP


@pytest.mark.parametrize(
    ("victim", "sent", "workers", "shares", "timeout_s"),
    [
        (1, KILL, [0, 1, 2], [1, 1, 1], 30.0),  # in the middle of a push or pull, collocated
        (3, KILL, [0, 1, 2], [0, 1, 0, 2], 30.0),  # a server without data
        (0, KILL, [0, 1], [0, 0, 1], 30.0),  # the lead, whom the server waits for as well
        (1, STOP, [0, 1, 2], [1, 1, 1], 1.5),  # gloo says nothing: after the timeout
    ],
)
def test_the_lost_rank_is_named_everywhere(victim, sent, workers, shares, timeout_s):
    """In training, through the backward, and on servers; at once, or within the timeout."""
    world_size = len(shares)
    stops = world_size - 1 if sent is STOP else None
    ranks = run_workers(
        world_size,
        faults.train,
        *(victim, sent, workers, shares, timeout_s),
        check=False,
        stop_after=stops,
    )

    for rank in set(range(world_size)) - {victim}:
        text, named, seconds, threads = ranks[rank]
        assert text.startswith(f"Rank {victim} was lost in the exchange of gradients: ")
        assert named == victim
        assert seconds < (8.0 if timeout_s > 8 else 1.5 * timeout_s + 1)
        assert threads == ""


def test_a_rank_that_leaves_in_the_middle_is_named():
    """Its own error comes out there; the others do not wait for it."""
    ranks = run_workers(3, faults.close_early)

    assert ranks[1][:2] == ("left", -1)
    for text, named, seconds, threads in (ranks[0], ranks[2]):
        assert text.startswith("Rank 1 was lost in the exchange of gradients: ")
        assert (named, threads) == (1, "")
        assert seconds < 8


def test_an_error_of_the_thread_is_never_lost():
    """It comes out of the future and of the backward's end, and the others hear who failed."""
    theirs, mine = run_workers(2, faults.raise_in_the_thread)

    assert "TypeError" in mine[0]
    assert mine[1] == "TypeError"
    assert "Rank 1 was lost" in theirs[0]
    assert theirs[1:] == ("WorkerLostError", theirs[2], "")
    assert "it stopped after an error of its own" in theirs[2]


@pytest.mark.slow
def test_a_script_that_never_closes_ends_without_a_word(tmp_path):
    """After a fork whose child ends first; its server is told that there is nothing to come."""
    command = [sys.executable, "-W", "error", "-c", faults.SCRIPT]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([*command, str(rank), str(tmp_path)], **pipes) for rank in (0, 1)]
    ended = [process.communicate(timeout=120) for process in processes]

    assert [process.returncode for process in processes] == [0, 0]
    assert ended == [("end\n", ""), ("end\n", "")]


def test_a_closed_connection_has_a_name():
    """Also for who asks it something new, and waits for nothing yet."""
    assert run_workers(2, faults.ask_a_closed_connection) == [[1, 1], []]


def wait_in_vain(**options):
    """What becomes of a bucket whose server, rank 1, never answers, once that is broken off."""
    transport = MemoryTransport(Network(), 0, 2)
    with ShardedReducer(transport, workers=[0], **options) as reducer:
        reducer.adopt(Split.of(np.array([0, 1.0])))
        future = reducer.reduce(torch.ones(8))
        transport.break_off()
        with pytest.raises(WorkerLostError) as settled:
            reducer.settle()
        with pytest.raises(RuntimeError, match=r"WorkerLostError: Rank \d+ "):
            future.wait()
        with pytest.raises(WorkerLostError) as again:
            reducer.reduce(torch.ones(8))
        with pytest.raises(WorkerLostError):
            reducer.adopt(None)
    assert again.value is settled.value
    return settled.value


@pytest.mark.timeout(30)
def test_a_bucket_in_its_last_wait_hears_of_the_loss():
    """Whoever waits for it does, and all calls that follow."""
    lost = wait_in_vain()

    assert lost.rank == 1
    assert str(lost).startswith("Rank 1 was lost in the exchange of gradients: broken off.")


@pytest.mark.timeout(30)
def test_a_loss_that_others_found_ends_all_waits():
    """Told on one rank, it is raised on all, and names the same rank."""
    network = Network()
    found = WorkerLostError(2, "Rank 2 sent no heartbeat.")

    def go(rank):
        with ShardedReducer(MemoryTransport(network, rank, 3)) as reducer:
            reducer.adopt(Split.of(np.full(3, 1 / 3)))
            reducer.reduce(torch.ones(3000))  # for which rank 2 has nothing
            if rank == 0:
                reducer.fail(found)
            with pytest.raises(WorkerLostError) as error:
                reducer.settle()
            return [error.value]

    (mine,), (theirs,) = on_threads(2, go)

    assert mine is found
    assert theirs.rank == 2
    assert "rank 0 reported it" in str(theirs)
