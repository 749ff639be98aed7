"""Who is sent away, and why somebody is kept."""

import os
import subprocess
import sys

import pytest

from evenstep._exchange._stop import Stop
from evenstep.events import WorkerDropped, WorkerKept, WorkerUnhelpful
from evenstep.torch import Balancer, Drain
from evenstep.torch._exchange._agent import Agent
from evenstep.torch._exchange._dropping import Dropping
from evenstep.torch._exchange._startup import WorkerFacts

UNHELPFUL = WorkerUnhelpful(100, 1, 0.61, 0.48)


def fact(*, beside=1, num_restarts=3):
    return WorkerFacts("host", "cpu", 0, "host cpu", beside, num_restarts)


def told(facts, *, least=1, stop=None, **others):
    """What is told of an unhelpful rank 1, and what the next answer to all ranks says."""
    events, stop = [], stop or Stop()
    dropping = Dropping(
        events.append,
        facts,
        stop=lambda: stop,
        least=lambda: least,
        **{"has_peers": False, **others},
    )
    dropping(UNHELPFUL)
    return events, stop.answer(101, 101, 100)


def test_a_worker_with_a_torchrun_of_its_own_is_sent_away():
    """And everybody hears of it with the next answer, once."""
    events, answer = told([fact(), fact(), fact()], least=2)

    assert events == [UNHELPFUL, WorkerDropped(100, 1, "host")]
    assert (answer.stops, answer.leaving) == (True, 1)


@pytest.mark.parametrize(
    ("facts", "terms", "words"),
    [
        ([fact(), fact()], {"least": 2}, "1 workers would be left, fewer than the minimum of 2"),
        ([fact(), fact()], {"has_peers": True}, "a part of a copy"),
        ([fact(), fact()], {"has_servers": True}, "no launcher would restart the servers"),
        ([fact(beside=0)] * 2, {}, "not a child of torchrun"),
        ([fact(beside=2)] * 2, {}, "its torchrun has 2 workers"),
        ([fact(num_restarts=0), fact()], {}, "torchrun of rank 0 has no restart left"),
    ],
)
def test_it_is_kept_where_the_others_could_not_go_on(facts, terms, words):
    """With what is in the way; nobody stops."""
    events, answer = told(facts, **terms)

    assert events[0] == UNHELPFUL
    assert isinstance(events[1], WorkerKept)
    assert words in events[1].obstacle
    assert not answer.stops


@pytest.mark.parametrize("before", [Stop.ask, lambda stop: stop.send_away(0)])
def test_nobody_is_sent_away_once_the_run_stops(before):
    """For a notice, or for somebody else: what is told of a worker comes true."""
    stop = Stop()
    before(stop)
    events, answer = told([fact()] * 3, stop=stop)

    assert [type(event) for event in events] == [WorkerUnhelpful, WorkerKept]
    assert "stops already" in events[1].obstacle
    assert answer.leaving != 1


def test_nobody_is_where_nobody_asked_for_it():
    """The worker is named, as ever."""
    events, answer = told([fact(), fact()], least=None)

    assert events == [UNHELPFUL]
    assert not answer.stops


def test_all_ranks_agree_on_who_leaves():
    """A notice that was answered before stays as it was said: a stop of all."""
    first, other = Stop(), Stop()
    first.ask()
    other.hear(first.answer(5, 5, 5))
    first.send_away(1)
    other.hear(first.answer(6, 6, 6))

    assert first.leaving is other.leaving is None
    assert other.after == 5


TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x",
    "LOCAL_WORLD_SIZE": "4",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_RESTART_COUNT": "1",
}


@pytest.mark.parametrize(
    ("environment", "has_torchrun", "agent"),
    [
        ({}, True, Agent(0, 0)),
        ({"LOCAL_WORLD_SIZE": "4"}, True, Agent(0, 0)),
        (TORCHRUN, True, Agent(4, 2)),
        (TORCHRUN, False, Agent(0, 2)),
    ],
)
def test_what_torchrun_says_of_itself(environment, has_torchrun, agent):
    """Other launchers set some of its variables as well, and wrappers have all of them."""
    assert Agent.of(environment, has_torchrun=has_torchrun) == agent


@pytest.mark.slow
def test_a_program_between_torchrun_and_the_script_is_not_ended():
    """All its variables are torchrun's; it is none. The worker is kept there from the start."""
    script = (
        "import os, torch; from evenstep.torch._exchange import _agent as a, _startup as s; "
        "print(s.WorkerFacts.here(torch.device('cpu'), lag=0).beside); a.end_agent()"
    )
    wrapper = f'"{sys.executable}" -c "{script}"; echo goes on'
    done = subprocess.run(["sh", "-c", wrapper], env={**os.environ, **TORCHRUN}, stdout=-1)

    assert (done.returncode, done.stdout.split()) == (0, [b"0", b"goes", b"on"])


def test_at_least_one_worker_has_to_be_left():
    """A number that no cluster could have is refused."""
    with pytest.raises(ValueError, match="min_world_size"):
        Drain(Balancer(), drop_unhelpful=True, min_world_size=0)
